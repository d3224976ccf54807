#pragma once

#include <cstdint>
#include <cstring>

namespace octet {

/// Element types of tensors.
enum class DType : std::uint8_t { kF32, kBF16, kI32, kF64 };

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
  }
  return 0;
}

/// Name as users read it: float32, bfloat16, int32, float64.
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
struct DTypeOf<std::int32_t> {
  static constexpr DType value = DType::kI32;
};
template <>
struct DTypeOf<double> {
  static constexpr DType value = DType::kF64;
};

}  // namespace octet
