#pragma once

#include <cstddef>

namespace octet::cpu {

/// Products of bfloat16 go by square float32 blocks of this many rows: one of each operand, one of the
/// output.
inline constexpr int kMatmulBlock = 256;
inline constexpr std::size_t kMatmulScratch = std::size_t{3} * kMatmulBlock * kMatmulBlock;

}  // namespace octet::cpu
