#pragma once

#include <algorithm>
#include <cmath>

#include "../optimizer_state.h"
#include "octet/ops/ops.h"

// Optimizer state between float32 and narrower forms.
namespace octet::cpu {

/// values = what bfloat16 moments, codes or split masters stand for.
void widen(const NarrowState& state, float* values);

/// Splits masters into parameters and remainders.
void narrow_master(const float* values, const NarrowState& state);

/// Codes of values that all belong to one block, and its scale. random(i), below 65536, rounds element i.
template <typename Random>
void narrow_codes(const float* values, const NarrowState& state, Random random) {
  const std::int64_t count = state.stored.size();
  float largest = 0.0f;
  for (std::int64_t i = 0; i < count; ++i) largest = std::max(largest, std::fabs(values[i]));
  const float scale = narrow::scale_of(largest), inverse = 1.0f / scale;
  state.companion.as<float>()[0] = scale;
  if (state.stored.dtype == DType::kI8) {
    auto* const to = state.stored.as<std::int8_t>();
    for (std::int64_t i = 0; i < count; ++i)
      to[i] = narrow::to_first_code(values[i], scale, inverse, random(i));
  } else {
    auto* const to = state.stored.as<std::uint8_t>();
    for (std::int64_t i = 0; i < count; ++i)
      to[i] = narrow::to_second_code(values[i], scale, inverse, random(i));
  }
}

}  // namespace octet::cpu
