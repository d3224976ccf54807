#pragma once

#include <cuda_fp8.h>

#include "kernel_tools.cuh"
#include "octet/base/float8_scale.h"
#include "octet/ops/ops.h"

// 8-bit codes as kernels make them: E4M3, or else E5M2.
namespace octet::cuda {

template <bool kE4M3>
__device__ inline unsigned code_of(float value) {
  return __nv_cvt_float_to_fp8(value, __NV_SATFINITE, kE4M3 ? __NV_E4M3 : __NV_E5M2);
}

template <bool kE4M3>
__device__ inline float scale_of(float largest) {
  return float8_scale(largest, kE4M3 ? DType::kE4M3 : DType::kE5M2);
}

/// Codes of adjacent elements of a row, the first in the lowest byte of x, times `inverse`: a power of two,
/// or 0 or NaN.
template <bool kE4M3>
__device__ inline uint2 codes_of(const Pack<bf16, 8>& pack, float inverse) {
  __nv_bfloat162 scaled[4];
  memcpy(scaled, &pack, sizeof scaled);
  const __nv_bfloat162 factors = __float2bfloat162_rn(inverse);
#pragma unroll
  for (int i = 0; i < 4; ++i) scaled[i] = __hmul2(scaled[i], factors);
  Pack<bf16, 8> codable;
  memcpy(&codable, scaled, sizeof codable);
  float values[8];
  codable.widen(values);
  unsigned pairs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    pairs[i] = __nv_cvt_float2_to_fp8x2(make_float2(values[2 * i], values[2 * i + 1]), __NV_SATFINITE,
                                        kE4M3 ? __NV_E4M3 : __NV_E5M2);
  }
  return make_uint2(pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16);
}

/// The largest magnitude that a thread has met, NaNs passed over.
class LargestMagnitude {
 public:
  __device__ LargestMagnitude() : halves_(__float2bfloat162_rn(0.0f)) {}
  __device__ void take(const Pack<bf16, 8>& pack) {
    __nv_bfloat162 pairs[4];
    memcpy(pairs, &pack, sizeof pairs);
#pragma unroll
    for (int i = 0; i < 4; ++i) halves_ = __hmax2(halves_, __habs2(pairs[i]));
  }
  __device__ float value() const {
    return fmaxf(__low2float(halves_), __high2float(halves_));
  }

 private:
  __nv_bfloat162 halves_;  // of elements at even places and at odd ones
};

/// Four bytes of each of four rows become four rows of each of four columns.
__device__ inline void turn_bytes(const unsigned (&rows)[4], unsigned (&columns)[4]) {
  const unsigned low = __byte_perm(rows[0], rows[1], 0x5140), high = __byte_perm(rows[0], rows[1], 0x7362);
  const unsigned low2 = __byte_perm(rows[2], rows[3], 0x5140), high2 = __byte_perm(rows[2], rows[3], 0x7362);
  columns[0] = __byte_perm(low, low2, 0x5410);
  columns[1] = __byte_perm(low, low2, 0x7632);
  columns[2] = __byte_perm(high, high2, 0x5410);
  columns[3] = __byte_perm(high, high2, 0x7632);
}

/// OutputCodes of a kernel.
struct CodesOut {
  std::uint8_t *codes, *transposed;
  const float* largest;
  float *seen, *scale;

  CodesOut() = default;
  explicit CodesOut(const OutputCodes& output)
      : codes(static_cast<std::uint8_t*>(output.codes.data)),
        transposed(static_cast<std::uint8_t*>(output.transposed.data)),
        largest(static_cast<const float*>(output.largest.data)),
        seen(static_cast<float*>(output.seen.data)),
        scale(static_cast<float*>(output.scale.data)) {}
  /// What raise_by_warp() takes as known: where nothing is to be raised, more than there can be.
  __device__ float known() const { return seen == nullptr ? __int_as_float(0x7f800000) : *seen; }
};

}  // namespace octet::cuda
