// Gradients of RMSNorm and LayerNorm with 8-bit copies beside them: of the output, transposed, and of the
// gradient, both ways. Bytes moved: 9·t·h (x, dy and dx in; dx and the transposed output out), and 2·t·h for
// the copies of dx. Rows wider than shared memory takes are computed as in norm.cu and copied by quantize.cu.
#include <algorithm>

#include "../output_codes.h"
#include "drivers.h"
#include "float8_codes.cuh"

namespace octet::cuda {
namespace {

constexpr int kPack = 8;          // adjacent elements of a row that a thread loads at once
constexpr int kPacks = 2;         // of a row that it holds
constexpr int kFewThreads = 128;  // for a row, where they do
constexpr int kAtOnce = 2;        // rows at work at once

// Blocks of kThreads that a multiprocessor's registers take: 168 or 128 registers a thread.
template <int kThreads>
constexpr int kResident = kThreads == kFewThreads ? 3 : 1;

using Eight = Pack<bf16, kPack>;

struct Backward {
  const bf16 *x, *weight, *bias;
  const float *rstd, *mean;
  const bf16* dy;
  bf16* dx;
  CodesOut y, dx_codes;
  float* partials;  // [gridDim.x, cols] for the weight, then as much for the bias
  std::int64_t rows, rows_a_block;
  int cols;
};

// Writes codes of kRows rows, `stage` [kRows, cols], to columns first_row … of `to` [cols, rows].
template <int kRows>
__device__ void write_turned(const std::uint8_t* stage, std::uint8_t* to, std::int64_t rows, int cols,
                             std::int64_t first_row) {
  constexpr int kGroups = kRows / 4;
  for (int col = static_cast<int>(threadIdx.x) * 4; col < cols; col += static_cast<int>(blockDim.x) * 4) {
    unsigned columns[kGroups][4];
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      unsigned words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        words[i] = *reinterpret_cast<const unsigned*>(stage + (group * 4 + i) * cols + col);
      turn_bytes(words, columns[group]);
    }
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      std::uint8_t* const at = to + (col + n) * rows + first_row;
      if constexpr (kGroups == 4) {
        *reinterpret_cast<uint4*>(at) =
            make_uint4(columns[0][n], columns[1][n], columns[2][n], columns[3][n]);
      } else {
        *reinterpret_cast<uint2*>(at) = make_uint2(columns[0][n], columns[1][n]);
      }
    }
  }
}

// A block works on a row with all its threads, and sums the parameters' gradients in registers over all its
// rows. Codes of kRows rows wait in shared memory to be written transposed.
template <int kThreads, int kRows, bool kLayer, bool kCopies>
__global__ void __launch_bounds__(kThreads, kResident<kThreads>) coded_backward_kernel(const Backward p) {
  extern __shared__ uint4 shared[];
  auto* const y_stage = reinterpret_cast<std::uint8_t*>(shared);
  std::uint8_t* const dx_stage = y_stage + kRows * p.cols;
  const int packs = p.cols / kPack;
  const float y_scale = scale_of<true>(*p.y.largest), y_inverse = 1.0f / y_scale, y_known = p.y.known();
  float dx_scale = 1.0f, dx_known = 0.0f;
  if constexpr (kCopies) {
    dx_scale = scale_of<false>(*p.dx_codes.largest);
    dx_known = p.dx_codes.known();
  }
  const float dx_inverse = 1.0f / dx_scale;
  float y_found = 0.0f, dx_found = 0.0f;
  float dweight[kPacks][kPack] = {}, dbias[kPacks][kPack] = {};

  const std::int64_t first = blockIdx.x * p.rows_a_block;
  const std::int64_t end = first + p.rows_a_block < p.rows ? first + p.rows_a_block : p.rows;
  for (std::int64_t part = first; part < end; part += kRows) {
#pragma unroll 1
    for (int r = 0; r < kRows; r += kAtOnce) {
      Eight x[kAtOnce][kPacks], dy[kAtOnce][kPacks], dx[kAtOnce][kPacks];
      float rstd[kAtOnce], mean[kAtOnce];
      float sums[2 * kAtOnce] = {};  // of g and of g·xhat, where g = dy·weight
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const std::int64_t row = part + r + i;
#pragma unroll
        for (int k = 0; k < kPacks; ++k) {
          const int pack = threadIdx.x + k * blockDim.x;
          if (pack >= packs) continue;
          const std::int64_t at = row * p.cols + pack * kPack;
          x[i][k] = Eight::load(p.x + at);
          dy[i][k] = Eight::load(p.dy + at);
          dx[i][k] = Eight::load(p.dx + at);
        }
        rstd[i] = p.rstd[row];
        mean[i] = kLayer ? p.mean[row] : 0.0f;
      }
#pragma unroll
      for (int k = 0; k < kPacks; ++k) {
        const int pack = threadIdx.x + k * blockDim.x;
        if (pack >= packs) continue;
        const Eight weight = Eight::load(p.weight + pack * kPack);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
          for (int n = 0; n < kPack; ++n) {
            const float xhat = (x[i][k][n] - mean[i]) * rstd[i];
            const float g = dy[i][k][n] * weight[n];
            if constexpr (kLayer) {
              sums[2 * i] += g;
              dbias[k][n] += dy[i][k][n];
            }
            sums[2 * i + 1] += g * xhat;
            dweight[k][n] += dy[i][k][n] * xhat;
          }
        }
      }
      row_sums(sums);
#pragma unroll
      for (int k = 0; k < kPacks; ++k) {
        const int pack = threadIdx.x + k * blockDim.x;
        if (pack >= packs) continue;
        const Eight weight = Eight::load(p.weight + pack * kPack);
        Eight bias;
        if constexpr (kLayer) bias = Eight::load(p.bias + pack * kPack);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const float mean_g = kLayer ? sums[2 * i] / p.cols : 0.0f;
          const float mean_gx = sums[2 * i + 1] / p.cols;
          Eight y;
#pragma unroll
          for (int n = 0; n < kPack; ++n) {
            const float xhat = (x[i][k][n] - mean[i]) * rstd[i];
            const float g = dy[i][k][n] * weight[n];
            dx[i][k].set(n, dx[i][k][n] + rstd[i] * (g - mean_g - xhat * mean_gx));
            if constexpr (kLayer) {
              y.set(n, xhat * weight[n] + bias[n]);
            } else {
              y.set(n, xhat * weight[n]);
            }
          }
          const std::int64_t at = (part + r + i) * p.cols + pack * kPack;
          const int staged = (r + i) * p.cols + pack * kPack;
          dx[i][k].store(p.dx + at);
          y_found = largest_magnitude(y_found, y);
          *reinterpret_cast<uint2*>(y_stage + staged) = codes_of<true>(y, y_inverse);
          if constexpr (kCopies) {
            dx_found = largest_magnitude(dx_found, dx[i][k]);
            const uint2 codes = codes_of<false>(dx[i][k], dx_inverse);
            *reinterpret_cast<uint2*>(dx_stage + staged) = codes;
            *reinterpret_cast<uint2*>(p.dx_codes.codes + at) = codes;
          }
        }
      }
    }
    __syncthreads();
    write_turned<kRows>(y_stage, p.y.transposed, p.rows, p.cols, part);
    if constexpr (kCopies) write_turned<kRows>(dx_stage, p.dx_codes.transposed, p.rows, p.cols, part);
    __syncthreads();  // until the stage may be written again
  }

  raise_by_warp(p.y.seen, y_known, y_found);
  if constexpr (kCopies) raise_by_warp(p.dx_codes.seen, dx_known, dx_found);
  if (threadIdx.x == 0 && blockIdx.x == 0) {
    *p.y.scale = y_scale;
    if constexpr (kCopies) *p.dx_codes.scale = dx_scale;
  }
  float* const to = p.partials + std::int64_t{blockIdx.x} * p.cols;
  float* const to_bias = to + std::int64_t{gridDim.x} * p.cols;
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    const int pack = threadIdx.x + k * blockDim.x;
    if (pack >= packs) continue;
#pragma unroll
    for (int n = 0; n < kPack; ++n) {
      to[pack * kPack + n] = dweight[k][n];
      if constexpr (kLayer) to_bias[pack * kPack + n] = dbias[k][n];
    }
  }
}

template <int kThreads, int kRows, bool kLayer, bool kCopies>
std::int64_t launch(cudaStream_t stream, Backward p, Scratch& scratch) {
  const auto threads = static_cast<unsigned>(round_up(divide_up(p.cols, kPack * kPacks), 32));
  const std::int64_t resident = scratch.multiprocessors() * (kResident<kThreads> * kThreads / threads);
  p.rows_a_block = round_up(divide_up(p.rows, std::max<std::int64_t>(resident, 1)), 16);
  const std::int64_t blocks = divide_up(p.rows, p.rows_a_block);
  p.partials = static_cast<float*>(scratch.reserve(blocks * p.cols * 2 * size_of(DType::kF32)));
  const std::size_t shared = static_cast<std::size_t>((kCopies ? 2 : 1) * kRows * p.cols);
  const auto kernel = coded_backward_kernel<kThreads, kRows, kLayer, kCopies>;
  OCTET_CUDA(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared)));
  coded_backward_kernel<kThreads, kRows, kLayer, kCopies><<<grid_size(blocks), threads, shared, stream>>>(p);
  return blocks;
}

// Shared memory that every GPU with 8-bit matrix units gives a block.
constexpr std::int64_t kMostShared = 96 * 1024;
// The widest rows that kFewThreads hold. Of those 16 are staged at once, of wider ones 8, so that several
// blocks fit a multiprocessor.
constexpr std::int64_t kNarrowRow = kFewThreads * kPacks * kPack;

}  // namespace

void coded_norm_backward(cudaStream_t stream, const NormBackward& a, Scratch& scratch) {
  const std::int64_t rows = a.x.rows, cols = a.x.cols;
  if (a.dx_sums) bias_backward(stream, a.dx, a.dx_sums, a.accumulate, scratch);
  if (a.x.size() == 0) return;
  if (2 * 8 * cols > kMostShared) {
    NormBackward wide = a;
    wide.y_codes = wide.dx_codes = {};
    wide.dx_sums = {};
    wide.y = a.dy;
    norm_backward(stream, wide, scratch);
    quantize(stream, quantize_of(wide.y, a.y_codes));
    if (a.dx_codes) quantize(stream, quantize_of(a.dx, a.dx_codes));
    return;
  }
  OCTET_ASSERT(aligned(16, a.x.data, a.weight.data, a.bias.data, a.dy.data, a.dx.data,
                       a.y_codes.transposed.data, a.dx_codes.codes.data, a.dx_codes.transposed.data));
  const bool layer = a.kind == NormKind::kLayer;
  const auto values = [](const Tensor& tensor) { return static_cast<const bf16*>(tensor.data); };
  const Backward p{values(a.x),
                   values(a.weight),
                   values(a.bias),
                   static_cast<const float*>(a.rstd.data),
                   static_cast<const float*>(a.mean.data),
                   values(a.dy),
                   static_cast<bf16*>(a.dx.data),
                   CodesOut(a.y_codes),
                   CodesOut(a.dx_codes),
                   nullptr,
                   rows,
                   0,
                   static_cast<int>(cols)};
  std::int64_t blocks = 0;
  const auto run = [&](auto threads, auto staged, auto copies) {
    constexpr int kThreads = decltype(threads)::value, kRows = decltype(staged)::value;
    constexpr bool kCopies = decltype(copies)::value;
    blocks = layer ? launch<kThreads, kRows, true, kCopies>(stream, p, scratch)
                   : launch<kThreads, kRows, false, kCopies>(stream, p, scratch);
  };
  const auto run_width = [&](auto copies) {
    if (cols <= kNarrowRow) {
      run(Width<kFewThreads>{}, Width<16>{}, copies);
    } else {
      run(Width<kMostRowThreads>{}, Width<8>{}, copies);
    }
  };
  if (a.dx_codes) {
    run_width(std::true_type{});
  } else {
    run_width(std::false_type{});
  }
  OCTET_CUDA_LAUNCH("coded_norm_backward");
  const auto* const partials = static_cast<const float*>(scratch.reserve(0));
  sum_partials(stream, partials, blocks, cols, cols, a.dweight.as<float>(), a.accumulate);
  if (layer)
    sum_partials(stream, partials + blocks * cols, blocks, cols, cols, a.dbias.as<float>(), a.accumulate);
}

}  // namespace octet::cuda
