// SwiGLU and GELU, forward and backward.
// Bytes moved (compute dtype of s bytes, f outputs a row): swiglu forward 3·t·f·s, backward 6·t·f·s (gate, up
// and dout in; their replacements out); gelu forward 2·t·f·s, backward 4·t·f·s, gradient alone 3·t·f·s.
#include "activation_math.cuh"
#include "drivers.h"
#include "kernel_tools.cuh"

namespace octet::cuda {
namespace {

constexpr int kThreads = 256;

// blockIdx.x counts a row's blocks, row after row, so that only it has to be divided.
struct RowBlocks {
  unsigned blocks_a_row;
  std::int64_t packs;  // of one row
};

struct Place {
  std::int64_t row, pack;
};

__device__ inline Place place_of(const RowBlocks& split) {
  const unsigned row = blockIdx.x / split.blocks_a_row, block = blockIdx.x - row * split.blocks_a_row;
  return {std::int64_t{row}, std::int64_t{block} * kThreads + threadIdx.x};
}

// Blocks that a multiprocessor is to hold at least: measuring, which takes registers, as many as go without
// spilling; else 0, no bound.
template <bool kMeasure, int kBlocks>
constexpr int kResident = kMeasure ? kBlocks : 0;

// With kMeasure a kernel raises *largest, and threads past the end stay until their warp has done so.
template <typename T, int N, bool kMeasure>
__global__ void __launch_bounds__(kThreads, kResident<kMeasure, 8>)
    swiglu_forward_kernel(const T* gate_up, T* out, RowBlocks split, float* largest) {
  const Place at = place_of(split);
  const float known = kMeasure ? *largest : 0.0f;
  float found = 0.0f;
  if (at.pack < split.packs) {
    const T* gate_row = gate_up + at.row * 2 * split.packs * N;
    const Pack<T, N> gate = Pack<T, N>::load(gate_row + at.pack * N);
    const Pack<T, N> up = Pack<T, N>::load(gate_row + (split.packs + at.pack) * N);
    Pack<T, N> y;
#pragma unroll
    for (int n = 0; n < N; ++n) y.set(n, swiglu<T>(gate[n], up[n]));
    y.store(out + (at.row * split.packs + at.pack) * N);
    if constexpr (kMeasure) found = largest_magnitude(found, y);
  }
  if constexpr (kMeasure) raise_by_warp(largest, known, found);
}

template <typename T, int N, bool kMeasure>
__global__ void __launch_bounds__(kThreads, kResident<kMeasure, 6>)
    swiglu_backward_kernel(T* gate_up, T* dout, RowBlocks split, float* largest) {
  const Place at = place_of(split);
  const float known = kMeasure ? *largest : 0.0f;
  float found = 0.0f;
  if (at.pack < split.packs) {
    T* gate_at = gate_up + at.row * 2 * split.packs * N + at.pack * N;
    T* up_at = gate_at + split.packs * N;
    T* dout_at = dout + (at.row * split.packs + at.pack) * N;
    Pack<T, N> gate = Pack<T, N>::load(gate_at), up = Pack<T, N>::load(up_at),
               grad = Pack<T, N>::load(dout_at);
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const SwigluPasses of = swiglu_passes<T>(gate[n], up[n], grad[n]);
      gate.set(n, of.dgate);
      up.set(n, of.dup);
      grad.set(n, of.out);
    }
    gate.store(gate_at);
    up.store(up_at);
    grad.store(dout_at);
    if constexpr (kMeasure) found = largest_magnitude(largest_magnitude(found, gate), up);
  }
  if constexpr (kMeasure) raise_by_warp(largest, known, found);
}

template <typename T, int N, bool kMeasure>
__global__ void __launch_bounds__(kThreads, kResident<kMeasure, 8>)
    gelu_forward_kernel(const T* in, T* out, std::int64_t packs, float* largest) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const float known = kMeasure ? *largest : 0.0f;
  float found = 0.0f;
  if (i < packs) {
    Pack<T, N> x = Pack<T, N>::load(in + i * N);
#pragma unroll
    for (int n = 0; n < N; ++n) x.set(n, gelu<T>(x[n]));
    x.store(out + i * N);
    if constexpr (kMeasure) found = largest_magnitude(found, x);
  }
  if constexpr (kMeasure) raise_by_warp(largest, known, found);
}

template <typename T, int N, bool kMeasure>
__global__ void __launch_bounds__(kThreads, kResident<kMeasure, 8>)
    gelu_backward_kernel(T* in, T* dout, std::int64_t packs, float* largest) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const float known = kMeasure ? *largest : 0.0f;
  float found = 0.0f;
  if (i < packs) {
    Pack<T, N> x = Pack<T, N>::load(in + i * N), grad = Pack<T, N>::load(dout + i * N);
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const GeluPasses of = gelu_passes<T>(x[n], grad[n]);
      x.set(n, of.din);
      grad.set(n, of.out);
    }
    x.store(in + i * N);
    grad.store(dout + i * N);
    if constexpr (kMeasure) found = largest_magnitude(found, x);
  }
  if constexpr (kMeasure) raise_by_warp(largest, known, found);
}

template <typename T, int N>
__global__ void __launch_bounds__(kThreads) gelu_gradient_kernel(const T* in, T* dy, std::int64_t packs) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= packs) return;
  const Pack<T, N> x = Pack<T, N>::load(in + i * N);
  Pack<T, N> grad = Pack<T, N>::load(dy + i * N);
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const float v = x[n];
    const float t = hyperbolic_tangent<T>(kGeluScale * (v + kGeluCubic * v * v * v));
    grad.set(n, grad[n] * gelu_derivative(v, t));
  }
  grad.store(dy + i * N);
}

// Calls launch(T{}, Width<N>{}, measure, grid, split): measure.value tells whether `largest` is wanted.
template <typename Launch>
void swiglu(Tensor gate_up, Tensor out, Tensor largest, Launch launch) {
  if (out.size() == 0) return;
  const bool full = takes_full_packs(out.dtype, out.cols, gate_up.data, out.data);
  with_width(out.dtype, full, [&](auto element, auto width) {
    const std::int64_t packs = out.cols / decltype(width)::value;
    const unsigned blocks_a_row = grid_size(divide_up(packs, kThreads));
    with_measuring<decltype(element)>(largest, [&](auto measure) {
      launch(element, width, measure, grid_size(out.rows * blocks_a_row), RowBlocks{blocks_a_row, packs});
    });
  });
}

template <typename Launch>
void gelu(Tensor in, Tensor out, Tensor largest, Launch launch) {
  if (out.size() == 0) return;
  const bool full = takes_full_packs(out.dtype, out.size(), in.data, out.data);
  with_width(out.dtype, full, [&](auto element, auto width) {
    const std::int64_t packs = out.size() / decltype(width)::value;
    with_measuring<decltype(element)>(largest, [&](auto measure) {
      launch(element, width, measure, grid_size(divide_up(packs, kThreads)), packs);
    });
  });
}

}  // namespace

void swiglu_forward(cudaStream_t stream, Tensor gate_up, Tensor out, Tensor largest) {
  swiglu(gate_up, out, largest, [&](auto element, auto width, auto measure, unsigned grid, RowBlocks split) {
    using T = decltype(element);
    swiglu_forward_kernel<T, decltype(width)::value, decltype(measure)::value>
        <<<grid, kThreads, 0, stream>>>(static_cast<const T*>(gate_up.data), static_cast<T*>(out.data), split,
                                        static_cast<float*>(largest.data));
  });
  OCTET_CUDA_LAUNCH("swiglu_forward");
}

void swiglu_backward(cudaStream_t stream, Tensor gate_up, Tensor dout, Tensor largest) {
  swiglu(gate_up, dout, largest, [&](auto element, auto width, auto measure, unsigned grid, RowBlocks split) {
    using T = decltype(element);
    swiglu_backward_kernel<T, decltype(width)::value, decltype(measure)::value>
        <<<grid, kThreads, 0, stream>>>(static_cast<T*>(gate_up.data), static_cast<T*>(dout.data), split,
                                        static_cast<float*>(largest.data));
  });
  OCTET_CUDA_LAUNCH("swiglu_backward");
}

void gelu_forward(cudaStream_t stream, Tensor in, Tensor out, Tensor largest) {
  gelu(in, out, largest, [&](auto element, auto width, auto measure, unsigned grid, std::int64_t packs) {
    using T = decltype(element);
    gelu_forward_kernel<T, decltype(width)::value, decltype(measure)::value><<<grid, kThreads, 0, stream>>>(
        static_cast<const T*>(in.data), static_cast<T*>(out.data), packs, static_cast<float*>(largest.data));
  });
  OCTET_CUDA_LAUNCH("gelu_forward");
}

void gelu_backward(cudaStream_t stream, Tensor in, Tensor dout, Tensor largest) {
  gelu(in, dout, largest, [&](auto element, auto width, auto measure, unsigned grid, std::int64_t packs) {
    using T = decltype(element);
    gelu_backward_kernel<T, decltype(width)::value, decltype(measure)::value><<<grid, kThreads, 0, stream>>>(
        static_cast<T*>(in.data), static_cast<T*>(dout.data), packs, static_cast<float*>(largest.data));
  });
  OCTET_CUDA_LAUNCH("gelu_backward");
}

void gelu_gradient(cudaStream_t stream, Tensor in, Tensor dy) {
  if (dy.size() == 0) return;
  with_width(dy.dtype, takes_full_packs(dy.dtype, dy.size(), in.data, dy.data),
             [&](auto element, auto width) {
               using T = decltype(element);
               constexpr int N = decltype(width)::value;
               const std::int64_t packs = dy.size() / N;
               gelu_gradient_kernel<T, N><<<grid_size(divide_up(packs, kThreads)), kThreads, 0, stream>>>(
                   static_cast<const T*>(in.data), static_cast<T*>(dy.data), packs);
             });
  OCTET_CUDA_LAUNCH("gelu_gradient");
}

}  // namespace octet::cuda
