#include "octet/data/packer.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string_view>
#include <thread>

#include "input_files.h"
#include "octet/base/error.h"
#include "octet/base/rng.h"
#include "octet/data/bytes_tokenizer.h"
#include "octet/data/token_file.h"
#include "piece_reader.h"
#include "progress_bar.h"

namespace octet {
namespace {

namespace fs = std::filesystem;

/// A token file being written, and its statistics.
class SplitWriter {
 public:
  SplitWriter(const std::string& path, const TokenFileInfo& info) : writer_(path, info) {}

  void add(std::string_view text) {
    for (const char c : text) put(static_cast<unsigned char>(c));
    summary_.bytes += static_cast<std::int64_t>(text.size());
    if (buffer_.size() >= kBuffered) flush();
  }
  void end_document() {
    put(bytes_tokenizer::kEndOfDocument);
    flush();
    writer_.end_document();
    ++summary_.documents;
  }
  std::int64_t documents() const { return summary_.documents; }
  PackedSplit finish() {
    writer_.finish();
    for (const std::int64_t count : counts_) {
      if (count == 0) continue;
      const double share = static_cast<double>(count) / static_cast<double>(summary_.tokens);
      summary_.entropy -= share * std::log(share);
    }
    return summary_;
  }

 private:
  static constexpr std::size_t kBuffered = 1 << 20;

  void put(std::int32_t id) {
    buffer_.push_back(id);
    ++counts_[static_cast<std::size_t>(id)];
  }
  void flush() {
    writer_.append(buffer_);
    summary_.tokens += static_cast<std::int64_t>(buffer_.size());
    buffer_.clear();
  }

  TokenFileWriter writer_;
  std::vector<std::int32_t> buffer_;
  std::array<std::int64_t, bytes_tokenizer::kVocabulary> counts_ = {};
  PackedSplit summary_;
};

/// Sends each document to training or validation, by its number.
class DocumentSorter {
 public:
  DocumentSorter(SplitWriter& train, SplitWriter* validation, double fraction, std::uint64_t seed)
      : train_(train), validation_(validation), fraction_(fraction), seed_(seed) {}

  void add(std::string_view text) {
    if (text.empty()) return;
    if (current_ == nullptr) current_ = for_validation() ? validation_ : &train_;
    current_->add(text);
  }
  void end_document() {
    if (current_ == nullptr) return;
    current_->end_document();
    current_ = nullptr;
    ++number_;
  }

 private:
  bool for_validation() const {
    if (validation_ == nullptr || number_ == 0) return false;
    return number_ == 1 || std::ldexp(static_cast<double>(mix(seed_, number_) >> 11), -53) < fraction_;
  }

  SplitWriter& train_;
  SplitWriter* validation_;
  double fraction_;
  std::uint64_t seed_;
  std::uint64_t number_ = 0;
  SplitWriter* current_ = nullptr;  ///< of the document being read; null before its first byte
};

/// Cuts a stream of pieces into documents at lines equal to a separator, wherever the pieces end.
class LineSplitter {
 public:
  LineSplitter(std::string separator, DocumentSorter& documents)
      : separator_(std::move(separator)), documents_(documents) {}

  void add(std::string_view piece) {
    while (!piece.empty()) {
      const std::size_t end = piece.find('\n');
      const std::string_view part = piece.substr(0, end == piece.npos ? end : end + 1);
      piece.remove_prefix(part.size());
      line_ += part;
      const bool complete = end != piece.npos;
      if (complete || line_.size() > separator_.size() + 2) take_line(complete);
    }
  }
  void end_file() {
    take_line(true);
    documents_.end_document();
  }

 private:
  void take_line(bool complete) {
    std::string_view bare = line_;
    if (bare.ends_with('\n')) bare.remove_suffix(1);
    if (bare.ends_with('\r')) bare.remove_suffix(1);
    if (complete && at_line_start_ && bare == separator_)
      documents_.end_document();
    else
      documents_.add(line_);
    line_.clear();
    at_line_start_ = complete;
  }

  std::string separator_;
  DocumentSorter& documents_;
  std::string line_;  ///< read but not yet known to be text or separator
  bool at_line_start_ = true;
};

void check_output(const std::string& path, bool overwrite) {
  const fs::path parent = fs::path(path).parent_path();
  const std::string directory = parent.empty() ? "." : parent.string();
  if (!fs::is_directory(directory))
    fail(ErrorKind::kUsage, "output {}: there is no directory {}", path, directory);
  if (access(directory.c_str(), W_OK | X_OK) != 0)
    fail(ErrorKind::kUsage, "output {}: directory {} cannot be written: {}", path, directory,
         std::strerror(errno));
  if (fs::is_directory(path)) fail(ErrorKind::kUsage, "output {} is a directory, expected a file name", path);
  if (fs::exists(path) && !overwrite)
    fail(ErrorKind::kUsage, "output {} exists; --overwrite replaces it", path);
}

void check_options(const PackOptions& options) {
  if (options.inputs.empty()) fail(ErrorKind::kUsage, "no input given; name files or directories of text");
  if (options.output.empty()) fail(ErrorKind::kUsage, "no output given");
  if (options.threads < 0)
    fail(ErrorKind::kUsage, "threads is {}, expected 0 (one a core) or more", options.threads);
  if (options.separator &&
      (options.separator->empty() || options.separator->find_first_of("\r\n") != std::string::npos))
    fail(ErrorKind::kUsage, "the separator is empty or has a line break; expected the text of one line");
  check_output(options.output, options.overwrite);
  if (options.validation.empty()) return;
  if (!(options.validation_fraction > 0.0 && options.validation_fraction < 1.0))
    fail(ErrorKind::kUsage, "the validation fraction is {}, expected more than 0 and less than 1",
         options.validation_fraction);
  check_output(options.validation, options.overwrite);
  if (fs::weakly_canonical(options.output) == fs::weakly_canonical(options.validation))
    fail(ErrorKind::kUsage, "output and validation are the same file, {}", options.output);
}

void check_not_an_input(const std::string& output, const InputFiles& inputs) {
  if (output.empty() || !fs::exists(output)) return;
  for (const InputFile& file : inputs.files)
    if (fs::equivalent(output, file.path)) fail(ErrorKind::kUsage, "output {} is one of the inputs", output);
}

TokenFileInfo describe(const PackOptions& options) {
  constexpr std::size_t kNamed = 8;
  TokenFileInfo info;
  info.vocabulary = bytes_tokenizer::kVocabulary;
  info.end_of_document = bytes_tokenizer::kEndOfDocument;
  info.tokenizer = bytes_tokenizer::kName;
  info.tokenizer_hash = bytes_tokenizer::hash();
  const std::size_t named = std::min(kNamed, options.inputs.size());
  info.source = fmt::format(
      "{}",
      fmt::join(options.inputs.begin(), options.inputs.begin() + static_cast<std::ptrdiff_t>(named), ", "));
  if (named < options.inputs.size())
    info.source += fmt::format(" and {} more", options.inputs.size() - named);
  info.command_line = options.command_line;
  return info;
}

int reader_threads(const PackOptions& options) {
  if (options.threads > 0) return options.threads;
  return static_cast<int>(std::clamp(std::thread::hardware_concurrency(), 1u, 8u));
}

/// Without a separator: a file is a document, except that byte `cut` of the stream (when not negative) begins
/// a new one.
void read_whole_files(PieceReader& reader, std::int64_t cut, DocumentSorter& documents,
                      ProgressBar& progress) {
  std::int64_t done = 0;
  while (const PieceReader::Piece* piece = reader.next()) {
    const std::string_view text = piece->text;
    const auto size = static_cast<std::int64_t>(text.size());
    if (cut >= done && cut < done + size) {
      documents.add(text.substr(0, static_cast<std::size_t>(cut - done)));
      documents.end_document();
      documents.add(text.substr(static_cast<std::size_t>(cut - done)));
    } else {
      documents.add(text);
    }
    if (piece->ends_file) documents.end_document();
    progress.update(done += size);
  }
}

void read_separated(PieceReader& reader, const std::string& separator, DocumentSorter& documents,
                    ProgressBar& progress) {
  LineSplitter splitter(separator, documents);
  std::int64_t done = 0;
  while (const PieceReader::Piece* piece = reader.next()) {
    splitter.add(piece->text);
    if (piece->ends_file) splitter.end_file();
    progress.update(done += static_cast<std::int64_t>(piece->text.size()));
  }
}

}  // namespace

double PackSummary::megabytes_per_second() const {
  return seconds > 0.0 ? static_cast<double>(train.bytes + validation.bytes) / seconds / 1e6 : 0.0;
}

PackSummary pack(const PackOptions& options) {
  check_options(options);
  const InputFiles inputs = find_input_files(options.inputs);
  if (inputs.files.empty())
    fail(ErrorKind::kData, "no text found in {}: {} binary and no other file that is not empty",
         fmt::join(options.inputs, ", "), inputs.binary);
  check_not_an_input(options.output, inputs);
  check_not_an_input(options.validation, inputs);

  const TokenFileInfo info = describe(options);
  SplitWriter train(options.output, info);
  const auto validation =
      options.validation.empty() ? nullptr : std::make_unique<SplitWriter>(options.validation, info);
  DocumentSorter documents(train, validation.get(), options.validation_fraction, options.seed);
  ProgressBar progress(inputs.bytes, options.progress);
  PieceReader reader(inputs.files, reader_threads(options));
  if (options.separator) {
    read_separated(reader, *options.separator, documents, progress);
  } else {
    const bool cut_one = validation != nullptr && inputs.files.size() == 1;
    const double kept = static_cast<double>(inputs.bytes) * (1.0 - options.validation_fraction);
    read_whole_files(reader, cut_one ? static_cast<std::int64_t>(kept) : -1, documents, progress);
  }
  if (train.documents() == 0)
    fail(ErrorKind::kData, "no text found in {}: {} files hold only separators",
         fmt::join(options.inputs, ", "), inputs.files.size());
  if (validation != nullptr && validation->documents() == 0)
    fail(ErrorKind::kData, "only one document in {}; training and validation need one each",
         fmt::join(options.inputs, ", "));

  PackSummary summary;
  summary.train = train.finish();
  if (validation != nullptr) summary.validation = validation->finish();
  summary.files = static_cast<std::int64_t>(inputs.files.size());
  summary.binary_files = inputs.binary;
  summary.first_binary_file = inputs.first_binary;
  summary.repeated_files = inputs.repeated;
  summary.seconds = progress.seconds();
  return summary;
}

}  // namespace octet
