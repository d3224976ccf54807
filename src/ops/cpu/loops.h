#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "octet/base/tensor.h"

// What the loops of the CPU operators share. They are written so that compilers vectorise them without
// relaxed floating-point rules: sums and maxima run in a fixed number of lanes, exp is a polynomial.
namespace octet::cpu {

/// Calls function(float{}) or function(BF16{}), as the elements are stored.
template <typename Function>
void with_type(DType dtype, Function&& function) {
  OCTET_ASSERT(dtype == DType::kF32 || dtype == DType::kBF16);
  if (dtype == DType::kF32) {
    function(float{});
  } else {
    function(BF16{});
  }
}

inline constexpr int kLanes = 8;

/// Sum of value(i) for i in [0, count), in float64.
template <typename Value>
double sum(std::int64_t count, Value value) {
  double lanes[kLanes] = {};
  const std::int64_t whole = count - count % kLanes;
  for (std::int64_t i = 0; i < whole; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += static_cast<double>(value(i + lane));
  }
  for (std::int64_t i = whole; i < count; ++i) lanes[i - whole] += static_cast<double>(value(i));
  double total = 0.0;
  for (const double lane : lanes) total += lane;
  return total;
}

/// Largest value(i) for i in [0, count), -inf when there is none. NaNs are passed over.
template <typename Value>
float largest(std::int64_t count, Value value) {
  float lanes[kLanes];
  std::fill_n(lanes, kLanes, -std::numeric_limits<float>::infinity());
  const std::int64_t whole = count - count % kLanes;
  for (std::int64_t i = 0; i < whole; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = std::max(lanes[lane], value(i + lane));
  }
  for (std::int64_t i = whole; i < count; ++i) lanes[i - whole] = std::max(lanes[i - whole], value(i));
  return *std::max_element(lanes, lanes + kLanes);
}

/// Raises `largest`, where it is given, to the largest magnitude in `values`.
template <typename T>
void raise_largest(const Tensor& largest, const T* values, std::int64_t count) {
  if (!largest) return;
  float& raised = largest.as<float>()[0];
  raised = std::max(
      raised, cpu::largest(count, [&](std::int64_t i) { return std::fabs(static_cast<float>(values[i])); }));
}

/// out[j] (+)= sum over rows of column j, in float64. add_row(row, begin, count, sums) adds columns
/// [begin, begin + count) of a row to sums[0 … count).
template <typename AddRow>
void sum_columns(std::int64_t rows, std::int64_t cols, float* out, bool accumulate, AddRow add_row) {
  constexpr std::int64_t kChunk = 512;
  double sums[kChunk];
  for (std::int64_t begin = 0; begin < cols; begin += kChunk) {
    const std::int64_t count = std::min(kChunk, cols - begin);
    std::fill_n(sums, count, 0.0);
    for (std::int64_t row = 0; row < rows; ++row) add_row(row, begin, count, sums);
    for (std::int64_t j = 0; j < count; ++j) {
      out[begin + j] = static_cast<float>(sums[j] + (accumulate ? static_cast<double>(out[begin + j]) : 0.0));
    }
  }
}

/// condition ? a : b by a mask. Of the operator, compilers make a branch that keeps a loop from being
/// vectorised.
inline float select(bool condition, float a, float b) {
  const std::uint32_t mask = 0u - static_cast<std::uint32_t>(condition);
  return std::bit_cast<float>((std::bit_cast<std::uint32_t>(a) & mask) |
                              (std::bit_cast<std::uint32_t>(b) & ~mask));
}

/// e^x to about 2 units in the last place: x = n·ln2 + r, and the Taylor series of e^r on |r| <= ln2 / 2.
/// Exactly 1 at 0; NaN for NaN. The bounds give 0 and infinity, and lie where e^x does already.
inline float exp(float x) {
  constexpr float kLowest = -105.0f, kHighest = 89.0f;
  constexpr float kShift = 12582912.0f;  // 1.5 · 2^23: adding it rounds to an integer held in the low bits
  constexpr float kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;  // the high part times n is exact
  const float bounded = select(x > kHighest, kHighest, select(x < kLowest, kLowest, x));
  const float shifted = bounded * 1.44269504f + kShift;
  const float n = shifted - kShift;
  const float r = (bounded - n * kLn2High) - n * kLn2Low;
  float series = 1.0f / 5040.0f;
  series = series * r + 1.0f / 720.0f;
  series = series * r + 1.0f / 120.0f;
  series = series * r + 1.0f / 24.0f;
  series = series * r + 1.0f / 6.0f;
  series = series * r + 0.5f;
  series = series * r + 1.0f;
  series = series * r + 1.0f;
  // 2^n in two factors, since n runs from -151 to 128.
  const std::uint32_t biased =
      std::bit_cast<std::uint32_t>(shifted) - std::bit_cast<std::uint32_t>(kShift) + 254u;
  const std::uint32_t half = biased / 2u;
  return series * std::bit_cast<float>(half << 23) * std::bit_cast<float>((biased - half) << 23);
}

inline float sigmoid(float x) {
  return 1.0f / (1.0f + exp(-x));
}

}  // namespace octet::cpu
