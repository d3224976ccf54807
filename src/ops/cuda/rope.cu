// Rotary position embedding in place on the query and key heads of packed rows.
// Bytes moved (compute dtype of s bytes): 2·t·(heads + kv_heads)·head_size·s, and 4·t·head_size of the table.
#include <algorithm>

#include "drivers.h"
#include "kernel_tools.cuh"

namespace octet::cuda {
namespace {

constexpr int kThreads = 256;

// A block turns one token's heads: packs of half a head in x (each thread keeps its cosines and sines), heads
// in y.
template <typename T, int N>
__global__ void __launch_bounds__(1024)
    rope_kernel(T* qkv, const std::int32_t* positions, const float* cos_sin, std::int64_t packed, int heads,
                int head_size, float direction) {
  const std::int64_t token = blockIdx.x;
  const int half = head_size / 2, at = threadIdx.x * N;
  const float* table = cos_sin + std::int64_t{positions[token]} * head_size + at;
  constexpr int kTablePack = N == 1 ? 1 : 4;
  float c[N], s[N];
#pragma unroll
  for (int n = 0; n < N; n += kTablePack) {
    const auto cosines = Pack<float, kTablePack>::load(table + n);
    const auto sines = Pack<float, kTablePack>::load(table + half + n);
#pragma unroll
    for (int i = 0; i < kTablePack; ++i) {
      c[n + i] = cosines[i];
      s[n + i] = direction * sines[i];
    }
  }
  for (int head = threadIdx.y; head < heads; head += blockDim.y) {
    T* first = qkv + token * packed + std::int64_t{head} * head_size + at;
    Pack<T, N> a = Pack<T, N>::load(first), b = Pack<T, N>::load(first + half);
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const float x = a[n], y = b[n];
      a.set(n, x * c[n] - y * s[n]);
      b.set(n, y * c[n] + x * s[n]);
    }
    a.store(first);
    b.store(first + half);
  }
}

}  // namespace

void rope(cudaStream_t stream, const HeadLayout& layout, Tensor qkv, Tensor positions, Tensor cos_sin,
          bool inverse) {
  if (qkv.size() == 0) return;
  const int half = layout.head_size / 2, heads = layout.heads + layout.kv_heads;
  // A half head made of whole packs makes heads and rows so too.
  const bool full = takes_full_packs(qkv.dtype, half, qkv.data, cos_sin.data);
  with_width(qkv.dtype, full, [&](auto element, auto width) {
    using T = decltype(element);
    constexpr int N = decltype(width)::value;
    const int packs = half / N;
    const dim3 block(static_cast<unsigned>(packs),
                     static_cast<unsigned>(std::clamp(kThreads / packs, 1, heads)));
    rope_kernel<T, N><<<grid_size(qkv.rows), block, 0, stream>>>(
        static_cast<T*>(qkv.data), positions.as<std::int32_t>(), cos_sin.as<float>(), layout.packed(), heads,
        layout.head_size, inverse ? -1.0f : 1.0f);
  });
  OCTET_CUDA_LAUNCH("rope");
}

}  // namespace octet::cuda
