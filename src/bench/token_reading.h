#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "octet/bench/session.h"
#include "octet/data/token_file.h"

namespace octet {

/// Tokens [begin, begin + count) of a file, from elsewhere than the batch loader.
using TokenSource = std::function<std::vector<std::int32_t>(std::int64_t begin, std::int64_t count)>;

/// Writes a token file of ids that follow from their place, with room for some steps of the deck.
void write_known_tokens(const BenchSession& session, const std::string& path);
TokenSource known_tokens(const BenchSession& session);
/// Those of a file, read without the loader.
TokenSource tokens_of_file(const std::string& path);

/// What this rank's loader handed out.
struct TokenReading {
  std::int64_t tokens = 0;
  double seconds = 0.0;
  bool correct = true;  ///< the last step's ids are those that the sample order asks for
};

/// Takes steps from a batch loader as fast as they come. Throws Error(kData).
TokenReading read_tokens(BenchSession& session, const TokenFile& file, const TokenSource& source);

}  // namespace octet
