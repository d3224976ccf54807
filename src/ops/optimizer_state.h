#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "octet/base/host_device.h"
#include "octet/base/rng.h"

// How optimizer state is kept in less than float32: the formulas of octet/ops/ops.h, the same text for all
// backends. bfloat16 is its bits here.
namespace octet::narrow {

OCTET_HOST_DEVICE inline std::uint32_t bits_of(float value) {
  std::uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

OCTET_HOST_DEVICE inline float float_of(std::uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

OCTET_HOST_DEVICE inline bool is_nan(std::uint32_t bits) {
  return (bits & 0x7fffffffu) > 0x7f800000u;
}

OCTET_HOST_DEVICE inline float from_bf16(std::uint16_t bits) {
  return float_of(static_cast<std::uint32_t>(bits) << 16);
}

/// Rounded to nearest even.
OCTET_HOST_DEVICE inline std::uint16_t to_bf16(float value) {
  const std::uint32_t bits = bits_of(value);
  if (is_nan(bits)) return static_cast<std::uint16_t>((bits >> 16) | 0x40u);
  return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

/// Rounded away from zero by as many of 65536 values of `random` (below 65536) as the dropped 16 bits say:
/// the mean over all of them is `value`.
OCTET_HOST_DEVICE inline std::uint16_t to_bf16_by_chance(float value, std::uint32_t random) {
  const std::uint32_t bits = bits_of(value);
  if (is_nan(bits)) return static_cast<std::uint16_t>((bits >> 16) | 0x40u);
  return static_cast<std::uint16_t>((bits + random) >> 16);
}

struct SplitMaster {
  std::uint16_t parameter;  ///< the master rounded to nearest even
  std::int16_t remainder;
};

OCTET_HOST_DEVICE inline SplitMaster split(float master) {
  std::uint32_t bits = bits_of(master);
  const std::uint16_t parameter = to_bf16(master);
  if (is_nan(bits)) return {parameter, 0};
  const bool tie_rounded_down = (bits & 0x1ffffu) == 0x8000u;
  if (tie_rounded_down) bits -= 1u;
  return {parameter, static_cast<std::int16_t>(bits - (static_cast<std::uint32_t>(parameter) << 16))};
}

OCTET_HOST_DEVICE inline float join(SplitMaster split) {
  return float_of((static_cast<std::uint32_t>(split.parameter) << 16) +
                  static_cast<std::uint32_t>(static_cast<std::int32_t>(split.remainder)));
}

/// The scale of a block of codes. From 2^-90 on, products with the smallest codes are normal numbers, so that
/// what codes stand for finds them again.
OCTET_HOST_DEVICE inline float scale_of(float largest) {
  constexpr float kSmallest = 8.0779356694631609e-28f;
  return largest < kSmallest ? 0.0f : largest;
}

/// What decides between the two codes next to a value: the upper one if more than random / 65536 of the way
/// to it is gone.
inline constexpr std::uint32_t kNearest = 32768;

/// A root within some units in the last place, which serves to find a code: its neighbour is tried too.
OCTET_HOST_DEVICE inline float root_of(float x) {
#if defined(__CUDA_ARCH__)
  float root;
  asm("sqrt.approx.f32 %0, %1;" : "=f"(root) : "f"(x));
  return root;
#else
  return std::sqrt(x);
#endif
}

OCTET_HOST_DEVICE inline float from_first_code(std::int8_t code, float scale) {
  const float size = static_cast<float>(code < 0 ? -code : code);
  const float magnitude = size == 127.0f ? scale : scale * (size * size * (1.0f / 16129.0f));
  return code < 0 ? -magnitude : magnitude;
}

/// inverse: 1 / scale. What is not below the scale, NaN included, gets the largest code.
OCTET_HOST_DEVICE inline std::int8_t to_first_code(float value, float scale, float inverse,
                                                   std::uint32_t random) {
  if (scale == 0.0f) return 0;
  const float magnitude = fabsf(value);
  int code = 127;
  if (magnitude < scale) {
    const float fraction = magnitude * inverse;
    code = static_cast<int>(root_of(fraction) * 127.0f);
    if (code > 126) code = 126;
    const float gone = fraction * 16129.0f - static_cast<float>(code * code);
    if (gone * 65536.0f > static_cast<float>(random) * static_cast<float>(2 * code + 1)) ++code;
  }
  return static_cast<std::int8_t>(value < 0.0f ? -code : code);
}

OCTET_HOST_DEVICE inline float fourth_power(float x) {
  return (x * x) * (x * x);
}

OCTET_HOST_DEVICE inline float from_second_code(std::uint8_t code, float scale) {
  return code == 255 ? scale : scale * fourth_power(static_cast<float>(code) * (1.0f / 255.0f));
}

/// Never 0 for a value above zero: dividing by its root would blow the update up.
OCTET_HOST_DEVICE inline std::uint8_t to_second_code(float value, float scale, float inverse,
                                                     std::uint32_t random) {
  if (scale == 0.0f || value == 0.0f) return 0;
  if (!(value < scale)) return 255;
  const float fraction = value * inverse;
  int code = static_cast<int>(root_of(root_of(fraction)) * 255.0f);
  if (code < 1) return 1;
  if (code > 254) code = 254;
  const float below = fourth_power(static_cast<float>(code) * (1.0f / 255.0f));
  const float above = fourth_power(static_cast<float>(code + 1) * (1.0f / 255.0f));
  if ((fraction - below) * 65536.0f > static_cast<float>(random) * (above - below)) ++code;
  return static_cast<std::uint8_t>(code);
}

/// Random bits of the eight elements from global element 8·eight on, for rounding_word().
OCTET_HOST_DEVICE inline PhiloxWords rounding_words(std::uint64_t key, std::int64_t eight,
                                                    std::int64_t updates) {
  return philox(key, static_cast<std::uint64_t>(eight), static_cast<std::uint64_t>(updates));
}

/// The random numbers of the n-th of eight elements, below 65536 each: the lower half is for the first
/// moment, the upper one, its complement, for the second.
OCTET_HOST_DEVICE inline std::uint32_t rounding_word(const PhiloxWords& words, int n) {
  const std::uint32_t pair = words.word[n / 2], random = n % 2 == 0 ? pair & 0xffffu : pair >> 16;
  return random | (random ^ 0xffffu) << 16;
}

}  // namespace octet::narrow
