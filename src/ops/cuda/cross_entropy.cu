// Cross-entropy over a vocabulary that may be split over ranks.
// Bytes moved (v logits a row, compute dtype of s bytes): partial t·valid·s; finish 2·t·v·s with gradient,
// else only the partials.
#include <cmath>

#include "drivers.h"
#include "kernel_tools.cuh"

namespace octet::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kUnroll = 4;  // packs in flight a thread
constexpr int kLossThreads = 256;
constexpr int kSumThreads = 1024;

struct Split {
  std::int64_t cols, first_id, valid;
};

// Column of the target among this rank's logits, or -1.
__device__ inline std::int64_t target_column(std::int32_t target, const Split& split) {
  const std::int64_t column = target - split.first_id;
  return target >= 0 && column >= 0 && column < split.valid ? column : -1;
}

// Largest value and sum of exp(value - largest) so far.
struct Softmax {
  float largest = -INFINITY;
  float sum = 0.0f;
};

template <typename T>
__device__ inline Softmax merge(const Softmax& a, const Softmax& b) {
  const float largest = fmaxf(a.largest, b.largest);
  Softmax merged;
  merged.largest = largest;
  // Without values yet there is nothing to rescale, and inf - inf must not be formed.
  merged.sum = (a.sum == 0.0f ? 0.0f : a.sum * exponential<T>(a.largest - largest)) +
               (b.sum == 0.0f ? 0.0f : b.sum * exponential<T>(b.largest - largest));
  return merged;
}

// One block a row.
template <typename T, int N>
__global__ void __launch_bounds__(kThreads)
    partial_kernel(const T* logits, const Split split, const std::int32_t* targets, float* partial) {
  __shared__ float largest_of[kThreads / 32], sum_of[kThreads / 32];  // of each warp
  const std::int64_t row = blockIdx.x;
  const T* values = logits + row * split.cols;
  const std::int64_t packs = split.valid / N;

  Softmax mine;
  for (std::int64_t first = threadIdx.x; first < packs; first += kThreads * kUnroll) {
    Pack<T, N> x[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const std::int64_t i = first + u * kThreads;
      if (i < packs) x[u] = Pack<T, N>::load(values + i * N);
    }
    Softmax next;
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (first + u * kThreads >= packs) continue;
#pragma unroll
      for (int n = 0; n < N; ++n) next.largest = fmaxf(next.largest, x[u][n]);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (first + u * kThreads >= packs) continue;
#pragma unroll
      for (int n = 0; n < N; ++n) next.sum += exponential<T>(x[u][n] - next.largest);
    }
    mine = merge<T>(mine, next);
  }
  const std::int64_t tail = packs * N + threadIdx.x;
  if (tail < split.valid) mine = merge<T>(mine, {to_float(values[tail]), 1.0f});

#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    const Softmax other{__shfl_xor_sync(0xffffffffu, mine.largest, offset),
                        __shfl_xor_sync(0xffffffffu, mine.sum, offset)};
    mine = merge<T>(mine, other);
  }
  if (threadIdx.x % 32 == 0) {
    largest_of[threadIdx.x / 32] = mine.largest;
    sum_of[threadIdx.x / 32] = mine.sum;
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int w = 1; w < kThreads / 32; ++w) mine = merge<T>(mine, {largest_of[w], sum_of[w]});
  const std::int64_t target = target_column(targets[row], split);
  partial[row * 3] = mine.largest;
  partial[row * 3 + 1] = mine.sum;
  partial[row * 3 + 2] = target >= 0 ? to_float(values[target]) : 0.0f;
}

struct TokenSoftmax {
  float largest = -INFINITY;
  float sum = 0.0f;
  float target = 0.0f;
};

// All ranks' parts of one token.
__device__ inline TokenSoftmax combine(const float* partials, std::int64_t token, std::int64_t tokens,
                                       int ranks) {
  TokenSoftmax all;
  for (int rank = 0; rank < ranks; ++rank)
    all.largest = fmaxf(all.largest, partials[(rank * tokens + token) * 3]);
    // Not unrolled: nvcc 13.0 (V13.0.88) gives copies of this loop the sum's address for the largest logit.
#pragma unroll 1
  for (int rank = 0; rank < ranks; ++rank) {
    const float* part = partials + (rank * tokens + token) * 3;
    const float largest = part[0], sum = part[1], target = part[2];
    if (sum != 0.0f) all.sum += sum * expf(largest - all.largest);
    all.target += target;
  }
  return all;
}

// One block a row, in place.
template <typename T, int N>
__global__ void __launch_bounds__(kThreads)
    gradient_kernel(T* logits, const Split split, const std::int32_t* targets, const float* partials,
                    std::int64_t tokens, int ranks) {
  const std::int64_t row = blockIdx.x;
  T* values = logits + row * split.cols;
  const std::int32_t id = targets[row];
  const std::int64_t packs = split.cols / N, target = target_column(id, split);
  float largest = 0.0f, inverse = 0.0f;
  if (id >= 0) {
    const TokenSoftmax softmax = combine(partials, row, tokens, ranks);
    largest = softmax.largest;
    inverse = 1.0f / softmax.sum;
  }
  for (std::int64_t first = threadIdx.x; first < packs; first += kThreads * kUnroll) {
    Pack<T, N> x[kUnroll];
    if (id >= 0) {
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const std::int64_t i = first + u * kThreads;
        if (i < packs) x[u] = Pack<T, N>::load(values + i * N);
      }
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const std::int64_t i = first + u * kThreads;
      if (i >= packs) continue;
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const std::int64_t col = i * N + n;
        float gradient = 0.0f;
        if (id >= 0 && col < split.valid) {
          gradient = exponential<T>(x[u][n] - largest) * inverse - (col == target ? 1.0f : 0.0f);
        }
        x[u].set(n, gradient);
      }
      x[u].store(values + i * N);
    }
  }
}

struct LossSum {
  double loss, count;
};

__global__ void __launch_bounds__(kLossThreads)
    loss_kernel(const std::int32_t* targets, const float* partials, std::int64_t tokens, int ranks,
                LossSum* sums) {
  const std::int64_t token = std::int64_t{blockIdx.x} * kLossThreads + threadIdx.x;
  double loss = 0.0, count = 0.0;
  if (token < tokens && targets[token] >= 0) {
    const TokenSoftmax softmax = combine(partials, token, tokens, ranks);
    loss = log(static_cast<double>(softmax.sum)) + softmax.largest - softmax.target;
    count = 1.0;
  }
  loss = block_sum(loss);
  count = block_sum(count);
  if (threadIdx.x == 0) sums[blockIdx.x] = {loss, count};
}

__global__ void __launch_bounds__(kSumThreads)
    loss_sum_kernel(const LossSum* sums, int blocks, double weight, StepScalars* scalars) {
  double loss = 0.0, count = 0.0;
  for (int i = threadIdx.x; i < blocks; i += kSumThreads) {
    loss += sums[i].loss;
    count += sums[i].count;
  }
  loss = block_sum(loss);
  count = block_sum(count);
  if (threadIdx.x == 0) {
    scalars->loss += weight * loss;
    scalars->tokens += weight * count;
  }
}

}  // namespace

void cross_entropy_partial(cudaStream_t stream, Tensor logits, std::int64_t first_id, std::int64_t valid,
                           Tensor targets, Tensor partial) {
  if (logits.rows == 0) return;
  const Split split{logits.cols, first_id, valid};
  with_width(
      logits.dtype, takes_full_packs(logits.dtype, logits.cols, logits.data), [&](auto element, auto width) {
        using T = decltype(element);
        partial_kernel<T, decltype(width)::value><<<grid_size(logits.rows), kThreads, 0, stream>>>(
            static_cast<const T*>(logits.data), split, targets.as<std::int32_t>(), partial.as<float>());
      });
  OCTET_CUDA_LAUNCH("cross_entropy_partial");
}

void cross_entropy_finish(cudaStream_t stream, Tensor logits, std::int64_t first_id, std::int64_t valid,
                          Tensor targets, Tensor partials, double weight, bool gradient, StepScalars* scalars,
                          Scratch& scratch) {
  const std::int64_t tokens = logits.rows;
  if (tokens == 0) return;
  const int ranks = static_cast<int>(partials.rows / tokens);
  if (weight != 0.0) {
    const unsigned blocks = grid_size(divide_up(tokens, kLossThreads));
    auto* sums = static_cast<LossSum*>(scratch.reserve(std::int64_t{blocks} * sizeof(LossSum)));
    loss_kernel<<<blocks, kLossThreads, 0, stream>>>(targets.as<std::int32_t>(), partials.as<float>(), tokens,
                                                     ranks, sums);
    OCTET_CUDA_LAUNCH("cross_entropy_finish");
    loss_sum_kernel<<<1, kSumThreads, 0, stream>>>(sums, static_cast<int>(blocks), weight, scalars);
    OCTET_CUDA_LAUNCH("cross_entropy_finish");
  }
  if (!gradient || logits.cols == 0) return;
  const Split split{logits.cols, first_id, valid};
  with_width(logits.dtype, takes_full_packs(logits.dtype, logits.cols, logits.data),
             [&](auto element, auto width) {
               using T = decltype(element);
               gradient_kernel<T, decltype(width)::value><<<grid_size(tokens), kThreads, 0, stream>>>(
                   static_cast<T*>(logits.data), split, targets.as<std::int32_t>(), partials.as<float>(),
                   tokens, ranks);
             });
  OCTET_CUDA_LAUNCH("cross_entropy_finish");
}

}  // namespace octet::cuda
