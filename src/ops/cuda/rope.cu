// Rotary position embedding in place on the query and key heads of packed rows.
// Bytes moved (compute dtype of s bytes): 2·t·(heads + kv_heads)·head_size·s, and 4·t·head_size of the table.
#include <algorithm>

#include "drivers.h"
#include "kernel_tools.cuh"

namespace octet::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kUnroll = 4;  // heads in flight a thread

// A thread turns one pack of the first half of its heads, and the same of the second: packs in x, every
// blockDim.y-th head, tokens in z. Cosines and sines are loaded once, and heads before them, whose addresses
// are known sooner.
template <typename T, int N>
__global__ void __launch_bounds__(N == 1 ? 1024 : kThreads)
    rope_kernel(T* qkv, const std::int32_t* positions, const float* cos_sin, std::int64_t tokens,
                std::int64_t packed, int heads, int head_size, float direction) {
  const std::int64_t token = std::int64_t{blockIdx.x} * blockDim.z + threadIdx.z;
  if (token >= tokens) return;
  const int half = head_size / 2, at = threadIdx.x * N, step = blockDim.y;
  T* const row = qkv + token * packed + at;
  const auto place = [&](int head) { return row + std::int64_t{head} * head_size; };
  Pack<T, N> a[kUnroll], b[kUnroll];
  const auto load = [&](int first) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const T* const from = place(min(first + u * step, heads - 1));
      a[u] = Pack<T, N>::load(from);
      b[u] = Pack<T, N>::load(from + half);
    }
  };
  int first = threadIdx.y;  // below `heads`
  load(first);

  const float* const table = cos_sin + std::int64_t{positions[token]} * head_size + at;
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
  while (true) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (first + u * step >= heads) continue;
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const float x = a[u][n], y = b[u][n];
        a[u].set(n, x * c[n] - y * s[n]);
        b[u].set(n, y * c[n] + x * s[n]);
      }
      T* const to = place(first + u * step);
      a[u].store(to);
      b[u].store(to + half);
    }
    first += step * kUnroll;
    if (first >= heads) return;
    load(first);
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
    const int shares = std::clamp<int>(kThreads / packs, 1, static_cast<int>(divide_up(heads, kUnroll)));
    const int tokens = std::clamp(kThreads / (packs * shares), 1, 64);  // the most that z takes
    const dim3 block(static_cast<unsigned>(packs), static_cast<unsigned>(shares),
                     static_cast<unsigned>(tokens));
    rope_kernel<T, N><<<grid_size(divide_up(qkv.rows, tokens)), block, 0, stream>>>(
        static_cast<T*>(qkv.data), positions.as<std::int32_t>(), cos_sin.as<float>(), qkv.rows,
        layout.packed(), heads, layout.head_size, inverse ? -1.0f : 1.0f);
  });
  OCTET_CUDA_LAUNCH("rope");
}

}  // namespace octet::cuda
