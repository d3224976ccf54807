#pragma once

#include <cstdint>
#include <string>

namespace octet {

struct InspectOptions {
  std::int64_t document = 0;  ///< to show a sample of
  std::int64_t sequence = 0;  ///< tokens a sample, to count samples an epoch; 0: not asked
  bool check_hash = true;
};

/// A token file in words: counts, width, tokenizer, a histogram of document lengths, the entropy of single
/// tokens in nats, the beginning of a document. Reads the whole file and checks ids and hash. Throws
/// Error(kData) for damage, Error(kUsage) for a document that is not there.
std::string inspect_token_file(const std::string& path, const InspectOptions& options);

}  // namespace octet
