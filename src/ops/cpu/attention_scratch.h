#pragma once

#include <cstddef>

#include "octet/ops/ops.h"

namespace octet::cpu {

/// Attention goes by blocks of this many query rows against all keys up to the last of them.
inline constexpr std::int64_t kQueryBlock = 128;

/// float32 words that attention_backward needs: q, dout, k, v, dk, dv of a head, and for one block of rows
/// the probabilities, their gradients and dq. The forward pass needs less.
inline std::size_t attention_scratch_size(const AttentionShape& shape) {
  const std::int64_t keys = shape.key_rows(), size = shape.layout.head_size;
  const std::int64_t heads = (2 * shape.sequence + 4 * keys) * size;
  return static_cast<std::size_t>(heads + kQueryBlock * (2 * keys + size));
}

}  // namespace octet::cpu
