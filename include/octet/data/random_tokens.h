#pragma once

#include <cstdint>
#include <string>

namespace octet {

/// Writes a token file of uniformly random ids below `vocabulary`, as one document: for measurements, where
/// what is learnt does not matter. Equal for equal seeds. Throws Error(kData).
void write_random_tokens(const std::string& path, std::int64_t tokens, std::int64_t vocabulary,
                         std::uint64_t seed, bool overwrite, const std::string& command_line);

}  // namespace octet
