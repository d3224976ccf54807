#include "octet/data/bytes_tokenizer.h"

#include <fmt/format.h>
#include <xxhash.h>

#include <string_view>

namespace octet::bytes_tokenizer {

std::string hash() {
  constexpr std::string_view kDescription = "bytes: id = byte for 0..255; 256 = end of document";
  return fmt::format("{:016x}", XXH3_64bits(kDescription.data(), kDescription.size()));
}

std::string printable(std::span<const std::int32_t> ids) {
  std::string text;
  for (const std::int32_t id : ids) {
    if (id < 0 || id > 255) continue;
    const bool control = (id < 32 && id != '\n' && id != '\t') || id == 127;
    if (control)
      text += fmt::format("\\x{:02x}", id);
    else
      text += static_cast<char>(id);
  }
  return text;
}

}  // namespace octet::bytes_tokenizer
