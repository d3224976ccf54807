#pragma once

#include <cstdint>
#include <span>
#include <string>

namespace octet::bytes_tokenizer {

/// The tokenizer of `octet pack`: ids 0 to 255 are the bytes of a text in any encoding, 256 ends a document.
inline constexpr const char* kName = "bytes";
inline constexpr std::int64_t kVocabulary = 257;
inline constexpr std::int32_t kEndOfDocument = 256;

/// Stands for the mapping in token files: XXH3-64 of a description of it, 16 hexadecimal digits.
std::string hash();

/// The text of some ids for a terminal: control characters other than tab and line feed appear as \xNN, ids
/// above 255 not at all.
std::string printable(std::span<const std::int32_t> ids);

}  // namespace octet::bytes_tokenizer
