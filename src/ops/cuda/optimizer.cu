// The gradient norm, the step's verdict and AdamW.
// Bytes moved: add_square 4·n; adamw 28·n and the parameter's 2·n (bfloat16) or 4·n.
#include <algorithm>

#include "adamw.cuh"
#include "drivers.h"
#include "kernel_tools.cuh"

namespace octet::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kSumThreads = 1024;
constexpr int kBlocksPerMultiprocessor = 8;
constexpr int kUnroll = 4;

template <int N>
__global__ void __launch_bounds__(kThreads)
    square_kernel(const float* x, std::int64_t packs, double* partials) {
  const std::int64_t step = std::int64_t{gridDim.x} * kThreads;
  double sum = 0.0;
  for (std::int64_t first = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; first < packs;
       first += kUnroll * step) {
    Pack<float, N> values[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (first + u * step < packs) values[u] = Pack<float, N>::load(x + (first + u * step) * N);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (first + u * step >= packs) continue;
#pragma unroll
      for (int n = 0; n < N; ++n)
        sum += static_cast<double>(values[u][n]) * static_cast<double>(values[u][n]);
    }
  }
  sum = block_sum(sum);
  if (threadIdx.x == 0) partials[blockIdx.x] = sum;
}

// tail: the elements after the last whole pack.
__global__ void __launch_bounds__(kSumThreads)
    square_sum_kernel(const double* partials, int blocks, const float* tail, int tail_size,
                      StepScalars* scalars) {
  double sum = 0.0;
  for (int i = threadIdx.x; i < blocks; i += kSumThreads) sum += partials[i];
  if (threadIdx.x < tail_size)
    sum += static_cast<double>(tail[threadIdx.x]) * static_cast<double>(tail[threadIdx.x]);
  sum = block_sum(sum);
  if (threadIdx.x == 0) scalars->gradient_square += sum;
}

__global__ void finish_kernel(StepScalars* scalars, const float* rates, std::int64_t rate_count, float clip,
                              float beta1, float beta2) {
  StepScalars& s = *scalars;
  const bool empty = !(s.tokens > 0.0);
  const double norm = empty ? 0.0 : sqrt(s.gradient_square) / s.tokens;
  const double clipping = clip > 0.0f && norm > clip ? clip / norm : 1.0;
  s.gradient_norm = static_cast<float>(norm);
  s.learning_rate = rates[s.updates < rate_count ? s.updates : rate_count - 1];
  s.skip = empty || !isfinite(s.gradient_square) || !isfinite(s.loss);
  if (s.skip) return;
  s.gradient_scale = static_cast<float>(clipping / s.tokens);
  s.updates += 1;
  const double updates = static_cast<double>(s.updates);
  s.bias_correction1 = static_cast<float>(1.0 - pow(static_cast<double>(beta1), updates));
  s.bias_correction2 = static_cast<float>(1.0 - pow(static_cast<double>(beta2), updates));
}

template <typename T>
struct Update {
  float *master, *first, *second;
  const float* gradient;
  T* parameter;
  float beta1, beta2, epsilon, weight_decay;

  __device__ AdamwStep step(const StepScalars& s) const {
    return {s.gradient_scale, s.learning_rate, s.bias_correction1, s.bias_correction2, beta1, beta2,
            epsilon,          weight_decay};
  }
};

template <typename T, int N>
__global__ void __launch_bounds__(kThreads)
    adamw_kernel(const Update<T> p, std::int64_t begin, std::int64_t size, const StepScalars* scalars) {
  if (scalars->skip != 0) return;
  const std::int64_t i = begin + (std::int64_t{blockIdx.x} * kThreads + threadIdx.x) * N;
  if (i >= size) return;
  const AdamwStep step = p.step(*scalars);
  const Pack<float, N> gradient = Pack<float, N>::load(p.gradient + i);
  Pack<float, N> master = Pack<float, N>::load(p.master + i), first = Pack<float, N>::load(p.first + i),
                 second = Pack<float, N>::load(p.second + i);
  Pack<T, N> parameter;
#pragma unroll
  for (int n = 0; n < N; ++n) {
    update_element(step, gradient[n], master.value[n], first.value[n], second.value[n]);
    parameter.set(n, master[n]);
  }
  first.store(p.first + i);
  second.store(p.second + i);
  master.store(p.master + i);
  if (p.parameter != nullptr) parameter.store(p.parameter + i);
}

}  // namespace

void add_square(cudaStream_t stream, Tensor x, StepScalars* scalars, Scratch& scratch) {
  if (x.size() == 0) return;
  const float* values = x.as<float>();
  const bool full = aligned(16, values);
  const std::int64_t packs = full ? x.size() / 4 : x.size();
  const std::int64_t most = std::int64_t{scratch.multiprocessors()} * kBlocksPerMultiprocessor;
  const std::int64_t blocks = std::clamp<std::int64_t>(divide_up(packs, kThreads), 1, most);
  auto* partials = static_cast<double*>(scratch.reserve(blocks * size_of(DType::kF64)));
  if (full) {
    square_kernel<4><<<grid_size(blocks), kThreads, 0, stream>>>(values, packs, partials);
  } else {
    square_kernel<1><<<grid_size(blocks), kThreads, 0, stream>>>(values, packs, partials);
  }
  OCTET_CUDA_LAUNCH("add_square");
  const int tail = full ? static_cast<int>(x.size() % 4) : 0;
  square_sum_kernel<<<1, kSumThreads, 0, stream>>>(partials, static_cast<int>(blocks),
                                                   values + x.size() - tail, tail, scalars);
  OCTET_CUDA_LAUNCH("add_square");
}

void finish_step(cudaStream_t stream, StepScalars* scalars, Tensor rates, float clip, float beta1,
                 float beta2) {
  OCTET_ASSERT(rates.size() > 0);
  finish_kernel<<<1, 1, 0, stream>>>(scalars, rates.as<float>(), rates.size(), clip, beta1, beta2);
  OCTET_CUDA_LAUNCH("finish_step");
}

void adamw(cudaStream_t stream, const Adamw& a, const StepScalars* scalars) {
  const std::int64_t size = a.master.size();
  if (size == 0) return;
  with_type(a.parameter.dtype, [&](auto element) {
    using T = decltype(element);
    Update<T> p{};
    p.master = a.master.as<float>();
    p.first = a.first_moment.as<float>();
    p.second = a.second_moment.as<float>();
    p.gradient = a.gradient.as<float>();
    p.parameter = static_cast<T*>(a.parameter.data);
    p.beta1 = a.beta1;
    p.beta2 = a.beta2;
    p.epsilon = a.epsilon;
    p.weight_decay = a.weight_decay;
    const bool full =
        aligned(16, p.master, p.first, p.second, p.gradient) && aligned(4 * sizeof(T), p.parameter);
    const std::int64_t whole = full ? size / 4 * 4 : 0;
    if (whole > 0) {
      const unsigned grid = grid_size(divide_up(whole / 4, kThreads));
      adamw_kernel<T, 4><<<grid, kThreads, 0, stream>>>(p, 0, whole, scalars);
    }
    if (whole < size) {
      const unsigned grid = grid_size(divide_up(size - whole, kThreads));
      adamw_kernel<T, 1><<<grid, kThreads, 0, stream>>>(p, whole, size, scalars);
    }
  });
  OCTET_CUDA_LAUNCH("adamw");
}

}  // namespace octet::cuda
