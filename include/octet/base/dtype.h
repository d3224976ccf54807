#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace octet {

/// Element types of tensors.
enum class DType : std::uint8_t { kF32, kBF16, kI32, kF64, kE4M3, kE5M2, kI16, kI8, kU8 };

constexpr std::int64_t size_of(DType type) {
  switch (type) {
    case DType::kF32:
      return 4;
    case DType::kBF16:
      return 2;
    case DType::kI32:
      return 4;
    case DType::kF64:
      return 8;
    case DType::kI16:
      return 2;
    case DType::kE4M3:
    case DType::kE5M2:
    case DType::kI8:
    case DType::kU8:
      return 1;
  }
  return 0;
}

constexpr bool is_float8(DType type) {
  return type == DType::kE4M3 || type == DType::kE5M2;
}

/// Name as users read it: float32, bfloat16, int32, float64, float8_e4m3, float8_e5m2, int16, int8, uint8.
constexpr const char* name_of(DType type) {
  switch (type) {
    case DType::kF32:
      return "float32";
    case DType::kBF16:
      return "bfloat16";
    case DType::kI32:
      return "int32";
    case DType::kF64:
      return "float64";
    case DType::kE4M3:
      return "float8_e4m3";
    case DType::kE5M2:
      return "float8_e5m2";
    case DType::kI16:
      return "int16";
    case DType::kI8:
      return "int8";
    case DType::kU8:
      return "uint8";
  }
  return "?";
}

/// bfloat16: the upper half of an IEEE float32, rounded to nearest even.
struct BF16 {
  std::uint16_t bits = 0;

  BF16() = default;
  explicit BF16(float value) {
    std::uint32_t word;
    std::memcpy(&word, &value, sizeof word);
    const bool nan = (word & 0x7fffffffu) > 0x7f800000u;
    bits = nan ? static_cast<std::uint16_t>((word >> 16) | 0x40u)
               : static_cast<std::uint16_t>((word + 0x7fffu + ((word >> 16) & 1u)) >> 16);
  }
  explicit operator float() const {
    const std::uint32_t word = static_cast<std::uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &word, sizeof value);
    return value;
  }
};

/// An 8-bit float (Micikevicius et al. 2022) of sign, exponent and mantissa bits, with subnormals. Rounding
/// is to nearest even; what lies beyond the largest finite value becomes that value, infinities included.
template <int kMantissa, int kBias, std::uint8_t kLargest>
struct Float8 {
  std::uint8_t bits = 0;

  Float8() = default;
  explicit Float8(float value) {
    std::uint32_t word;
    std::memcpy(&word, &value, sizeof word);
    const std::uint32_t magnitude = word & 0x7fffffffu;
    if (magnitude > 0x7f800000u) {
      bits = 0x7f;
      return;
    }
    // Subnormals share the exponent of the smallest normals.
    const int exponent = std::clamp(static_cast<int>(magnitude >> 23) - 127, 1 - kBias, 127 - kBias);
    // In units of the last mantissa bit; adding 1.5 · 2^23 rounds to an integer.
    constexpr float kRound = 12582912.0f;
    const float steps =
        std::min(std::fabs(value) * power_of_two(kMantissa - exponent), 4096.0f) + kRound - kRound;
    // A mantissa that rounds up to the next power of two carries into the exponent.
    const int code = static_cast<int>(steps) + (exponent + kBias - 1) * (1 << kMantissa);
    bits = static_cast<std::uint8_t>((word >> 24 & 0x80u) |
                                     std::min<unsigned>(static_cast<unsigned>(code), kLargest));
  }
  explicit operator float() const {
    const int exponent = (bits & 0x7f) >> kMantissa, mantissa = bits & ((1 << kMantissa) - 1);
    float magnitude = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), 1 - kBias - kMantissa)
                                    : std::ldexp(static_cast<float>(mantissa + (1 << kMantissa)),
                                                 exponent - kBias - kMantissa);
    if ((bits & 0x7f) > kLargest) magnitude = std::numeric_limits<float>::quiet_NaN();
    return (bits & 0x80) != 0 ? -magnitude : magnitude;
  }

 private:
  static float power_of_two(int exponent) {
    const std::uint32_t word = static_cast<std::uint32_t>(exponent + 127) << 23;
    float power;
    std::memcpy(&power, &word, sizeof power);
    return power;
  }
};
using E4M3 = Float8<3, 7, 0x7e>;   ///< up to 448; 2^-6 is the smallest normal value
using E5M2 = Float8<2, 15, 0x7b>;  ///< up to 57344; 2^-14 is the smallest normal value

template <typename T>
struct DTypeOf;
template <>
struct DTypeOf<float> {
  static constexpr DType value = DType::kF32;
};
template <>
struct DTypeOf<BF16> {
  static constexpr DType value = DType::kBF16;
};
template <>
struct DTypeOf<E4M3> {
  static constexpr DType value = DType::kE4M3;
};
template <>
struct DTypeOf<E5M2> {
  static constexpr DType value = DType::kE5M2;
};
template <>
struct DTypeOf<std::int32_t> {
  static constexpr DType value = DType::kI32;
};
template <>
struct DTypeOf<double> {
  static constexpr DType value = DType::kF64;
};
template <>
struct DTypeOf<std::int16_t> {
  static constexpr DType value = DType::kI16;
};
template <>
struct DTypeOf<std::int8_t> {
  static constexpr DType value = DType::kI8;
};
template <>
struct DTypeOf<std::uint8_t> {
  static constexpr DType value = DType::kU8;
};

}  // namespace octet
