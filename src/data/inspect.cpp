#include "octet/data/inspect.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <iterator>
#include <map>
#include <span>
#include <vector>

#include "octet/base/error.h"
#include "octet/data/batch_loader.h"
#include "octet/data/bytes_tokenizer.h"
#include "octet/data/token_file.h"

namespace octet {
namespace {

constexpr std::int64_t kBlock = 65536;      ///< tokens read in one go
constexpr std::int64_t kShownBytes = 1000;  ///< of a document of text
constexpr std::int64_t kShownIds = 100;     ///< of a document of another tokenizer
constexpr std::int64_t kBarWidth = 40;

/// How often each id occurs. Throws Error(kData) for an id outside the vocabulary.
std::vector<std::int64_t> count_ids(const TokenFile& file) {
  std::vector<std::int64_t> counts;
  std::vector<std::int32_t> block(static_cast<std::size_t>(kBlock));
  for (std::int64_t begin = 0; begin < file.info().tokens; begin += kBlock) {
    const std::span<std::int32_t> part(
        block.data(), static_cast<std::size_t>(std::min(kBlock, file.info().tokens - begin)));
    file.read(begin, part);
    file.check_range(begin, part, file.info().vocabulary);
    const auto largest = static_cast<std::size_t>(*std::max_element(part.begin(), part.end()));
    if (largest >= counts.size()) counts.resize(largest + 1);
    for (const std::int32_t id : part) ++counts[static_cast<std::size_t>(id)];
  }
  return counts;
}

/// -Σ p ln p, nats/token.
double entropy(const std::vector<std::int64_t>& counts, std::int64_t tokens) {
  double sum = 0.0;
  for (const std::int64_t count : counts) {
    if (count == 0) continue;
    const double share = static_cast<double>(count) / static_cast<double>(tokens);
    sum -= share * std::log(share);
  }
  return sum;
}

/// Document lengths in buckets of powers of two: 0, 1, 2-3, 4-7, ...
std::string length_histogram(std::span<const std::uint64_t> offsets) {
  std::map<int, std::int64_t> buckets;
  for (std::size_t d = 0; d + 1 < offsets.size(); ++d) ++buckets[std::bit_width(offsets[d + 1] - offsets[d])];
  if (buckets.empty()) return "";
  std::int64_t most = 0;
  for (const auto& [width, count] : buckets) most = std::max(most, count);
  std::string text = "document lengths, tokens:\n";
  for (int width = buckets.begin()->first; width <= buckets.rbegin()->first; ++width) {
    const std::uint64_t low = width == 0 ? 0 : std::uint64_t{1} << (width - 1);
    const std::uint64_t high = width < 2 ? low : 2 * low - 1;
    const std::int64_t count = buckets[width];
    const std::int64_t bar = (count * kBarWidth + most - 1) / most;
    text += fmt::format("  {:>12} - {:<12} {:>10} {:#<{}}\n", low, high, count, "", bar);
  }
  return text;
}

std::string sample_of_document(const TokenFile& file, std::int64_t document) {
  const auto begin = static_cast<std::int64_t>(file.offsets()[static_cast<std::size_t>(document)]);
  const auto end = static_cast<std::int64_t>(file.offsets()[static_cast<std::size_t>(document) + 1]);
  const bool is_text = file.info().tokenizer == bytes_tokenizer::kName;
  const std::int64_t shown = std::min(end - begin, is_text ? kShownBytes : kShownIds);
  std::vector<std::int32_t> ids(static_cast<std::size_t>(shown));
  file.read(begin, ids);
  std::string text = fmt::format("document {}, {} tokens{}:\n", document, end - begin,
                                 shown < end - begin ? fmt::format(", the first {}", shown) : "");
  text += is_text ? bytes_tokenizer::printable(ids) : fmt::format("{}", fmt::join(ids, " "));
  if (!text.ends_with('\n')) text += '\n';
  return text;
}

std::string check_hash(const TokenFile& file) {
  const std::string& expected = file.info().tokens_hash;
  if (expected.empty()) return "none stored";
  const std::string actual = file.hash();
  if (actual != expected)
    fail(ErrorKind::kData, "{}: hash FAILED: XXH3-64 of the tokens is {}, the file says {}; it is damaged",
         file.path(), actual, expected);
  return expected + " OK";
}

std::string or_none(const std::string& text) {
  return text.empty() ? "-" : text;
}

}  // namespace

std::string inspect_token_file(const std::string& path, const InspectOptions& options) {
  const TokenFile file(path);
  const TokenFileInfo& info = file.info();
  if (options.document < 0 || (options.document >= info.documents && options.document > 0))
    fail(ErrorKind::kUsage, "{}: there is no document {}; the file has {}", path, options.document,
         info.documents);
  const std::string hash = options.check_hash ? check_hash(file) : "not checked";
  const std::vector<std::int64_t> counts = count_ids(file);

  std::string text;
  const auto line = [&](const char* name, const auto& value) {
    text += fmt::format("{:<17} {}\n", name, value);
  };
  line("token file", path);
  line("tokens", info.tokens);
  line("documents", info.documents);
  line("token type", info.token_bytes == 2 ? "uint16" : "uint32");
  line("vocabulary", info.vocabulary);
  line("ids", fmt::format("{} of {} occur, all inside the vocabulary",
                          std::count_if(counts.begin(), counts.end(), [](std::int64_t c) { return c > 0; }),
                          info.vocabulary));
  line("end of document", info.end_of_document < 0 ? "none" : fmt::format("id {}", info.end_of_document));
  line("loss mask", info.has_mask ? "yes" : "no");
  line("tokenizer", fmt::format("{} ({})", or_none(info.tokenizer), or_none(info.tokenizer_hash)));
  line("source", or_none(info.source));
  line("command", or_none(info.command_line));
  line("hash", hash);
  line("unigram entropy", fmt::format("{:.4f} nats/token", entropy(counts, info.tokens)));
  if (options.sequence > 0)
    line("samples",
         fmt::format("{} an epoch of {} tokens each", samples_in(file, options.sequence), options.sequence));
  text += length_histogram(file.offsets());
  if (info.documents > 0) text += sample_of_document(file, options.document);
  return text;
}

}  // namespace octet
