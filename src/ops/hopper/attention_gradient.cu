#include "attention_gradient.h"

#include <algorithm>
#include <limits>

#include "../../runtime/cuda/cuda_check.h"
#include "../attention_heads.h"
#include "attention_gradient_kernel.cuh"
#include "attention_gradient_scratch.h"
#include "hopper_gpu.h"
#include "tensor_maps.h"

namespace octet::hopper {
namespace {

/// For every query row of whole tiles: log2(e) · log-sum-exp, and the sum of out · dout, to which all score
/// gradients of the row are relative. Rows beyond the sequence get infinity, so that no key has a part in
/// them. A warp takes some heads of four rows; a row of blocks, a sample. Counters that come next are set to
/// zero besides.
template <int kHead>
struct RowValues {
  static constexpr int kRows = 4, kLanes = kHead / 8, kHeads = 32 / kLanes, kWarps = 8;

  const __nv_bfloat16 *out, *dout;
  std::int64_t out_row, out_sample, dout_row, dout_sample;  ///< strides
  const float* statistics;
  float* rows;
  unsigned* counters;
  int counter_count;  ///< at most a thread each
  int heads, sequence, padded;
};

template <int kHead>
__global__ void __launch_bounds__(256) row_values_kernel(RowValues<kHead> p) {
  using Shape = RowValues<kHead>;
  constexpr int kRows = Shape::kRows;
  const int lane = static_cast<int>(threadIdx.x) % 32, part = lane % Shape::kLanes;
  const int groups = (p.heads + Shape::kHeads - 1) / Shape::kHeads;
  const int item = static_cast<int>(blockIdx.x) * Shape::kWarps + static_cast<int>(threadIdx.x) / 32;
  const int head = item % groups * Shape::kHeads + lane / Shape::kLanes, row = item / groups * kRows;
  const unsigned counter = (blockIdx.y * gridDim.x + blockIdx.x) * blockDim.x + threadIdx.x;
  if (counter < static_cast<unsigned>(p.counter_count)) p.counters[counter] = 0;
  if (row >= p.padded) return;
  const std::int64_t sample = blockIdx.y, col = std::int64_t{min(head, p.heads - 1)} * kHead + part * 8;
  uint4 values[2][kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const std::int64_t at = min(row + i, p.sequence - 1);
    values[0][i] = *reinterpret_cast<const uint4*>(p.out + sample * p.out_sample + at * p.out_row + col);
    values[1][i] = *reinterpret_cast<const uint4*>(p.dout + sample * p.dout_sample + at * p.dout_row + col);
  }
  float sums[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const std::uint32_t a[4] = {values[0][i].x, values[0][i].y, values[0][i].z, values[0][i].w};
    const std::uint32_t b[4] = {values[1][i].x, values[1][i].y, values[1][i].z, values[1][i].w};
    sums[i] = 0.0f;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 x = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&a[j]));
      const float2 y = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&b[j]));
      sums[i] += x.x * y.x + x.y * y.y;
    }
#pragma unroll
    for (int offset = Shape::kLanes / 2; offset > 0; offset /= 2) {
      sums[i] += __shfl_xor_sync(0xffffffffu, sums[i], offset);
    }
  }
  if (head >= p.heads || part >= kRows) return;
  const float sum = part == 0 ? sums[0] : part == 1 ? sums[1] : part == 2 ? sums[2] : sums[3];
  const std::int64_t series = sample * p.heads + head;
  const bool inside = row + part < p.sequence;
  const float log_sum =
      inside ? p.statistics[series * p.sequence + row + part] * kLog2E : __int_as_float(0x7f800000);
  using Tiles = GradientTiles<kHead>;
  constexpr int kQueries = Tiles::kQueries;
  const int at = row + part;
  float* const to =
      p.rows + 2 * (series * p.padded + at / kQueries * kQueries) + Tiles::row_place(at % kQueries);
  to[0] = log_sum;
  to[kQueries] = inside ? sum : 0.0f;
}

template <int kHead>
void launch(cudaStream_t stream, const AttentionShape& shape, const AttentionOperands& operands,
            const SampleRows& out, const Tensor& statistics, const SampleRows& dout, const SampleRows& dquery,
            const SampleRows& dkey, const SampleRows& dvalue, void* scratch, int multiprocessors) {
  using Tiles = GradientTiles<kHead>;
  const GradientScratch layout = gradient_scratch(shape, multiprocessors);
  const HeadLayout& heads = shape.layout;
  const std::int64_t batch = shape.batch, sequence = shape.sequence, keys = shape.key_rows();
  const std::int64_t query_cols = heads.query(), key_cols = std::int64_t{heads.kv_heads} * kHead;
  std::byte* const memory = static_cast<std::byte*>(scratch);

  AttentionGradient p{};
  p.query = sample_map(operands.query, batch, sequence, query_cols, Tiles::kQueries);
  p.dout = sample_map(dout, batch, sequence, query_cols, Tiles::kQueries);
  p.key = sample_map(operands.key, batch, keys, key_cols, kPieceKeys);
  p.value = sample_map(operands.value, batch, keys, key_cols, kPieceKeys);
  p.sums = reinterpret_cast<float*>(memory);
  float* const rows = reinterpret_cast<float*>(memory + layout.sums_bytes);
  p.rows = rows;
  p.taken = reinterpret_cast<unsigned*>(memory + layout.sums_bytes + layout.rows_bytes);
  p.counters = p.taken + 1;
  p.dquery = sample_map(dquery, batch, sequence, query_cols, 64);
  p.dkey = sample_map(dkey, batch, keys, key_cols, 64);
  p.dvalue = sample_map(dvalue, batch, keys, key_cols, 64);
  p.batch = static_cast<int>(batch);
  p.kv_heads = heads.kv_heads;
  p.group = heads.heads / heads.kv_heads;
  p.sequence = static_cast<int>(sequence);
  p.keys = static_cast<int>(keys);
  p.q_tiles = static_cast<int>(layout.q_tiles);
  p.pieces = static_cast<int>(layout.pieces);
  p.slots = static_cast<int>(layout.slots);
  p.mixed = static_cast<int>(layout.mixed);
  p.rising = layout.rising;
  p.scale = shape.scale;

  using Values = RowValues<kHead>;
  const Values values{static_cast<const __nv_bfloat16*>(out.data),
                      static_cast<const __nv_bfloat16*>(dout.data),
                      out.row_stride,
                      out.sample_stride,
                      dout.row_stride,
                      dout.sample_stride,
                      statistics.as<float>(),
                      rows,
                      p.taken,
                      static_cast<int>(layout.counters_bytes / 4),
                      heads.heads,
                      p.sequence,
                      p.q_tiles * Tiles::kQueries};
  const int items = values.padded / Values::kRows * ((heads.heads + Values::kHeads - 1) / Values::kHeads);
  const dim3 blocks(static_cast<unsigned>((items + Values::kWarps - 1) / Values::kWarps),
                    static_cast<unsigned>(batch));
  OCTET_ASSERT(values.counter_count <= std::int64_t{256} * blocks.x * blocks.y);
  row_values_kernel<kHead><<<blocks, 256, 0, stream>>>(values);
  OCTET_CUDA_LAUNCH("row_values_kernel");
  const auto kernel = attention_gradient_kernel<kHead>;
  OCTET_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Tiles::kSharedBytes));
  const std::int64_t pieces = batch * p.kv_heads * layout.pieces;
  const auto grid = static_cast<unsigned>(std::min<std::int64_t>(multiprocessors, pieces));
  attention_gradient_kernel<kHead><<<grid, kGradientThreads, Tiles::kSharedBytes, stream>>>(p);
  OCTET_CUDA_LAUNCH("attention_gradient_kernel");
}

}  // namespace

AttentionGradients::AttentionGradients() : multiprocessors_(hopper_multiprocessors()) {}

bool AttentionGradients::takes(const AttentionShape& shape) const {
  const HeadLayout& layout = shape.layout;
  constexpr std::int64_t kMost = std::numeric_limits<int>::max() / 2, kMostBlockRows = 65535;
  if (multiprocessors_ == 0 || (layout.head_size != 64 && layout.head_size != 128)) return false;
  const std::int64_t pieces = (shape.key_rows() + kPieceKeys - 1) / kPieceKeys;
  if (shape.key_rows() > kMost || shape.batch * layout.heads * pieces > kMost) return false;
  const KeyHeads heads = key_heads_of(layout);
  return shape.batch <= kMostBlockRows && heads.group > 0 && heads.count == layout.kv_heads;
}

bool AttentionGradients::takes(const AttentionShape& shape, const AttentionOperands& operands,
                               const SampleRows& out, const SampleRows& dout, const SampleRows& dquery,
                               const SampleRows& dkey, const SampleRows& dvalue) const {
  if (operands.dtype != DType::kBF16 || operands.document_starts || !takes(shape)) return false;
  for (const SampleRows& rows :
       {operands.query, operands.key, operands.value, out, dout, dquery, dkey, dvalue}) {
    if (!rows_begin_at_16_bytes(rows, shape.batch)) return false;
  }
  return true;
}

std::int64_t AttentionGradients::scratch_bytes(const AttentionShape& shape) const {
  return gradient_scratch(shape, multiprocessors_).bytes();
}

std::int64_t AttentionGradients::most_scratch_bytes(const AttentionShape& shape) const {
  return takes(shape) ? most_gradient_scratch(shape, multiprocessors_) : 0;
}

void AttentionGradients::run(cudaStream_t stream, const AttentionShape& shape,
                             const AttentionOperands& operands, const SampleRows& out, Tensor statistics,
                             const SampleRows& dout, const SampleRows& dquery, const SampleRows& dkey,
                             const SampleRows& dvalue, void* scratch) const {
  const auto run_head = shape.layout.head_size == 64 ? launch<64> : launch<128>;
  run_head(stream, shape, operands, out, statistics, dout, dquery, dkey, dvalue, scratch, multiprocessors_);
}

}  // namespace octet::hopper
