#include "octet/data/random_tokens.h"

#include <algorithm>
#include <filesystem>
#include <vector>

#include "octet/base/error.h"
#include "octet/base/rng.h"
#include "octet/data/token_file.h"

namespace octet {

void write_random_tokens(const std::string& path, std::int64_t tokens, std::int64_t vocabulary,
                         std::uint64_t seed, bool overwrite, const std::string& command_line) {
  if (!overwrite && std::filesystem::exists(path))
    fail(ErrorKind::kUsage, "{} exists; --overwrite replaces it", path);
  TokenFileInfo info;
  info.vocabulary = vocabulary;
  info.token_bytes = 0;  // the narrowest that holds the vocabulary
  info.tokenizer = "random";
  info.source = "uniform random ids";
  info.command_line = command_line;
  TokenFileWriter writer(path, info);
  std::vector<std::int32_t> piece;
  for (std::int64_t at = 0; at < tokens;) {
    piece.resize(static_cast<std::size_t>(std::min<std::int64_t>(tokens - at, 1 << 20)));
    for (std::int32_t& id : piece) {
      // The high half of 64 random bits times the range: uniform to one part in 2^32.
      const std::uint64_t word = mix(seed, static_cast<std::uint64_t>(at++)) >> 32;
      id = static_cast<std::int32_t>((word * static_cast<std::uint64_t>(vocabulary)) >> 32);
    }
    writer.append(piece);
  }
  writer.end_document();
  writer.finish();
}

}  // namespace octet
