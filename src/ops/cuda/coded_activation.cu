// SwiGLU and GELU whose results are 8-bit codes alone, straight or transposed: no bfloat16 result is written
// or read. Bytes moved, f outputs a row: forward (gated) 5·t·f, else 3·t·f; backward 11·t·f, else 7·t·f.
#include "activation_math.cuh"
#include "code_tile.cuh"
#include "drivers.h"

namespace octet::cuda {
namespace {

constexpr int kThreads = CodeTile::kThreads;
constexpr int kPack = CodeTile::kPack;
constexpr int kChunk = 16;  // codes of a row that a thread of the forward pass stores at once
using Eight = CodeTile::Elements;

struct Forward {
  const bf16* in;
  unsigned chunks, chunks_a_row;  // of the output
  CodesOut out;
};

template <bool kGated>
__global__ void __launch_bounds__(kThreads) coded_forward_kernel(const Forward p) {
  const unsigned chunk = blockIdx.x * kThreads + threadIdx.x;
  const float scale = scale_of<true>(*p.out.largest), inverse = 1.0f / scale;
  const float known = p.out.known();
  LargestMagnitude found;
  if (chunk < p.chunks) {
    // A row of gates and ups is two rows of outputs long.
    const unsigned row = kGated ? chunk / p.chunks_a_row : 0;
    const std::int64_t width = std::int64_t{p.chunks_a_row} * kChunk;
    const bf16* const from = p.in + std::int64_t{chunk} * kChunk + row * width;
    Eight in[2], up[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      in[half] = Eight::load(from + half * kPack);
      if constexpr (kGated) up[half] = Eight::load(from + width + half * kPack);
    }
    uint2 codes[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float out[kPack];
      in[half].widen(out);
      if constexpr (kGated) {
        float ups[kPack];
        up[half].widen(ups);
#pragma unroll
        for (int n = 0; n < kPack; ++n) out[n] = swiglu<bf16>(out[n], ups[n]);
      } else {
#pragma unroll
        for (int n = 0; n < kPack; ++n) out[n] = gelu<bf16>(out[n]);
      }
      const Eight rounded = Eight::rounded(out);
      found.take(rounded);
      codes[half] = codes_of<true>(rounded, inverse);
    }
    *reinterpret_cast<uint4*>(p.out.codes + std::int64_t{chunk} * kChunk) =
        make_uint4(codes[0].x, codes[0].y, codes[1].x, codes[1].y);
  }
  raise_by_warp(p.out.seen, known, found.value());
  if (chunk == 0) *p.out.scale = scale;
}

struct Backward {
  const bf16 *in, *dout;
  std::int64_t rows, cols;  // of dout
  CodesOut din, out;
  float* partials;  // [row of tiles, cols], sums over its rows of din
};

template <bool kGated, bool kBias>
__global__ void __launch_bounds__(kThreads, kGated ? 2 : 3) coded_backward_kernel(const Backward p) {
  constexpr int kGradients = kGated ? 2 : 1, kGroup = CodeTile::kGroup;
  __shared__ CodeTile::Turned turned[kGradients + 1];
  const CodeTile tile(p.rows, p.cols);
  const bool inside = tile.inside();
  const std::int64_t in_cols = p.cols * kGradients;
  const std::int64_t at = tile.row() * p.cols + tile.col(), in_at = tile.row() * in_cols + tile.col();

  Eight in[kGradients][kGroup], dout[kGroup];
#pragma unroll
  for (int i = 0; i < kGroup; ++i) {
    if (!inside) continue;
#pragma unroll
    for (int g = 0; g < kGradients; ++g) in[g][i] = Eight::load(p.in + in_at + i * in_cols + g * p.cols);
    dout[i] = Eight::load(p.dout + at + i * p.cols);
  }
  const float din_scale = scale_of<false>(*p.din.largest), out_scale = scale_of<true>(*p.out.largest);
  const float din_known = p.din.known(), out_known = p.out.known();
  const float din_inverse = 1.0f / din_scale, out_inverse = 1.0f / out_scale;
  LargestMagnitude din_found, out_found;
  float sums[kPack] = {};

  if (inside) {
    uint2 din_codes[kGradients][kGroup], out_codes[kGroup];
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      float gradients[kGradients][kPack], out[kPack];
#pragma unroll
      for (int g = 0; g < kGradients; ++g) in[g][i].widen(gradients[g]);
      dout[i].widen(out);
#pragma unroll
      for (int n = 0; n < kPack; ++n) {
        if constexpr (kGated) {
          const SwigluPasses of = swiglu_passes<bf16>(gradients[0][n], gradients[1][n], out[n]);
          gradients[0][n] = of.dgate;
          gradients[1][n] = of.dup;
          out[n] = of.out;
        } else {
          const GeluPasses of = gelu_passes<bf16>(gradients[0][n], out[n]);
          gradients[0][n] = of.din;
          out[n] = of.out;
        }
      }
#pragma unroll
      for (int g = 0; g < kGradients; ++g) {
        const Eight din = Eight::rounded(gradients[g]);
        if constexpr (kBias) {
          din.widen(gradients[g]);
#pragma unroll
          for (int n = 0; n < kPack; ++n) sums[n] += gradients[g][n];
        }
        din_found.take(din);
        din_codes[g][i] = codes_of<false>(din, din_inverse);
        *reinterpret_cast<uint2*>(p.din.codes + in_at + i * in_cols + g * p.cols) = din_codes[g][i];
      }
      const Eight once_more = Eight::rounded(out);
      out_found.take(once_more);
      out_codes[i] = codes_of<true>(once_more, out_inverse);
    }
#pragma unroll
    for (int g = 0; g < kGradients; ++g) tile.turn(din_codes[g], turned[g]);
    tile.turn(out_codes, turned[kGradients]);
  }
  raise_by_warp(p.din.seen, din_known, din_found.value());
  raise_by_warp(p.out.seen, out_known, out_found.value());
  if (threadIdx.x == 0 && blockIdx.x == 0 && blockIdx.y == 0) {
    *p.din.scale = din_scale;
    *p.out.scale = out_scale;
  }
  if constexpr (kBias) {
    constexpr int kCols = CodeTile::kCols, kPacks = CodeTile::kPacks;
    __shared__ float warps[kThreads / 32][kCols];
#pragma unroll
    for (int n = 0; n < kPack; ++n) {
      const float sum = sums[n] + __shfl_xor_sync(0xffffffffu, sums[n], kPacks);
      if (threadIdx.x % 32 < kPacks) warps[threadIdx.x / 32][tile.pack() * kPack + n] = sum;
    }
    __syncthreads();
    const std::int64_t to = tile.first_col() + static_cast<int>(threadIdx.x);
    if (threadIdx.x < kCols && to < p.cols && tile.first_row() < p.rows) {
      float sum = 0.0f;
#pragma unroll
      for (int warp = 0; warp < kThreads / 32; ++warp) sum += warps[warp][threadIdx.x];
      p.partials[tile.first_row() / CodeTile::kRows * p.cols + to] = sum;
    }
  } else {
    __syncthreads();
  }
  if constexpr (kGated) {
    tile.write(turned, {p.din.transposed, p.din.transposed + p.cols * p.rows, p.out.transposed});
  } else {
    tile.write(turned, {p.din.transposed, p.out.transposed});
  }
}

}  // namespace

void coded_activation(cudaStream_t stream, const CodedActivation& a) {
  const Tensor& codes = a.out.codes;
  OCTET_ASSERT(aligned(16, a.in.data, codes.data) && codes.size() / kChunk < 0x7fffffff);
  const Forward p{static_cast<const bf16*>(a.in.data), static_cast<unsigned>(codes.size() / kChunk),
                  static_cast<unsigned>(codes.cols / kChunk), CodesOut(a.out)};
  if (p.chunks == 0) return;
  const unsigned grid = grid_size(divide_up(p.chunks, kThreads));
  if (a.gated) {
    coded_forward_kernel<true><<<grid, kThreads, 0, stream>>>(p);
  } else {
    coded_forward_kernel<false><<<grid, kThreads, 0, stream>>>(p);
  }
  OCTET_CUDA_LAUNCH("coded_activation");
}

std::int64_t coded_activation_backward_scratch(std::int64_t tokens, std::int64_t cols) {
  return divide_up(tokens, CodeTile::kRows) * cols * size_of(DType::kF32);
}

void coded_activation_backward(cudaStream_t stream, const CodedActivationBackward& a, Scratch& scratch) {
  const std::int64_t rows = a.dout.rows, cols = a.dout.cols;
  if (a.dout.size() == 0) return;
  OCTET_ASSERT(
      aligned(16, a.in.data, a.dout.data, a.din.codes.data, a.din.transposed.data, a.out.transposed.data));
  const dim3 grid = CodeTile::grid(rows, cols);
  Backward p{static_cast<const bf16*>(a.in.data),
             static_cast<const bf16*>(a.dout.data),
             rows,
             cols,
             CodesOut(a.din),
             CodesOut(a.out),
             nullptr};
  if (a.gated) {
    coded_backward_kernel<true, false><<<grid, kThreads, 0, stream>>>(p);
  } else if (!a.dbias) {
    coded_backward_kernel<false, false><<<grid, kThreads, 0, stream>>>(p);
  } else {
    p.partials = static_cast<float*>(scratch.reserve(coded_activation_backward_scratch(rows, cols)));
    coded_backward_kernel<false, true><<<grid, kThreads, 0, stream>>>(p);
  }
  OCTET_CUDA_LAUNCH("coded_activation_backward");
  if (a.dbias)
    sum_partials(stream, p.partials, divide_up(rows, CodeTile::kRows), cols, cols, a.dbias.as<float>(),
                 a.accumulate);
}

}  // namespace octet::cuda
