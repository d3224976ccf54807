#pragma once

#include <cuda_bf16.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "../../runtime/cuda/cuda_check.h"
#include "octet/base/tensor.h"

namespace octet::cuda {

using bf16 = __nv_bfloat16;

__device__ inline float to_float(float value) {
  return value;
}
__device__ inline float to_float(bf16 value) {
  return __bfloat162float(value);
}

template <typename T>
__device__ inline T from_float(float value) {
  if constexpr (std::is_same_v<T, bf16>) {
    return __float2bfloat16_rn(value);
  } else {
    return value;
  }
}

/// exp(x): the fast instruction where the result is rounded to bfloat16 anyway.
template <typename T>
__device__ inline float exponential(float x) {
  if constexpr (std::is_same_v<T, bf16>) {
    return __expf(x);
  } else {
    return expf(x);
  }
}

/// The register type that one load or store of so many bytes moves.
template <int kBytes>
using Word = std::conditional_t<
    kBytes == 16, uint4,
    std::conditional_t<kBytes == 8, uint2, std::conditional_t<kBytes == 4, unsigned, unsigned short>>>;

/// N adjacent elements, moved by one load or store. The address must be a multiple of its size.
template <typename T, int N>
struct alignas(sizeof(T) * N) Pack {
  using Bits = Word<static_cast<int>(sizeof(T)) * N>;
  T value[N];

  __device__ static Pack load(const T* from) {
    const Bits bits = *reinterpret_cast<const Bits*>(from);
    Pack pack;
    memcpy(&pack, &bits, sizeof pack);
    return pack;
  }
  __device__ void store(T* to) const {
    Bits bits;
    memcpy(&bits, this, sizeof bits);
    *reinterpret_cast<Bits*>(to) = bits;
  }
  __device__ float operator[](int i) const {
    if constexpr (std::is_same_v<T, bf16> && N > 1) {
      // In one instruction: a bfloat16 is the upper half of a float.
      unsigned pair;
      memcpy(&pair, &value[i & ~1], sizeof pair);
      return __int_as_float(static_cast<int>(i % 2 == 0 ? pair << 16 : pair & 0xffff0000u));
    } else {
      return to_float(value[i]);
    }
  }
  __device__ void set(int i, float x) { value[i] = from_float<T>(x); }

  /// All elements at once, for kernels that instructions limit: in bfloat16 an element takes one to widen and
  /// half of one to round, where operator[] and set() may take more.
  __device__ void widen(float (&to)[N]) const {
    if constexpr (std::is_same_v<T, bf16> && N % 2 == 0) {
      unsigned words[N / 2];
      memcpy(words, this, sizeof words);
#pragma unroll
      for (int i = 0; i < N / 2; ++i) {
        to[2 * i] = __int_as_float(static_cast<int>(words[i] << 16));
        to[2 * i + 1] = __int_as_float(static_cast<int>(words[i] & 0xffff0000u));
      }
    } else {
#pragma unroll
      for (int n = 0; n < N; ++n) to[n] = to_float(value[n]);
    }
  }
  __device__ static Pack rounded(const float (&from)[N]) {
    Pack pack;
    if constexpr (std::is_same_v<T, bf16> && N % 2 == 0) {
      __nv_bfloat162 pairs[N / 2];
#pragma unroll
      for (int i = 0; i < N / 2; ++i) pairs[i] = __floats2bfloat162_rn(from[2 * i], from[2 * i + 1]);
      memcpy(&pack, pairs, sizeof pack);
    } else {
#pragma unroll
      for (int n = 0; n < N; ++n) pack.set(n, from[n]);
    }
    return pack;
  }
};

__device__ inline float warp_sum(float value) {
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
  return value;
}

__device__ inline double warp_sum(double value) {
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
  return value;
}

__device__ inline float warp_max(float value) {
  for (int offset = 16; offset > 0; offset /= 2)
    value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, offset));
  return value;
}

/// largest = max(largest, value), neither of them negative.
__device__ inline void raise(float* largest, float value) {
  // Numbers that are not negative are ordered as their bits are.
  atomicMax(reinterpret_cast<int*>(largest), __float_as_int(value));
}

/// raise() to the largest value of a whole warp, the lanes of which have adjacent threadIdx.x. `known`: what
/// *largest has been, which spares most warps of a grid the atomic operation.
__device__ inline void raise_by_warp(float* largest, float known, float value) {
  value = warp_max(value);
  if (threadIdx.x % 32 == 0 && value > known) raise(largest, value);
}

/// max(value, largest magnitude in the pack), NaNs passed over.
template <typename T, int N>
__device__ inline float largest_magnitude(float value, const Pack<T, N>& pack) {
#pragma unroll
  for (int n = 0; n < N; ++n) value = fmaxf(value, fabsf(pack[n]));
  return value;
}

/// Sum over the threads of a block of one dimension, of at most 1024; the same value in all of them.
template <typename T>
__device__ inline T block_sum(T value) {
  __shared__ T warps[32];
  value = warp_sum(value);
  __syncthreads();
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
  __syncthreads();
  T sum = warps[0];
  for (unsigned i = 1; i < blockDim.x / 32; ++i) sum += warps[i];
  return sum;
}

/// For one row, where kernels sum over it.
constexpr int kMostRowThreads = 512;

/// Sums over the threads of a row, the same values in all of them. A row is one warp's, other rows being
/// other warps' of the block; or has a block of its own.
template <int kCount>
__device__ void row_sums(float (&sums)[kCount]) {
  __shared__ float warps[kCount][kMostRowThreads / 32];
#pragma unroll
  for (int c = 0; c < kCount; ++c) sums[c] = warp_sum(sums[c]);
  if (blockDim.x == 32) return;
  __syncthreads();
  if (threadIdx.x % 32 == 0) {
#pragma unroll
    for (int c = 0; c < kCount; ++c) warps[c][threadIdx.x / 32] = sums[c];
  }
  __syncthreads();
#pragma unroll
  for (int c = 0; c < kCount; ++c) {
    sums[c] = 0.0f;
    for (unsigned w = 0; w < blockDim.x / 32; ++w) sums[c] += warps[c][w];
  }
}

/// Elements that fit a 16-byte access.
template <typename T>
constexpr int kFull = 16 / static_cast<int>(sizeof(T));

template <int N>
using Width = std::integral_constant<int, N>;

/// Calls f(T{}) for the element type T that `type` names.
template <typename F>
void with_type(DType type, F&& f) {
  OCTET_ASSERT(type == DType::kF32 || type == DType::kBF16);
  if (type == DType::kBF16) {
    f(bf16{});
  } else {
    f(float{});
  }
}

/// Calls f(T{}, Width<N>{}): N elements fill 16 bytes where `full`, else N is 1.
template <typename F>
void with_width(DType type, bool full, F&& f) {
  with_type(type, [&](auto element) {
    using T = decltype(element);
    if (full) {
      f(element, Width<kFull<T>>{});
    } else {
      f(element, Width<1>{});
    }
  });
}

/// Calls f(std::true_type{}) where largest magnitudes are wanted, else f(std::false_type{}); they never are
/// of other elements than bfloat16.
template <typename T, typename F>
void with_measuring(const Tensor& largest, F&& f) {
  if constexpr (std::is_same_v<T, bf16>) {
    if (largest) {
      f(std::true_type{});
      return;
    }
  }
  f(std::false_type{});
}

/// Whether every address is a multiple of `bytes`; absent operands count as aligned.
template <typename... Pointers>
bool aligned(std::int64_t bytes, Pointers... pointers) {
  return ((reinterpret_cast<std::uintptr_t>(pointers) % static_cast<std::uintptr_t>(bytes) == 0) && ...);
}

/// Whether rows of `cols` elements of this type, at these addresses, can be moved 16 bytes at a time.
template <typename... Pointers>
bool takes_full_packs(DType type, std::int64_t cols, Pointers... pointers) {
  return cols * size_of(type) % 16 == 0 && aligned(16, pointers...);
}

constexpr std::int64_t divide_up(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}
constexpr std::int64_t round_up(std::int64_t a, std::int64_t b) {
  return divide_up(a, b) * b;
}

/// A grid's x extent; larger ones than a launch takes are a bug.
inline unsigned grid_size(std::int64_t blocks) {
  OCTET_ASSERT(blocks > 0 && blocks <= 0x7fffffff);
  return static_cast<unsigned>(blocks);
}

}  // namespace octet::cuda
