#include <fcntl.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <limits>

#include "hdf5_handle.h"
#include "octet/base/error.h"
#include "octet/data/token_file.h"
#include "token_format.h"

namespace octet {
namespace {

constexpr std::size_t kCopyBytes = 4 << 20;
constexpr hsize_t kAlignment = 65536;  ///< of datasets in the file, for direct reads

[[noreturn]] void fail_to_write(const std::string& path) {
  fail(ErrorKind::kData, "{}: cannot be written: {}", path, std::strerror(errno));
}

/// Bytes of a dataset whose length is not known yet, in a file of their own that vanishes with the object.
class SpillFile {
 public:
  explicit SpillFile(const std::string& path)
      : path_(path), file_(std::fopen(path.c_str(), "w+be"), std::fclose) {
    if (file_ == nullptr) fail_to_write(path_);
  }
  ~SpillFile() { unlink(path_.c_str()); }

  void append(const void* data, std::size_t bytes) {
    if (std::fwrite(data, 1, bytes, file_.get()) != bytes) fail_to_write(path_);
  }
  void copy_to(int descriptor, std::uint64_t offset, const std::string& target) {
    if (std::fflush(file_.get()) != 0) fail_to_write(path_);
    std::rewind(file_.get());
    std::vector<char> block(kCopyBytes);
    while (const std::size_t got = std::fread(block.data(), 1, block.size(), file_.get())) {
      for (std::size_t done = 0; done < got;) {
        const ssize_t put = pwrite(descriptor, block.data() + done, got - done, static_cast<off_t>(offset));
        if (put < 0 && errno == EINTR) continue;
        if (put < 0) fail_to_write(target);
        done += static_cast<std::size_t>(put);
        offset += static_cast<std::uint64_t>(put);
      }
    }
    if (std::ferror(file_.get())) fail(ErrorKind::kData, "{}: cannot be read back", path_);
  }

 private:
  std::string path_;
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> file_;
};

/// Creates a contiguous dataset whose space in the file exists at once.
hdf5::Dataset lay_out(hid_t file, const char* name, hid_t type, std::int64_t count) {
  const hsize_t size = static_cast<hsize_t>(count);
  hdf5::Space space(H5Screate_simple(1, &size, nullptr));
  hdf5::Properties properties(H5Pcreate(H5P_DATASET_CREATE));
  H5Pset_obj_track_times(properties, false);  // equal tokens give equal files
  H5Pset_layout(properties, H5D_CONTIGUOUS);
  H5Pset_alloc_time(properties, H5D_ALLOC_TIME_EARLY);
  H5Pset_fill_time(properties, H5D_FILL_TIME_NEVER);
  hdf5::Dataset dataset(H5Dcreate2(file, name, type, space, H5P_DEFAULT, properties, H5P_DEFAULT));
  if (!dataset.valid()) fail(ErrorKind::kData, "dataset /{} cannot be created: {}", name, hdf5::last_error());
  return dataset;
}

void write_offsets(hid_t file, const std::vector<std::uint64_t>& offsets) {
  const char* name = token_format::kDocuments;
  const hdf5::Dataset dataset = lay_out(file, name, H5T_STD_U64LE, static_cast<std::int64_t>(offsets.size()));
  if (H5Dwrite(dataset, H5T_NATIVE_UINT64, H5S_ALL, H5S_ALL, H5P_DEFAULT, offsets.data()) < 0)
    fail(ErrorKind::kData, "dataset /{} cannot be written: {}", name, hdf5::last_error());
}

void write_attributes(hid_t file, const TokenFileInfo& info) {
  namespace tf = token_format;
  hdf5::write_string(file, tf::kFormatAttribute, tf::kFormat);
  hdf5::write_integer(file, tf::kVersionAttribute, tf::kVersion);
  hdf5::write_integer(file, tf::kComplete, 0);
  hdf5::write_integer(file, tf::kVocabulary, info.vocabulary);
  hdf5::write_integer(file, tf::kEndOfDocument, info.end_of_document);
  hdf5::write_integer(file, tf::kTokenCount, info.tokens);
  hdf5::write_integer(file, tf::kDocumentCount, info.documents);
  hdf5::write_string(file, tf::kTokenizer, info.tokenizer);
  hdf5::write_string(file, tf::kTokenizerHash, info.tokenizer_hash);
  hdf5::write_string(file, tf::kSource, info.source);
  hdf5::write_string(file, tf::kCommandLine, info.command_line);
  hdf5::write_string(file, tf::kTokensHash, info.tokens_hash);
}

/// Syncs a file or directory to disk.
void sync(const std::string& path) {
  const int descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) fail_to_write(path);
  const bool synced = fsync(descriptor) == 0 || errno == EINVAL;  // EINVAL: the file system cannot sync these
  close(descriptor);
  if (!synced) fail_to_write(path);
}

void check_info(const std::string& path, const TokenFileInfo& info) {
  if (info.vocabulary < 1 || info.vocabulary > std::numeric_limits<std::int32_t>::max())
    fail(ErrorKind::kData, "{}: vocabulary is {}, expected 1 to {}", path, info.vocabulary,
         std::numeric_limits<std::int32_t>::max());
  if (info.token_bytes != 0 && info.token_bytes != 2 && info.token_bytes != 4)
    fail(ErrorKind::kData, "{}: tokens of {} bytes, expected 2 or 4", path, info.token_bytes);
  if (info.token_bytes == 2 && info.vocabulary > 65536)
    fail(ErrorKind::kData, "{}: a vocabulary of {} ids does not fit 2-byte tokens, which hold 65536", path,
         info.vocabulary);
  if (info.end_of_document < -1 || info.end_of_document >= info.vocabulary)
    fail(ErrorKind::kData, "{}: end_of_document is {}, expected -1 (none) or less than the vocabulary {}",
         path, info.end_of_document, info.vocabulary);
}

}  // namespace

struct TokenFileWriter::Impl {
  std::string path, partial;
  TokenFileInfo info;
  SpillFile tokens;
  std::unique_ptr<SpillFile> mask;
  std::vector<std::uint64_t> offsets = {0};
  std::unique_ptr<XXH3_state_t, decltype(&XXH3_freeState)> hash{XXH3_createState(), XXH3_freeState};
  std::vector<std::uint16_t> narrow;
  std::vector<std::uint8_t> ones;

  Impl(const std::string& target, const TokenFileInfo& described)
      : path(target), partial(target + ".partial"), info(described), tokens(target + ".tokens.partial") {
    OCTET_ASSERT(hash != nullptr);
    XXH3_64bits_reset(hash.get());
    if (info.token_bytes == 0) info.token_bytes = info.vocabulary <= 65536 ? 2 : 4;
    info.tokens = info.documents = 0;
    if (info.has_mask) mask = std::make_unique<SpillFile>(target + ".mask.partial");
  }
  ~Impl() { unlink(partial.c_str()); }

  void store(const void* data, std::size_t bytes) {
    tokens.append(data, bytes);
    XXH3_64bits_update(hash.get(), data, bytes);
  }

  void write_file() {
    namespace tf = token_format;
    const hdf5::Quiet quiet;
    hdf5::Properties access = hdf5::file_access();
    H5Pset_alignment(access, kAlignment, kAlignment);
    hdf5::Properties creation(H5Pcreate(H5P_FILE_CREATE));
    H5Pset_obj_track_times(creation, false);
    hdf5::File file(H5Fcreate(partial.c_str(), H5F_ACC_TRUNC, creation, access));
    if (!file.valid()) fail(ErrorKind::kData, "{}: cannot be created: {}", partial, hdf5::last_error());
    const hid_t type = info.token_bytes == 2 ? H5T_STD_U16LE : H5T_STD_U32LE;
    const haddr_t tokens_at = H5Dget_offset(lay_out(file, tf::kTokens, type, info.tokens));
    const haddr_t mask_at =
        mask ? H5Dget_offset(lay_out(file, tf::kLossMask, H5T_STD_U8LE, info.tokens)) : HADDR_UNDEF;
    write_offsets(file, offsets);
    write_attributes(file, info);
    if (!file.reset()) fail(ErrorKind::kData, "{}: cannot be closed: {}", partial, hdf5::last_error());

    const int descriptor = open(partial.c_str(), O_WRONLY | O_CLOEXEC);
    if (descriptor < 0) fail_to_write(partial);
    const std::unique_ptr<const int, void (*)(const int*)> closer(&descriptor,
                                                                  [](const int* d) { close(*d); });
    tokens.copy_to(descriptor, tokens_at, partial);
    if (mask) mask->copy_to(descriptor, mask_at, partial);
    if (fsync(descriptor) != 0) fail_to_write(partial);
  }

  void mark_complete() {
    const hdf5::Quiet quiet;
    const hdf5::Properties access = hdf5::file_access();
    hdf5::File file(H5Fopen(partial.c_str(), H5F_ACC_RDWR, access));
    if (!file.valid()) fail(ErrorKind::kData, "{}: cannot be reopened: {}", partial, hdf5::last_error());
    hdf5::write_integer(file, token_format::kComplete, 1);
    if (!file.reset()) fail(ErrorKind::kData, "{}: cannot be closed: {}", partial, hdf5::last_error());
    sync(partial);
  }
};

TokenFileWriter::TokenFileWriter(const std::string& path, const TokenFileInfo& info) {
  check_info(path, info);
  impl_ = std::make_unique<Impl>(path, info);
}

TokenFileWriter::~TokenFileWriter() = default;

void TokenFileWriter::append(std::span<const std::int32_t> tokens, std::span<const std::uint8_t> mask) {
  TokenFileInfo& info = impl_->info;
  OCTET_ASSERT(mask.empty() || (info.has_mask && mask.size() == tokens.size()));
  if (tokens.empty()) return;
  const auto bad = std::find_if(tokens.begin(), tokens.end(),
                                [&](std::int32_t id) { return id < 0 || id >= info.vocabulary; });
  if (bad != tokens.end())
    fail(ErrorKind::kData, "{}: document {}, offset {}: id {} is outside the vocabulary of {} ids",
         impl_->path, info.documents,
         info.tokens - static_cast<std::int64_t>(impl_->offsets.back()) + (bad - tokens.begin()), *bad,
         info.vocabulary);
  if (info.token_bytes == 2) {
    impl_->narrow.assign(tokens.begin(), tokens.end());
    impl_->store(impl_->narrow.data(), 2 * tokens.size());
  } else {
    impl_->store(tokens.data(), 4 * tokens.size());
  }
  if (impl_->mask != nullptr) {
    if (mask.empty()) impl_->ones.assign(tokens.size(), 1);
    impl_->mask->append(mask.empty() ? impl_->ones.data() : mask.data(), tokens.size());
  }
  info.tokens += static_cast<std::int64_t>(tokens.size());
}

void TokenFileWriter::end_document() {
  impl_->offsets.push_back(static_cast<std::uint64_t>(impl_->info.tokens));
  ++impl_->info.documents;
}

void TokenFileWriter::add_document(std::span<const std::int32_t> tokens, std::span<const std::uint8_t> mask) {
  append(tokens, mask);
  end_document();
}

void TokenFileWriter::finish() {
  OCTET_ASSERT(impl_->offsets.back() == static_cast<std::uint64_t>(impl_->info.tokens));
  impl_->info.tokens_hash = fmt::format("{:016x}", XXH3_64bits_digest(impl_->hash.get()));
  impl_->write_file();
  impl_->mark_complete();
  if (std::rename(impl_->partial.c_str(), impl_->path.c_str()) != 0) fail_to_write(impl_->path);
  const std::filesystem::path directory = std::filesystem::path(impl_->path).parent_path();
  sync(directory.empty() ? "." : directory.string());
}

}  // namespace octet
