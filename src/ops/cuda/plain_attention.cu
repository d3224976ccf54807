// Causal attention without matrix units, for float32 and for what cuDNN does not take. Correct and
// deterministic, of modest speed: one warp a query row (forward, dq) or a key row (dk, dv), 32 positions of
// the other side at a time.
#include <cmath>

#include "drivers.h"
#include "kernel_tools.cuh"

namespace octet::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kLargestHead = 256;

struct Heads {
  std::int64_t sequence, packed;
  int heads, kv_heads, head_size, group, offset;
  float scale;
};

// Where head `head` (queries, then keys, then values) of token `position` of sequence `batch` begins.
__device__ inline std::int64_t head_at(const Heads& h, std::int64_t batch, std::int64_t position, int head) {
  return (batch * h.sequence + position) * h.packed + std::int64_t{head} * h.head_size;
}

// The same in rows that hold the query heads alone.
__device__ inline std::int64_t query_at(const Heads& h, std::int64_t batch, std::int64_t position, int head) {
  return ((batch * h.sequence + position) * h.heads + head) * h.head_size;
}

template <typename T>
__device__ inline float dot(const float* a, const T* b, int size) {
  float sum = 0.0f;
  for (int c = 0; c < size; ++c) sum += a[c] * to_float(b[c]);
  return sum;
}

template <typename T>
__device__ inline void to_shared(const T* from, int size, float* to) {
  for (int c = threadIdx.x % 32; c < size; c += 32) to[c] = to_float(from[c]);
  __syncwarp();
}

// sums += Σ over lanes t < count of weight of lane t · row[t], each lane keeping every 32nd column.
template <int C, typename T>
__device__ inline void add_rows(float (&sums)[C], float weight, const T* row, std::int64_t stride, int count,
                                int size) {
  const int lane = threadIdx.x % 32;
  for (int t = 0; t < count; ++t, row += stride) {
    const float w = __shfl_sync(0xffffffffu, weight, t);
#pragma unroll
    for (int c = 0; c < C; ++c) {
      if (lane + 32 * c < size) sums[c] += w * to_float(row[lane + 32 * c]);
    }
  }
}

template <int C, typename T>
__device__ inline void write_row(const float (&values)[C], float factor, T* to, int size) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int c = 0; c < C; ++c) {
    if (lane + 32 * c < size) to[lane + 32 * c] = from_float<T>(values[c] * factor);
  }
}

// The number of positions of a block of 32 that begins at `first` and may go up to `end`.
__device__ inline int block_count(std::int64_t first, std::int64_t end) {
  return end - first < 32 ? static_cast<int>(end - first) : 32;
}

template <typename T, int C>
__global__ void __launch_bounds__(32 * kWarps)
    forward_kernel(const Heads h, const T* qkv, T* out, float* statistics) {
  __shared__ float queries[kWarps][kLargestHead];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, head = blockIdx.y;
  const std::int64_t batch = blockIdx.z, query = std::int64_t{blockIdx.x} * kWarps + warp;
  if (query >= h.sequence) return;
  const int key_head = h.heads + (head + h.offset) / h.group, value_head = key_head + h.kv_heads;
  float* q = queries[warp];
  to_shared(qkv + head_at(h, batch, query, head), h.head_size, q);

  float largest = -INFINITY, sum = 0.0f, values[C] = {};
  for (std::int64_t first = 0; first <= query; first += 32) {
    const int count = block_count(first, query + 1);
    float score = -INFINITY;
    if (lane < count) score = h.scale * dot(q, qkv + head_at(h, batch, first + lane, key_head), h.head_size);
    const float now = fmaxf(largest, warp_max(score));
    const float probability = expf(score - now), correction = expf(largest - now);
    largest = now;
    sum = sum * correction + warp_sum(probability);
#pragma unroll
    for (int c = 0; c < C; ++c) values[c] *= correction;
    add_rows(values, probability, qkv + head_at(h, batch, first, value_head), h.packed, count, h.head_size);
  }
  write_row(values, 1.0f / sum, out + query_at(h, batch, query, head), h.head_size);
  if (lane == 0) statistics[(batch * h.heads + head) * h.sequence + query] = largest + logf(sum);
}

// Also leaves row_sums = Σ dout·out of every query row for the key side.
template <typename T, int C>
__global__ void __launch_bounds__(32 * kWarps)
    query_gradient_kernel(const Heads h, const T* qkv, const T* out, const float* statistics, const T* dout,
                          T* dqkv, float* row_sums) {
  __shared__ float queries[kWarps][kLargestHead], gradients[kWarps][kLargestHead];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, head = blockIdx.y;
  const std::int64_t batch = blockIdx.z, query = std::int64_t{blockIdx.x} * kWarps + warp;
  if (query >= h.sequence) return;
  const int key_head = h.heads + (head + h.offset) / h.group, value_head = key_head + h.kv_heads;
  float *q = queries[warp], *d = gradients[warp];
  to_shared(qkv + head_at(h, batch, query, head), h.head_size, q);
  to_shared(dout + query_at(h, batch, query, head), h.head_size, d);

  const T* result = out + query_at(h, batch, query, head);
  float row_sum = 0.0f;
  for (int c = lane; c < h.head_size; c += 32) row_sum += d[c] * to_float(result[c]);
  row_sum = warp_sum(row_sum);
  const std::int64_t row = (batch * h.heads + head) * h.sequence + query;
  if (lane == 0) row_sums[row] = row_sum;

  const float statistic = statistics[row];
  float dq[C] = {};
  for (std::int64_t first = 0; first <= query; first += 32) {
    const int count = block_count(first, query + 1);
    float dscore = 0.0f;
    if (lane < count) {
      const float score = h.scale * dot(q, qkv + head_at(h, batch, first + lane, key_head), h.head_size);
      const float dprobability = dot(d, qkv + head_at(h, batch, first + lane, value_head), h.head_size);
      dscore = h.scale * expf(score - statistic) * (dprobability - row_sum);
    }
    add_rows(dq, dscore, qkv + head_at(h, batch, first, key_head), h.packed, count, h.head_size);
  }
  write_row(dq, 1.0f, dqkv + head_at(h, batch, query, head), h.head_size);
}

template <typename T, int C>
__global__ void __launch_bounds__(32 * kWarps)
    key_gradient_kernel(const Heads h, const T* qkv, const float* statistics, const T* dout, T* dqkv,
                        const float* row_sums) {
  __shared__ float keys[kWarps][kLargestHead], values[kWarps][kLargestHead];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, kv_head = blockIdx.y;
  const std::int64_t batch = blockIdx.z, key = std::int64_t{blockIdx.x} * kWarps + warp;
  if (key >= h.sequence) return;
  const int key_head = h.heads + kv_head, value_head = key_head + h.kv_heads;
  float *k = keys[warp], *v = values[warp];
  to_shared(qkv + head_at(h, batch, key, key_head), h.head_size, k);
  to_shared(qkv + head_at(h, batch, key, value_head), h.head_size, v);

  const int first_head = max(0, kv_head * h.group - h.offset);
  const int end_head = min(h.heads, (kv_head + 1) * h.group - h.offset);
  float dk[C] = {}, dv[C] = {};
  for (int head = first_head; head < end_head; ++head) {
    const std::int64_t rows = (batch * h.heads + head) * h.sequence;
    for (std::int64_t first = key; first < h.sequence; first += 32) {
      const int count = block_count(first, h.sequence);
      float probability = 0.0f, dscore = 0.0f;
      if (lane < count) {
        const std::int64_t query = first + lane;
        const float score = h.scale * dot(k, qkv + head_at(h, batch, query, head), h.head_size);
        const float dprobability = dot(v, dout + query_at(h, batch, query, head), h.head_size);
        probability = expf(score - statistics[rows + query]);
        dscore = h.scale * probability * (dprobability - row_sums[rows + query]);
      }
      add_rows(dv, probability, dout + query_at(h, batch, first, head), std::int64_t{h.heads} * h.head_size,
               count, h.head_size);
      add_rows(dk, dscore, qkv + head_at(h, batch, first, head), h.packed, count, h.head_size);
    }
  }
  write_row(dk, 1.0f, dqkv + head_at(h, batch, key, key_head), h.head_size);
  write_row(dv, 1.0f, dqkv + head_at(h, batch, key, value_head), h.head_size);
}

Heads heads_of(const AttentionShape& shape) {
  const HeadLayout& layout = shape.layout;
  if (layout.head_size > kLargestHead) {
    fail(ErrorKind::kDevice, "attention on a GPU takes heads of up to {} elements; these have {}",
         kLargestHead, layout.head_size);
  }
  return {shape.sequence,   layout.packed(), layout.heads,       layout.kv_heads,
          layout.head_size, layout.group,    layout.head_offset, shape.scale};
}

// Calls f(T{}, Width<C>{}) with C columns a lane.
template <typename F>
void with_columns(DType type, int head_size, F f) {
  with_type(type, [&](auto element) {
    if (head_size <= 32) {
      f(element, Width<1>{});
    } else if (head_size <= 64) {
      f(element, Width<2>{});
    } else if (head_size <= 128) {
      f(element, Width<4>{});
    } else {
      f(element, Width<8>{});
    }
  });
}

dim3 grid_of(const AttentionShape& shape, int heads) {
  return dim3(grid_size(divide_up(shape.sequence, kWarps)), static_cast<unsigned>(heads),
              static_cast<unsigned>(shape.batch));
}

}  // namespace

std::int64_t plain_attention_scratch(const AttentionShape& shape) {
  return shape.batch * shape.layout.heads * shape.sequence * size_of(DType::kF32);
}

void plain_attention_forward(cudaStream_t stream, const AttentionShape& shape, Tensor qkv, Tensor out,
                             Tensor statistics) {
  const Heads heads = heads_of(shape);
  const dim3 grid = grid_of(shape, shape.layout.heads);
  with_columns(qkv.dtype, heads.head_size, [&](auto element, auto columns) {
    using T = decltype(element);
    forward_kernel<T, decltype(columns)::value><<<grid, 32 * kWarps, 0, stream>>>(
        heads, static_cast<const T*>(qkv.data), static_cast<T*>(out.data), statistics.as<float>());
  });
  OCTET_CUDA_LAUNCH("plain_attention_forward");
}

void plain_attention_backward(cudaStream_t stream, const AttentionShape& shape, Tensor qkv, Tensor out,
                              Tensor statistics, Tensor dout, Tensor dqkv, Scratch& scratch) {
  const Heads heads = heads_of(shape);
  auto* row_sums = static_cast<float*>(scratch.reserve(plain_attention_scratch(shape)));
  const dim3 query_grid = grid_of(shape, shape.layout.heads),
             key_grid = grid_of(shape, shape.layout.kv_heads);
  with_columns(qkv.dtype, heads.head_size, [&](auto element, auto columns) {
    using T = decltype(element);
    constexpr int C = decltype(columns)::value;
    const auto* packed = static_cast<const T*>(qkv.data);
    const auto* gradient = static_cast<const T*>(dout.data);
    auto* dpacked = static_cast<T*>(dqkv.data);
    query_gradient_kernel<T, C><<<query_grid, 32 * kWarps, 0, stream>>>(
        heads, packed, static_cast<const T*>(out.data), statistics.as<float>(), gradient, dpacked, row_sums);
    key_gradient_kernel<T, C><<<key_grid, 32 * kWarps, 0, stream>>>(heads, packed, statistics.as<float>(),
                                                                    gradient, dpacked, row_sums);
  });
  OCTET_CUDA_LAUNCH("plain_attention_backward");
}

}  // namespace octet::cuda
