#pragma once

#include <cstdint>
#include <cstring>

#include "octet/base/dtype.h"
#include "octet/base/host_device.h"

namespace octet {

/// Elements that share a scale where matrices are scaled by parts.
inline constexpr std::int64_t kScaleBlock = 128;

/// The smallest power of two s with largest <= s · (largest value of the 8-bit type), at least 2^-126; 1 for
/// zero, and `largest` itself where it is not finite, which makes a NaN of all that is scaled by it. Exact.
OCTET_HOST_DEVICE inline float float8_scale(float largest, DType type) {
  // Both types end at 1.75 · 2^n: E4M3 at 448, E5M2 at 57344.
  constexpr std::uint32_t kMantissa = 0x7fffffu, kLimit = 0x600000u;
  const int limit_exponent = type == DType::kE4M3 ? 8 : 15;
  std::uint32_t bits;
  memcpy(&bits, &largest, sizeof bits);
  bits &= 0x7fffffffu;
  if (bits == 0) return 1.0f;
  if (bits >= 0x7f800000u) return largest;
  const int exponent = static_cast<int>(bits >> 23) - 127 - limit_exponent + ((bits & kMantissa) > kLimit);
  const int biased = exponent < -126 ? 1 : exponent + 127;
  bits = static_cast<std::uint32_t>(biased) << 23;
  float scale;
  memcpy(&scale, &bits, sizeof scale);
  return scale;
}

}  // namespace octet
