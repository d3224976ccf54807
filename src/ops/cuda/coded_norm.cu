// Gradients of RMSNorm and LayerNorm with 8-bit copies beside them: of the output, transposed, and of the
// gradient, both ways. norm.cu computes the gradients; one pass over tiles makes the copies, and the output
// anew from x. Bytes moved: 8·t·h (x, dy and dx in; dx out), and 3·t·h for the copies of the output, 4·t·h
// for those of dx.
#include "code_tile.cuh"
#include "drivers.h"

namespace octet::cuda {
namespace {

constexpr int kThreads = CodeTile::kThreads;
constexpr int kGroup = CodeTile::kGroup;
constexpr int kPack = CodeTile::kPack;
constexpr int kResident = 3;  // blocks that a multiprocessor's registers take
using Eight = CodeTile::Elements;

struct Copies {
  const bf16 *x, *weight, *bias;
  const float *rstd, *mean;
  const bf16* dx;
  std::int64_t rows, cols;
  CodesOut y, dx_codes;
};

// The norm has just written dx and read x, the end of both last.
template <bool kLayer, bool kCopies>
__global__ void __launch_bounds__(kThreads, kResident) norm_codes_kernel(const Copies p) {
  __shared__ CodeTile::Turned turned[kCopies ? 2 : 1];
  const CodeTile tile(p.rows, p.cols, true);
  const bool inside = tile.inside();
  const std::int64_t at = tile.row() * p.cols + tile.col();
  Eight x[kGroup], dx[kGroup], weight_pack, bias_pack;
  float rstd[kGroup], mean[kGroup] = {};
  if (inside) {
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      x[i] = Eight::load(p.x + at + i * p.cols);
      if constexpr (kCopies) dx[i] = Eight::load(p.dx + at + i * p.cols);
      rstd[i] = p.rstd[tile.row() + i];
      if constexpr (kLayer) mean[i] = p.mean[tile.row() + i];
    }
    weight_pack = Eight::load(p.weight + tile.col());
    if constexpr (kLayer) bias_pack = Eight::load(p.bias + tile.col());
  }
  const float y_scale = scale_of<true>(*p.y.largest), y_known = p.y.known();
  float dx_scale = 1.0f, dx_known = 0.0f;
  if constexpr (kCopies) {
    dx_scale = scale_of<false>(*p.dx_codes.largest);
    dx_known = p.dx_codes.known();
  }
  const float y_inverse = 1.0f / y_scale, dx_inverse = 1.0f / dx_scale;
  LargestMagnitude y_found, dx_found;

  if (inside) {
    float weight[kPack], bias[kPack] = {};
    weight_pack.widen(weight);
    if constexpr (kLayer) bias_pack.widen(bias);
    uint2 codes[kGroup];
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      float values[kPack];
      x[i].widen(values);
#pragma unroll
      for (int n = 0; n < kPack; ++n) {  // as in norm.cu
        const float xhat = (values[n] - mean[i]) * rstd[i];
        if constexpr (kLayer) {
          values[n] = xhat * weight[n] + bias[n];
        } else {
          values[n] = xhat * weight[n];
        }
      }
      const Eight y = Eight::rounded(values);
      y_found.take(y);
      codes[i] = codes_of<true>(y, y_inverse);
    }
    tile.turn(codes, turned[0]);
    if constexpr (kCopies) {
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        dx_found.take(dx[i]);
        codes[i] = codes_of<false>(dx[i], dx_inverse);
        *reinterpret_cast<uint2*>(p.dx_codes.codes + at + i * p.cols) = codes[i];
      }
      tile.turn(codes, turned[1]);
    }
  }
  raise_by_warp(p.y.seen, y_known, y_found.value());
  if constexpr (kCopies) raise_by_warp(p.dx_codes.seen, dx_known, dx_found.value());
  if (threadIdx.x == 0 && blockIdx.x == 0 && blockIdx.y == 0) {
    *p.y.scale = y_scale;
    if constexpr (kCopies) *p.dx_codes.scale = dx_scale;
  }
  __syncthreads();
  if constexpr (kCopies) {
    tile.write(turned, {p.y.transposed, p.dx_codes.transposed});
  } else {
    tile.write(turned, {p.y.transposed});
  }
}

template <bool kLayer>
void launch(cudaStream_t stream, const Copies& p, bool copies) {
  const dim3 grid = CodeTile::grid(p.rows, p.cols);
  if (copies) {
    norm_codes_kernel<kLayer, true><<<grid, kThreads, 0, stream>>>(p);
  } else {
    norm_codes_kernel<kLayer, false><<<grid, kThreads, 0, stream>>>(p);
  }
}

}  // namespace

void coded_norm_backward(cudaStream_t stream, const NormBackward& a, Scratch& scratch) {
  if (a.x.size() == 0) return norm_backward(stream, a, scratch);
  OCTET_ASSERT(aligned(16, a.x.data, a.weight.data, a.bias.data, a.dx.data, a.y_codes.transposed.data,
                       a.dx_codes.codes.data, a.dx_codes.transposed.data));
  NormBackward gradients = a;
  gradients.y_codes = gradients.dx_codes = {};
  norm_backward(stream, gradients, scratch);
  const auto values = [](const Tensor& tensor) { return static_cast<const bf16*>(tensor.data); };
  const Copies p{values(a.x),
                 values(a.weight),
                 values(a.bias),
                 static_cast<const float*>(a.rstd.data),
                 static_cast<const float*>(a.mean.data),
                 values(a.dx),
                 a.x.rows,
                 a.x.cols,
                 CodesOut(a.y_codes),
                 CodesOut(a.dx_codes)};
  if (a.kind == NormKind::kLayer) {
    launch<true>(stream, p, static_cast<bool>(a.dx_codes));
  } else {
    launch<false>(stream, p, static_cast<bool>(a.dx_codes));
  }
  OCTET_CUDA_LAUNCH("coded_norm_backward");
}

}  // namespace octet::cuda
