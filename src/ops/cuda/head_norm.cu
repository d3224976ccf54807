// RMSNorm of every query and key head of packed rows (QK norm).
// Bytes moved (compute dtype of s bytes): forward 2·t·packed·s; backward 3·t·(heads + kv_heads)·head_size·s.
#include <algorithm>

#include "drivers.h"
#include "kernel_tools.cuh"

namespace octet::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocksPerMultiprocessor = 4;

// Packs of a head that a thread holds: heads of up to 512 elements.
template <int N>
constexpr int kPacks = 16 / N;

// Sum over the `lanes` threads (a power of two, neighbours in a warp) that share a head.
__device__ inline float head_sum(float value, int lanes) {
  for (int offset = lanes / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
  return value;
}

struct Shape {
  int items;  // heads of all tokens that a kernel works on
  int heads, kv_heads, head_size, lanes;
};

template <typename T, int N>
__global__ void __launch_bounds__(kThreads)
    forward_kernel(const Shape shape, float epsilon, const T* in, const T* q_weight, const T* k_weight,
                   T* out, float* rstd) {
  constexpr int K = kPacks<N>;
  const int groups = kThreads / shape.lanes, lane = threadIdx.x % shape.lanes;
  const int all = shape.heads + 2 * shape.kv_heads, normed = shape.heads + shape.kv_heads;
  const int item = blockIdx.x * groups + threadIdx.x / shape.lanes;
  const bool inside = item < shape.items;
  const int token = item / all, head = item - token * all;
  const std::int64_t base = std::int64_t{item} * shape.head_size;
  const int packs = shape.head_size / N;

  Pack<T, N> x[K];
  float square = 0.0f;
#pragma unroll
  for (int k = 0; k < K; ++k) {
    const int i = lane + k * shape.lanes;
    if (!inside || i >= packs) continue;
    x[k] = Pack<T, N>::load(in + base + i * N);
#pragma unroll
    for (int n = 0; n < N; ++n) square += x[k][n] * x[k][n];
  }
  square = head_sum(square, shape.lanes);
  if (!inside) return;
  const float scale = rsqrtf(square / shape.head_size + epsilon);
  const T* weight = head < shape.heads ? q_weight : k_weight;
#pragma unroll
  for (int k = 0; k < K; ++k) {
    const int i = lane + k * shape.lanes;
    if (i >= packs) continue;
    if (head < normed) {
      const Pack<T, N> w = Pack<T, N>::load(weight + i * N);
#pragma unroll
      for (int n = 0; n < N; ++n) x[k].set(n, x[k][n] * scale * w[n]);
    }
    x[k].store(out + base + i * N);
  }
  if (lane == 0 && head < normed) rstd[std::int64_t{token} * normed + head] = scale;
}

// A persistent grid. partials: [gridDim.x, 2·head_size], the query weight's sums, then the key weight's.
template <typename T, int N>
__global__ void __launch_bounds__(kThreads)
    backward_kernel(const Shape shape, const T* in, const float* rstd, const T* q_weight, const T* k_weight,
                    T* dqkv, float* partials) {
  constexpr int K = kPacks<N>;
  extern __shared__ float shared[];  // [groups, head_size]
  const int groups = kThreads / shape.lanes, group = threadIdx.x / shape.lanes,
            lane = threadIdx.x % shape.lanes;
  const int normed = shape.heads + shape.kv_heads;
  const std::int64_t packed = std::int64_t{normed + shape.kv_heads} * shape.head_size;
  const int packs = shape.head_size / N;
  float dq_weight[K][N] = {}, dk_weight[K][N] = {};

  // The bound is the same for all groups of a block, so that whole warps take part in every sum.
  for (int first = blockIdx.x * groups; first < shape.items; first += gridDim.x * groups) {
    const int item = first + group;
    const bool inside = item < shape.items;
    const int token = item / normed, head = item - token * normed;
    const std::int64_t base = token * packed + std::int64_t{head} * shape.head_size;
    const bool query = head < shape.heads;
    const T* weight = query ? q_weight : k_weight;
    const float scale = inside ? rstd[item] : 0.0f;

    Pack<T, N> x[K], d[K];
    float along = 0.0f;  // sum of g·xhat, where g = d·weight
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const int i = lane + k * shape.lanes;
      if (!inside || i >= packs) continue;
      x[k] = Pack<T, N>::load(in + base + i * N);
      d[k] = Pack<T, N>::load(dqkv + base + i * N);
      const Pack<T, N> w = Pack<T, N>::load(weight + i * N);
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const float xhat = x[k][n] * scale, product = d[k][n] * xhat;
        along += product * w[n];
        if (query) {
          dq_weight[k][n] += product;
        } else {
          dk_weight[k][n] += product;
        }
      }
    }
    along = head_sum(along, shape.lanes) / shape.head_size;
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const int i = lane + k * shape.lanes;
      if (!inside || i >= packs) continue;
      const Pack<T, N> w = Pack<T, N>::load(weight + i * N);
#pragma unroll
      for (int n = 0; n < N; ++n) d[k].set(n, scale * (d[k][n] * w[n] - x[k][n] * scale * along));
      d[k].store(dqkv + base + i * N);
    }
  }

  float* to = partials + std::int64_t{blockIdx.x} * 2 * shape.head_size;
  for (int part = 0; part < 2; ++part) {
    __syncthreads();
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const int i = lane + k * shape.lanes;
      if (i >= packs) continue;
#pragma unroll
      for (int n = 0; n < N; ++n) {
        shared[group * shape.head_size + i * N + n] = part == 0 ? dq_weight[k][n] : dk_weight[k][n];
      }
    }
    __syncthreads();
    for (int col = threadIdx.x; col < shape.head_size; col += kThreads) {
      float sum = 0.0f;
      for (int g = 0; g < groups; ++g) sum += shared[g * shape.head_size + col];
      to[part * shape.head_size + col] = sum;
    }
  }
}

Shape shape_of(const HeadLayout& layout, std::int64_t items, int width) {
  OCTET_ASSERT(items < (1 << 30));
  int lanes = 1;
  while (lanes < 32 && lanes * width < layout.head_size) lanes *= 2;
  if (layout.head_size > 32 * 16) {
    fail(ErrorKind::kDevice, "QK norm on a GPU takes heads of up to 512 elements; these have {}",
         layout.head_size);
  }
  return {static_cast<int>(items), layout.heads, layout.kv_heads, layout.head_size, lanes};
}

}  // namespace

void head_norm_forward(cudaStream_t stream, const HeadLayout& layout, float epsilon, Tensor in,
                       Tensor q_weight, Tensor k_weight, Tensor out, Tensor rstd) {
  if (in.size() == 0) return;
  const bool full =
      takes_full_packs(in.dtype, layout.head_size, in.data, q_weight.data, k_weight.data, out.data);
  with_width(in.dtype, full, [&](auto element, auto width) {
    using T = decltype(element);
    constexpr int N = decltype(width)::value;
    const std::int64_t items = in.rows * (layout.heads + 2 * layout.kv_heads);
    const Shape shape = shape_of(layout, items, N);
    forward_kernel<T, N><<<grid_size(divide_up(items, kThreads / shape.lanes)), kThreads, 0, stream>>>(
        shape, epsilon, static_cast<const T*>(in.data), static_cast<const T*>(q_weight.data),
        static_cast<const T*>(k_weight.data), static_cast<T*>(out.data), rstd.as<float>());
  });
  OCTET_CUDA_LAUNCH("head_norm_forward");
}

void head_norm_backward(cudaStream_t stream, const HeadLayout& layout, Tensor in, Tensor rstd,
                        Tensor q_weight, Tensor k_weight, Tensor dqkv, Tensor dq_weight, Tensor dk_weight,
                        bool accumulate, Scratch& scratch) {
  const std::int64_t items = in.rows * (layout.heads + layout.kv_heads);
  const bool full =
      takes_full_packs(in.dtype, layout.head_size, in.data, q_weight.data, k_weight.data, dqkv.data);
  std::int64_t blocks = 0;
  float* partials = nullptr;
  with_width(in.dtype, full, [&](auto element, auto width) {
    using T = decltype(element);
    constexpr int N = decltype(width)::value;
    const Shape shape = shape_of(layout, items, N);
    const int groups = kThreads / shape.lanes;
    blocks = std::clamp<std::int64_t>(divide_up(items, groups), 1,
                                      std::int64_t{scratch.multiprocessors()} * kBlocksPerMultiprocessor);
    partials = static_cast<float*>(scratch.reserve(blocks * 2 * layout.head_size * size_of(DType::kF32)));
    const std::size_t shared = static_cast<std::size_t>(groups) * layout.head_size * sizeof(float);
    OCTET_ASSERT(shared <= 48 * 1024);
    backward_kernel<T, N><<<grid_size(blocks), kThreads, shared, stream>>>(
        shape, static_cast<const T*>(in.data), rstd.as<float>(), static_cast<const T*>(q_weight.data),
        static_cast<const T*>(k_weight.data), static_cast<T*>(dqkv.data), partials);
  });
  OCTET_CUDA_LAUNCH("head_norm_backward");
  const std::int64_t d = layout.head_size;
  sum_partials(stream, partials, blocks, d, 2 * d, dq_weight.as<float>(), accumulate);
  sum_partials(stream, partials + d, blocks, d, 2 * d, dk_weight.as<float>(), accumulate);
}

}  // namespace octet::cuda
