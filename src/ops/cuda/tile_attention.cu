// The attention gradient in bfloat16 on matrix units, by tiles of 64 query and 64 key rows (FlashAttention-2,
// Dao 2023), for what cuDNN does not take: documents apart. Tiles that a document mask hides wholly are
// passed over, so the work is that of the documents and not of the sample. Every sum has one owner, hence
// deterministic: query gradients, and key and value gradients, are kernels of their own, which makes 7
// products instead of 5.
#include <cmath>

#include "attention_problem.cuh"
#include "drivers.h"
#include "matrix_units.cuh"

namespace octet::cuda {
namespace {

constexpr int kTile = 64;
constexpr int kWarps = kTile / 16;  // each has 16 rows of the tile
constexpr int kThreads = 32 * kWarps;
constexpr float kLog2E = 1.44269504f;

/// 64 rows of D columns in shared memory, spread over the banks.
template <int D>
struct Tile {
  static constexpr int kStride = D + 8;
  bf16 value[kTile * kStride];

  __device__ const bf16* at(int row, int col) const { return value + row * kStride + col; }

  /// Rows first … of a head; zeros beyond `rows` and beyond the head's columns.
  __device__ void fill(const Rows<const bf16>& from, std::int64_t sample, std::int64_t first,
                       std::int64_t rows, int head, int head_size) {
    constexpr int kPacks = D / 8;
    for (int i = static_cast<int>(threadIdx.x); i < kTile * kPacks; i += kThreads) {
      const int row = i / kPacks, col = i % kPacks * 8;
      Pack<bf16, 8> pack{};
      if (first + row < rows && col < head_size)
        pack = Pack<bf16, 8>::load(from.at(sample, first + row, head, head_size) + col);
      pack.store(value + row * kStride + col);
    }
  }
};

/// Addresses of the 16 x 16 part at (row, col), for load_matrices(): as operand a, or as two operands b whose
/// columns are the tile's rows.
template <int D>
__device__ inline const bf16* for_a(const Tile<D>& tile, int row, int col) {
  const int lane = threadIdx.x % 32;
  return tile.at(row + lane % 16, col + lane / 16 * 8);
}
template <int D>
__device__ inline const bf16* for_b(const Tile<D>& tile, int row, int col) {
  const int lane = threadIdx.x % 32;
  return tile.at(row + lane % 8 + lane / 16 * 8, col + lane / 8 % 2 * 8);
}
/// For load_transposed(): as two operands b whose rows are the tile's rows.
template <int D>
__device__ inline const bf16* for_transposed_b(const Tile<D>& tile, int row, int col) {
  const int lane = threadIdx.x % 32;
  return tile.at(row + lane % 16, col + lane / 16 * 8);
}

/// 16 rows against 64: eight results of 16 x 8.
using Strip = float[kTile / 8][4];

/// strip = rows [row, row + 16) of x · yᵀ.
template <int D>
__device__ inline void multiply_rows(Strip& strip, const Tile<D>& x, int row, const Tile<D>& y) {
#pragma unroll
  for (int n = 0; n < kTile / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) strip[n][i] = 0.0f;
  }
#pragma unroll
  for (int k = 0; k < D; k += 16) {
    unsigned a[4];
    load_matrices(a, for_a(x, row, k));
#pragma unroll
    for (int n = 0; n < kTile / 16; ++n) {
      unsigned b[4];
      load_matrices(b, for_b(y, 16 * n, k));
      multiply_add(strip[2 * n], a, b[0], b[1]);
      multiply_add(strip[2 * n + 1], a, b[2], b[3]);
    }
  }
}

__device__ inline unsigned pack_two(float low, float high) {
  Pack<bf16, 2> pack;
  pack.set(0, low);
  pack.set(1, high);
  unsigned word;
  memcpy(&word, &pack, sizeof word);
  return word;
}

/// sums += strip · y, the strip rounded to bfloat16. The results of a strip lie as operands a lie.
template <int D>
__device__ inline void add_product(float (&sums)[D / 8][4], Strip& strip, const Tile<D>& y) {
#pragma unroll
  for (int k = 0; k < kTile / 16; ++k) {
    const unsigned a[4] = {pack_two(strip[2 * k][0], strip[2 * k][1]),
                           pack_two(strip[2 * k][2], strip[2 * k][3]),
                           pack_two(strip[2 * k + 1][0], strip[2 * k + 1][1]),
                           pack_two(strip[2 * k + 1][2], strip[2 * k + 1][3])};
#pragma unroll
    for (int n = 0; n < D / 16; ++n) {
      unsigned b[4];
      load_transposed(b, for_transposed_b(y, 16 * k, 16 * n));
      multiply_add(sums[2 * n], a, b[0], b[1]);
      multiply_add(sums[2 * n + 1], a, b[2], b[3]);
    }
  }
}

/// Writes 16 rows of sums as rows first + row … of a head.
template <int D>
__device__ inline void write_rows(float (&sums)[D / 8][4], const Rows<bf16>& to, std::int64_t sample,
                                  std::int64_t first, std::int64_t rows, int head, int head_size) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const std::int64_t row = first + lane / 4 + 8 * half;
    if (row >= rows) continue;
    bf16* const out = to.at(sample, row, head, head_size) + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < D / 8; ++n) {
      if (8 * n >= head_size) break;
      Pack<bf16, 2> pack;
      pack.set(0, sums[n][2 * half]);
      pack.set(1, sums[n][2 * half + 1]);
      pack.store(out + 8 * n);
    }
  }
}

/// What is known of the tile's query rows.
struct QueryRows {
  float statistic[kTile], sum[kTile];  // log-sum-exp in units of log 2; Σ dout·out
  std::int64_t start[kTile];           // first key row seen

  __device__ void fill(const Problem& p, std::int64_t sample, std::int64_t first, int head,
                       const float* statistics, const float* row_sums) {
    for (int i = static_cast<int>(threadIdx.x); i < kTile; i += kThreads) {
      const std::int64_t query = first + i;
      const bool inside = query < p.sequence;
      const std::int64_t row = (sample * p.heads + head) * p.sequence + query;
      statistic[i] = inside ? statistics[row] * kLog2E : 0.0f;
      if (row_sums != nullptr) sum[i] = inside ? row_sums[row] : 0.0f;
      start[i] = inside && p.starts != nullptr ? p.starts[sample * p.sequence + query] : 0;
    }
  }
};

/// The gradient of a score, and the probability, from score and gradient of the probability.
struct Weights {
  float probability, dscore;
};
__device__ inline Weights weigh(const Problem& p, const QueryRows& rows, std::int64_t first_query, int i,
                                std::int64_t key, float score, float dprobability) {
  const std::int64_t query = first_query + i;
  const bool seen = query < p.sequence && key >= rows.start[i] && key <= p.keys - p.sequence + query;
  const float probability = seen ? exp2f(score * p.scale * kLog2E - rows.statistic[i]) : 0.0f;
  return {probability, probability * (dprobability - rows.sum[i]) * p.scale};
}

template <int D>
struct Shared {
  Tile<D> query, dout, key, value;
  QueryRows rows;
};

template <int D>
__global__ void __launch_bounds__(kThreads)
    tile_query_kernel(const Problem p, const Rows<const bf16> query_rows, const Rows<const bf16> key_rows,
                      const Rows<const bf16> value_rows, const Rows<const bf16> out, const float* statistics,
                      const Rows<const bf16> dout, const Rows<bf16> dquery, float* row_sums) {
  extern __shared__ uint4 memory[];
  Shared<D>& shared = *reinterpret_cast<Shared<D>*>(memory);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, head = blockIdx.y, size = p.head_size;
  const int kv_head = (head + p.offset) / p.group;
  const std::int64_t sample = blockIdx.z, first = std::int64_t{blockIdx.x} * kTile;
  shared.query.fill(query_rows, sample, first, p.sequence, head, size);
  shared.dout.fill(dout, sample, first, p.sequence, head, size);
  shared.key.fill(out, sample, first, p.sequence, head, size);  // for the row sums
  shared.rows.fill(p, sample, first, head, statistics, nullptr);
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < kTile; i += kThreads) {
    float sum = 0.0f;
    for (int c = 0; c < size; ++c) sum += to_float(*shared.dout.at(i, c)) * to_float(*shared.key.at(i, c));
    shared.rows.sum[i] = sum;
    if (first + i < p.sequence) row_sums[(sample * p.heads + head) * p.sequence + first + i] = sum;
  }

  // Starts never fall along a sample: the first row's is the least.
  const std::int64_t last = min(first + kTile, p.sequence) - 1;
  const std::int64_t end = p.keys - p.sequence + last + 1;
  float dq[D / 8][4] = {};
  for (std::int64_t keys = shared.rows.start[0] / kTile * kTile; keys < end; keys += kTile) {
    __syncthreads();
    shared.key.fill(key_rows, sample, keys, p.keys, kv_head, size);
    shared.value.fill(value_rows, sample, keys, p.keys, kv_head, size);
    __syncthreads();
    Strip score, dscore;
    multiply_rows(score, shared.query, 16 * warp, shared.key);
    multiply_rows(dscore, shared.dout, 16 * warp, shared.value);
#pragma unroll
    for (int n = 0; n < kTile / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = 16 * warp + lane / 4 + i / 2 * 8;
        const std::int64_t key = keys + 8 * n + lane % 4 * 2 + i % 2;
        dscore[n][i] = weigh(p, shared.rows, first, row, key, score[n][i], dscore[n][i]).dscore;
      }
    }
    add_product(dq, dscore, shared.key);
  }
  write_rows<D>(dq, dquery, sample, first + 16 * warp, p.sequence, head, size);
}

template <int D>
__global__ void __launch_bounds__(kThreads)
    tile_key_kernel(const Problem p, const Rows<const bf16> query_rows, const Rows<const bf16> key_rows,
                    const Rows<const bf16> value_rows, const float* statistics, const Rows<const bf16> dout,
                    const Rows<bf16> dkey, const Rows<bf16> dvalue, const float* row_sums) {
  extern __shared__ uint4 memory[];
  Shared<D>& shared = *reinterpret_cast<Shared<D>*>(memory);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, kv_head = blockIdx.y, size = p.head_size;
  const std::int64_t sample = blockIdx.z, first = std::int64_t{blockIdx.x} * kTile;
  shared.key.fill(key_rows, sample, first, p.keys, kv_head, size);
  shared.value.fill(value_rows, sample, first, p.keys, kv_head, size);

  const int first_head = max(0, kv_head * p.group - p.offset);
  const int end_head = min(p.heads, (kv_head + 1) * p.group - p.offset);
  const std::int64_t keys_before = p.keys - p.sequence;
  const std::int64_t first_query = first < keys_before ? 0 : (first - keys_before) / kTile * kTile;
  const std::int64_t end_query = queries_that_begin_by(p, sample, first + kTile - 1);
  float dk[D / 8][4] = {}, dv[D / 8][4] = {};
  for (int head = first_head; head < end_head; ++head) {
    for (std::int64_t queries = first_query; queries < end_query; queries += kTile) {
      __syncthreads();
      shared.query.fill(query_rows, sample, queries, p.sequence, head, size);
      shared.dout.fill(dout, sample, queries, p.sequence, head, size);
      shared.rows.fill(p, sample, queries, head, statistics, row_sums);
      __syncthreads();
      // Transposed: rows are keys, columns queries.
      Strip probability, dscore;
      multiply_rows(probability, shared.key, 16 * warp, shared.query);
      multiply_rows(dscore, shared.value, 16 * warp, shared.dout);
#pragma unroll
      for (int n = 0; n < kTile / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const std::int64_t key = first + 16 * warp + lane / 4 + i / 2 * 8;
          const Weights weights = weigh(p, shared.rows, queries, 8 * n + lane % 4 * 2 + i % 2, key,
                                        probability[n][i], dscore[n][i]);
          probability[n][i] = weights.probability;
          dscore[n][i] = weights.dscore;
        }
      }
      add_product(dv, probability, shared.dout);
      add_product(dk, dscore, shared.query);
    }
  }
  write_rows<D>(dk, dkey, sample, first + 16 * warp, p.keys, kv_head, size);
  write_rows<D>(dv, dvalue, sample, first + 16 * warp, p.keys, kv_head, size);
}

bool rows_take_packs(const SampleRows& rows) {
  return aligned(16, rows.data) && rows.row_stride % 8 == 0 && rows.sample_stride % 8 == 0;
}

}  // namespace

bool tile_attention_takes(const AttentionShape& shape, const AttentionOperands& operands, SampleRows out,
                          SampleRows dout, SampleRows dquery, SampleRows dkey, SampleRows dvalue) {
  const int size = shape.layout.head_size;
  if (operands.dtype != DType::kBF16 || size > 128 || size % 8 != 0) return false;
  for (const SampleRows& rows :
       {operands.query, operands.key, operands.value, out, dout, dquery, dkey, dvalue}) {
    if (!rows_take_packs(rows)) return false;
  }
  return true;
}

void tile_attention_backward(cudaStream_t stream, const AttentionShape& shape,
                             const AttentionOperands& operands, SampleRows out, Tensor statistics,
                             SampleRows dout, SampleRows dquery, SampleRows dkey, SampleRows dvalue,
                             Scratch& scratch) {
  const Problem problem = problem_of(shape, operands);
  auto* row_sums = static_cast<float*>(scratch.reserve(plain_attention_scratch(shape)));
  const auto batch = static_cast<unsigned>(shape.batch);
  const dim3 query_grid(grid_size(divide_up(shape.sequence, kTile)),
                        static_cast<unsigned>(shape.layout.heads), batch);
  const dim3 key_grid(grid_size(divide_up(shape.key_rows(), kTile)),
                      static_cast<unsigned>(shape.layout.kv_heads), batch);
  const auto query = rows_of<const bf16>(operands.query), key = rows_of<const bf16>(operands.key),
             value = rows_of<const bf16>(operands.value), gradient = rows_of<const bf16>(dout);
  const auto run = [&](auto columns) {
    constexpr int D = decltype(columns)::value;
    constexpr int kShared = sizeof(Shared<D>);
    OCTET_CUDA(
        cudaFuncSetAttribute(tile_query_kernel<D>, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared));
    OCTET_CUDA(
        cudaFuncSetAttribute(tile_key_kernel<D>, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared));
    tile_query_kernel<D><<<query_grid, kThreads, kShared, stream>>>(
        problem, query, key, value, rows_of<const bf16>(out), statistics.as<float>(), gradient,
        rows_of<bf16>(dquery), row_sums);
    tile_key_kernel<D><<<key_grid, kThreads, kShared, stream>>>(
        problem, query, key, value, statistics.as<float>(), gradient, rows_of<bf16>(dkey),
        rows_of<bf16>(dvalue), row_sums);
  };
  if (shape.layout.head_size <= 64) {
    run(Width<64>{});
  } else {
    run(Width<128>{});
  }
  OCTET_CUDA_LAUNCH("tile_attention_backward");
}

}  // namespace octet::cuda
