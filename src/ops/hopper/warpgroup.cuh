#pragma once

#include <cuda_bf16.h>

#include <cstdint>

/// What kernels of warpgroups share.
namespace octet::hopper {

constexpr int kGroup = 128;          ///< threads of a warpgroup
constexpr int kBoxBytes = 64 * 128;  ///< 64 rows of 64 bfloat16, in the swizzle of 128 bytes
constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

/// A place of a ring, as those see it who use all places in order: which, and the parity of its present use.
template <int kPlaces>
struct RingPlace {
  int place = 0, parity = 0;

  __device__ void advance() {
    if (++place == kPlaces) place = 0, parity ^= 1;
  }
};

/// Two numbers in bfloat16, the first one in the lower half.
__device__ inline std::uint32_t packed(float a, float b) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
  return *reinterpret_cast<const std::uint32_t*>(&pair);
}
/// By one instruction each, where the compiler's own way takes two for the upper one.
__device__ inline float2 unpacked(std::uint32_t word) {
  return {__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u)};
}

}  // namespace octet::hopper
