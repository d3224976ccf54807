#pragma once

#include <cstddef>

#include "octet/ops/ops.h"

namespace octet::cpu {

/// Attention goes by blocks of this many query rows against all keys up to the last of them.
inline constexpr std::int64_t kQueryBlock = 128;

/// float32 words that attention_backward needs: q, k, v, dout, dk, dv of a head, and for one block of rows
/// the probabilities, their gradients and dq. The forward pass needs less.
inline std::size_t attention_scratch_size(const AttentionShape& shape) {
  const std::int64_t head = shape.sequence * shape.layout.head_size;
  const std::int64_t block = kQueryBlock * (2 * shape.sequence + shape.layout.head_size);
  return static_cast<std::size_t>(6 * head + block);
}

}  // namespace octet::cpu
