// Causal attention without matrix units, for float32 and for what cuDNN does not take. Correct and
// deterministic, of modest speed: one warp a query row (forward, dq) or a key row (dk, dv), 32 positions of
// the other side at a time.
#include <cmath>

#include "attention_problem.cuh"
#include "drivers.h"
#include "kernel_tools.cuh"

namespace octet::cuda {
namespace {

constexpr int kWarps = 4;

// The key rows [begin, end) that a query row sees.
struct KeyRange {
  std::int64_t begin, end;
};
__device__ inline KeyRange keys_of(const Problem& p, std::int64_t sample, std::int64_t query) {
  return {p.starts == nullptr ? 0 : p.starts[sample * p.sequence + query], p.keys - p.sequence + query + 1};
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
    forward_kernel(const Problem p, const Rows<const T> query_rows, const Rows<const T> key_rows,
                   const Rows<const T> value_rows, const Rows<T> out, float* statistics) {
  __shared__ float queries[kWarps][kLargestHead];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, head = blockIdx.y, size = p.head_size;
  const std::int64_t sample = blockIdx.z, query = std::int64_t{blockIdx.x} * kWarps + warp;
  if (query >= p.sequence) return;
  const int kv_head = (head + p.offset) / p.group;
  float* q = queries[warp];
  to_shared(query_rows.at(sample, query, head, size), size, q);

  const KeyRange seen = keys_of(p, sample, query);
  float largest = -INFINITY, sum = 0.0f, values[C] = {};
  for (std::int64_t first = seen.begin; first < seen.end; first += 32) {
    const int count = block_count(first, seen.end);
    float score = -INFINITY;
    if (lane < count) score = p.scale * dot(q, key_rows.at(sample, first + lane, kv_head, size), size);
    const float now = fmaxf(largest, warp_max(score));
    const float probability = expf(score - now), correction = expf(largest - now);
    largest = now;
    sum = sum * correction + warp_sum(probability);
#pragma unroll
    for (int c = 0; c < C; ++c) values[c] *= correction;
    add_rows(values, probability, value_rows.at(sample, first, kv_head, size), value_rows.row_stride, count,
             size);
  }
  write_row(values, 1.0f / sum, out.at(sample, query, head, size), size);
  if (lane == 0) statistics[(sample * p.heads + head) * p.sequence + query] = largest + logf(sum);
}

// Also leaves row_sums = Σ dout·out of every query row for the key side.
template <typename T, int C>
__global__ void __launch_bounds__(32 * kWarps)
    query_gradient_kernel(const Problem p, const Rows<const T> query_rows, const Rows<const T> key_rows,
                          const Rows<const T> value_rows, const Rows<const T> out, const float* statistics,
                          const Rows<const T> dout, const Rows<T> dquery, float* row_sums) {
  __shared__ float queries[kWarps][kLargestHead], gradients[kWarps][kLargestHead];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, head = blockIdx.y, size = p.head_size;
  const std::int64_t sample = blockIdx.z, query = std::int64_t{blockIdx.x} * kWarps + warp;
  if (query >= p.sequence) return;
  const int kv_head = (head + p.offset) / p.group;
  float *q = queries[warp], *d = gradients[warp];
  to_shared(query_rows.at(sample, query, head, size), size, q);
  to_shared(dout.at(sample, query, head, size), size, d);

  const T* result = out.at(sample, query, head, size);
  float row_sum = 0.0f;
  for (int c = lane; c < size; c += 32) row_sum += d[c] * to_float(result[c]);
  row_sum = warp_sum(row_sum);
  const std::int64_t row = (sample * p.heads + head) * p.sequence + query;
  if (lane == 0) row_sums[row] = row_sum;

  const float statistic = statistics[row];
  const KeyRange seen = keys_of(p, sample, query);
  float dq[C] = {};
  for (std::int64_t first = seen.begin; first < seen.end; first += 32) {
    const int count = block_count(first, seen.end);
    float dscore = 0.0f;
    if (lane < count) {
      const float score = p.scale * dot(q, key_rows.at(sample, first + lane, kv_head, size), size);
      const float dprobability = dot(d, value_rows.at(sample, first + lane, kv_head, size), size);
      dscore = p.scale * expf(score - statistic) * (dprobability - row_sum);
    }
    add_rows(dq, dscore, key_rows.at(sample, first, kv_head, size), key_rows.row_stride, count, size);
  }
  write_row(dq, 1.0f, dquery.at(sample, query, head, size), size);
}

// How many of the `count` query rows from `first` on belong to documents that start at `key` or before: they
// come first.
__device__ inline int count_that_see(const Problem& p, std::int64_t sample, std::int64_t first, int count,
                                     std::int64_t key) {
  if (p.starts == nullptr) return count;
  const int lane = threadIdx.x % 32;
  const bool sees = lane < count && p.starts[sample * p.sequence + first + lane] <= key;
  return __popc(__ballot_sync(0xffffffffu, sees));
}

template <typename T, int C>
__global__ void __launch_bounds__(32 * kWarps)
    key_gradient_kernel(const Problem p, const Rows<const T> query_rows, const Rows<const T> key_rows,
                        const Rows<const T> value_rows, const float* statistics, const Rows<const T> dout,
                        const Rows<T> dkey, const Rows<T> dvalue, const float* row_sums) {
  __shared__ float keys[kWarps][kLargestHead], values[kWarps][kLargestHead];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, kv_head = blockIdx.y, size = p.head_size;
  const std::int64_t sample = blockIdx.z, key = std::int64_t{blockIdx.x} * kWarps + warp;
  if (key >= p.keys) return;
  float *k = keys[warp], *v = values[warp];
  to_shared(key_rows.at(sample, key, kv_head, size), size, k);
  to_shared(value_rows.at(sample, key, kv_head, size), size, v);

  const int first_head = max(0, kv_head * p.group - p.offset);
  const int end_head = min(p.heads, (kv_head + 1) * p.group - p.offset);
  const std::int64_t keys_before = p.keys - p.sequence,
                     first_query = key < keys_before ? 0 : key - keys_before;
  float dk[C] = {}, dv[C] = {};
  for (int head = first_head; head < end_head; ++head) {
    const std::int64_t rows = (sample * p.heads + head) * p.sequence;
    for (std::int64_t first = first_query; first < p.sequence; first += 32) {
      const int count = count_that_see(p, sample, first, block_count(first, p.sequence), key);
      if (count == 0) break;
      float probability = 0.0f, dscore = 0.0f;
      if (lane < count) {
        const std::int64_t query = first + lane;
        const float score = p.scale * dot(k, query_rows.at(sample, query, head, size), size);
        const float dprobability = dot(v, dout.at(sample, query, head, size), size);
        probability = expf(score - statistics[rows + query]);
        dscore = p.scale * probability * (dprobability - row_sums[rows + query]);
      }
      add_rows(dv, probability, dout.at(sample, first, head, size), dout.row_stride, count, size);
      add_rows(dk, dscore, query_rows.at(sample, first, head, size), query_rows.row_stride, count, size);
    }
  }
  write_row(dk, 1.0f, dkey.at(sample, key, kv_head, size), size);
  write_row(dv, 1.0f, dvalue.at(sample, key, kv_head, size), size);
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

dim3 grid_of(std::int64_t rows, int heads, std::int64_t batch) {
  return dim3(grid_size(divide_up(rows, kWarps)), static_cast<unsigned>(heads), static_cast<unsigned>(batch));
}

}  // namespace

std::int64_t plain_attention_scratch(const AttentionShape& shape) {
  return shape.batch * shape.layout.heads * shape.sequence * size_of(DType::kF32);
}

void plain_attention_forward(cudaStream_t stream, const AttentionShape& shape,
                             const AttentionOperands& operands, SampleRows out, Tensor statistics) {
  const Problem problem = problem_of(shape, operands);
  const dim3 grid = grid_of(shape.sequence, shape.layout.heads, shape.batch);
  with_columns(operands.dtype, problem.head_size, [&](auto element, auto columns) {
    using T = decltype(element);
    forward_kernel<T, decltype(columns)::value><<<grid, 32 * kWarps, 0, stream>>>(
        problem, rows_of<const T>(operands.query), rows_of<const T>(operands.key),
        rows_of<const T>(operands.value), rows_of<T>(out), statistics.as<float>());
  });
  OCTET_CUDA_LAUNCH("plain_attention_forward");
}

void plain_attention_backward(cudaStream_t stream, const AttentionShape& shape,
                              const AttentionOperands& operands, SampleRows out, Tensor statistics,
                              SampleRows dout, SampleRows dquery, SampleRows dkey, SampleRows dvalue,
                              Scratch& scratch) {
  const Problem problem = problem_of(shape, operands);
  auto* row_sums = static_cast<float*>(scratch.reserve(plain_attention_scratch(shape)));
  const dim3 query_grid = grid_of(shape.sequence, shape.layout.heads, shape.batch);
  const dim3 key_grid = grid_of(shape.key_rows(), shape.layout.kv_heads, shape.batch);
  with_columns(operands.dtype, problem.head_size, [&](auto element, auto columns) {
    using T = decltype(element);
    constexpr int C = decltype(columns)::value;
    const auto query = rows_of<const T>(operands.query), key = rows_of<const T>(operands.key),
               value = rows_of<const T>(operands.value), gradient = rows_of<const T>(dout);
    query_gradient_kernel<T, C><<<query_grid, 32 * kWarps, 0, stream>>>(
        problem, query, key, value, rows_of<const T>(out), statistics.as<float>(), gradient,
        rows_of<T>(dquery), row_sums);
    key_gradient_kernel<T, C>
        <<<key_grid, 32 * kWarps, 0, stream>>>(problem, query, key, value, statistics.as<float>(), gradient,
                                               rows_of<T>(dkey), rows_of<T>(dvalue), row_sums);
  });
  OCTET_CUDA_LAUNCH("plain_attention_backward");
}

}  // namespace octet::cuda
