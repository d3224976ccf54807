// RMSNorm and LayerNorm over rows of h elements, with the residual sum before them.
// Bytes moved (compute dtype of s bytes): forward 4·t·h·s with delta, else 2·t·h·s, with
// codes s - 1 bytes an element less; backward 5·t·h·s with y (x, dy and dx in; dx and y out), else 4·t·h·s.
// A row is read once and kept in registers; backward in bfloat16 the next row is on its way meanwhile.
#include <algorithm>

#include "async_copy.cuh"
#include "drivers.h"
#include "float8_codes.cuh"
#include "kernel_tools.cuh"

namespace octet::cuda {
namespace {

constexpr int kBlockThreads = 128;  // at least, by taking several rows when one row is short

// Packs of a row that a thread holds at most.
template <int N>
constexpr int kForwardPacks = N == 1   ? 16
                              : N == 4 ? 8
                                       : 4;

template <typename T>
struct Forward {
  const T *residual, *delta, *weight, *bias;
  T *sum, *y;
  float *rstd, *mean, *largest;
  std::int64_t rows;
  int cols;
  float epsilon;
  CodesOut codes;
};

// kCodes: of y, codes are written alone, and what is raised is their `seen`.
template <typename T, int N, bool kLayer, bool kMeasure, bool kCodes>
__global__ void __launch_bounds__(kMostRowThreads) forward_kernel(const Forward<T> p) {
  constexpr int K = kForwardPacks<N>;
  const std::int64_t row = std::int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  if (row >= p.rows) return;
  const int packs = p.cols / N;
  const std::int64_t base = row * p.cols;
  const float known = kMeasure ? *p.largest : 0.0f;
  float found = 0.0f, inverse = 0.0f;
  if constexpr (kCodes) {
    const float scale = scale_of<true>(*p.codes.largest);
    inverse = 1.0f / scale;
    if (row == 0 && threadIdx.x == 0) *p.codes.scale = scale;
  }

  Pack<T, N> x[K];
#pragma unroll
  for (int k = 0; k < K; ++k) {
    const int i = threadIdx.x + k * blockDim.x;
    if (i < packs) x[k] = Pack<T, N>::load(p.residual + base + i * N);
  }
  if (p.delta != nullptr) {
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const int i = threadIdx.x + k * blockDim.x;
      if (i >= packs) continue;
      const Pack<T, N> delta = Pack<T, N>::load(p.delta + base + i * N);
#pragma unroll
      for (int n = 0; n < N; ++n) x[k].set(n, x[k][n] + delta[n]);
      x[k].store(p.sum + base + i * N);
    }
  }

  float mean = 0.0f;
  if constexpr (kLayer) {
    float sums[1] = {0.0f};
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if (threadIdx.x + k * blockDim.x >= packs) continue;
#pragma unroll
      for (int n = 0; n < N; ++n) sums[0] += x[k][n];
    }
    row_sums(sums);
    mean = sums[0] / p.cols;
  }
  float squares[1] = {0.0f};
#pragma unroll
  for (int k = 0; k < K; ++k) {
    if (threadIdx.x + k * blockDim.x >= packs) continue;
#pragma unroll
    for (int n = 0; n < N; ++n) squares[0] += (x[k][n] - mean) * (x[k][n] - mean);
  }
  row_sums(squares);
  const float rstd = rsqrtf(squares[0] / p.cols + p.epsilon);

#pragma unroll
  for (int k = 0; k < K; ++k) {
    const int i = threadIdx.x + k * blockDim.x;
    if (i >= packs) continue;
    const Pack<T, N> weight = Pack<T, N>::load(p.weight + i * N);
    Pack<T, N> bias;
    if constexpr (kLayer) bias = Pack<T, N>::load(p.bias + i * N);
    Pack<T, N> y;
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const float scaled = (x[k][n] - mean) * rstd * weight[n];
      if constexpr (kLayer) {
        y.set(n, scaled + bias[n]);
      } else {
        y.set(n, scaled);
      }
    }
    if constexpr (kCodes) {
      *reinterpret_cast<uint2*>(p.codes.codes + base + i * N) = codes_of<true>(y, inverse);
    } else {
      y.store(p.y + base + i * N);
    }
    if constexpr (kMeasure) found = largest_magnitude(found, y);
  }
  if constexpr (kMeasure) raise_by_warp(p.largest, known, found);
  if (threadIdx.x == 0) {
    p.rstd[row] = rstd;
    if constexpr (kLayer) p.mean[row] = mean;
  }
}

template <typename T>
struct Backward {
  const T *x, *weight, *bias;
  const float *rstd, *mean;
  const T* dy;
  T *dx, *y;
  float* largest;
  float* partials;  // [gridDim.x, cols] for the weight, as much for the bias, as much for the sums of dx
  std::int64_t rows;
  int cols;
};

// Adds up a block's columns over its rows of threads in a fixed order, and writes them out as one row. Shared
// memory may have served for something else before.
template <int K, int N>
__device__ void write_partials(const float (&sums)[K][N], int cols, float* shared, float* to) {
  if (blockDim.y > 1) __syncthreads();
#pragma unroll
  for (int k = 0; k < K; ++k) {
    const int i = threadIdx.x + k * blockDim.x;
    if (i * N >= cols) continue;
#pragma unroll
    for (int n = 0; n < N; ++n) {
      if (blockDim.y == 1) {
        to[i * N + n] = sums[k][n];
      } else {
        shared[threadIdx.y * cols + i * N + n] = sums[k][n];
      }
    }
  }
  if (blockDim.y == 1) return;
  __syncthreads();
  for (int col = threadIdx.y * blockDim.x + threadIdx.x; col < cols; col += blockDim.x * blockDim.y) {
    float sum = 0.0f;
    for (unsigned y = 0; y < blockDim.y; ++y) sum += shared[y * cols + col];
    to[col] = sum;
  }
}

// Blocks of kThreads that a multiprocessor's registers take: 168 or 128 registers a thread.
template <int kThreads>
constexpr int kResident = kThreads == kBlockThreads ? 3 : 1;

// Whether a thread has its packs of the next row copied to shared memory while it works on one.
template <typename T, int N>
constexpr bool kAhead = std::is_same_v<T, bf16>&& N > 1;

// Whether a kernel has registers for the sums of dx as well. What else is asked of it (RMSNorm, wide rows,
// float32) leaves them to a pass of their own.
template <typename T, int N, int K, bool kLayer>
constexpr bool kCanSum = kLayer&& kAhead<T, N>&& K <= 3;

// A persistent grid, so that the parameters' gradients are summed in registers. K packs of a row a thread.
// kSums: columns of dx as it comes in are summed too.
template <typename T, int N, int K, int kThreads, bool kLayer, bool kMeasure, bool kSums>
__global__ void __launch_bounds__(kThreads, kResident<kThreads>) backward_kernel(const Backward<T> p) {
  extern __shared__ float shared[];
  const int packs = p.cols / N;
  float dweight[K][N] = {}, dbias[K][N] = {}, dx_sums[K][N] = {};
  float found = 0.0f;

  // Places of x, dy and dx, which are this thread's alone.
  const int threads = blockDim.x * blockDim.y, thread = threadIdx.y * blockDim.x + threadIdx.x;
  const auto place = [&](int operand, int k) {
    return reinterpret_cast<T*>(shared) + ((operand * K + k) * threads + thread) * N;
  };
  const auto fetch = [&](std::int64_t row) {
    const std::int64_t base = row * p.cols;
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const int i = threadIdx.x + k * blockDim.x;
      if (row >= p.rows || i >= packs) continue;
      copy_async(place(0, k), p.x + base + i * N);
      copy_async(place(1, k), p.dy + base + i * N);
      copy_async(place(2, k), p.dx + base + i * N);
    }
    end_copy_group();
  };

  std::int64_t row = std::int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  if constexpr (kAhead<T, N>) fetch(row);
  float next_rstd = 0.0f, next_mean = 0.0f;
  if (row < p.rows) {
    next_rstd = p.rstd[row];
    if constexpr (kLayer) next_mean = p.mean[row];
  }
  while (row < p.rows) {
    const std::int64_t base = row * p.cols, next = row + std::int64_t{gridDim.x} * blockDim.y;
    Pack<T, N> x[K], dy[K], dx[K];
    if constexpr (kAhead<T, N>) wait_for_copies(0);
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const int i = threadIdx.x + k * blockDim.x;
      if (i >= packs) continue;
      x[k] = Pack<T, N>::load(kAhead<T, N> ? place(0, k) : p.x + base + i * N);
      dy[k] = Pack<T, N>::load(kAhead<T, N> ? place(1, k) : p.dy + base + i * N);
      dx[k] = Pack<T, N>::load(kAhead<T, N> ? place(2, k) : p.dx + base + i * N);
    }
    if constexpr (kAhead<T, N>) fetch(next);
    const float rstd = next_rstd, mean = next_mean;
    if (next < p.rows) {
      next_rstd = p.rstd[next];
      if constexpr (kLayer) next_mean = p.mean[next];
    }

    float sums[2] = {0.0f, 0.0f};  // of g and of g·xhat, where g = dy·weight
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const int i = threadIdx.x + k * blockDim.x;
      if (i >= packs) continue;
      const Pack<T, N> weight = Pack<T, N>::load(p.weight + i * N);
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const float xhat = (x[k][n] - mean) * rstd;
        const float g = dy[k][n] * weight[n];
        if constexpr (kLayer) {
          sums[0] += g;
          dbias[k][n] += dy[k][n];
        }
        sums[1] += g * xhat;
        dweight[k][n] += dy[k][n] * xhat;
      }
    }
    row_sums(sums);
    const float mean_g = kLayer ? sums[0] / p.cols : 0.0f;
    const float mean_gx = sums[1] / p.cols;

#pragma unroll
    for (int k = 0; k < K; ++k) {
      const int i = threadIdx.x + k * blockDim.x;
      if (i >= packs) continue;
      const Pack<T, N> weight = Pack<T, N>::load(p.weight + i * N);
      Pack<T, N> bias, y;
      if constexpr (kLayer) bias = Pack<T, N>::load(p.bias + i * N);
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const float xhat = (x[k][n] - mean) * rstd;
        const float g = dy[k][n] * weight[n];
        if constexpr (kSums) dx_sums[k][n] += dx[k][n];
        dx[k].set(n, dx[k][n] + rstd * (g - mean_g - xhat * mean_gx));
        if constexpr (kLayer) {
          y.set(n, xhat * weight[n] + bias[n]);
        } else {
          y.set(n, xhat * weight[n]);
        }
      }
      dx[k].store(p.dx + base + i * N);
      if constexpr (kMeasure) found = largest_magnitude(found, dx[k]);
      if (p.y != nullptr) y.store(p.y + base + i * N);
    }
    row = next;
  }

  if constexpr (kMeasure) raise_by_warp(p.largest, *p.largest, found);
  float* const block = p.partials + std::int64_t{blockIdx.x} * p.cols;
  const std::int64_t set = std::int64_t{gridDim.x} * p.cols;
  write_partials(dweight, p.cols, shared, block);
  if constexpr (kLayer) write_partials(dbias, p.cols, shared, block + set);
  if constexpr (kSums) write_partials(dx_sums, p.cols, shared, block + 2 * set);
}

// Threads of a row in x, rows of a block in y.
dim3 block_of(std::int64_t cols, int pack, int packs_a_thread) {
  const std::int64_t packs = cols / pack;
  const std::int64_t threads = round_up(divide_up(packs, packs_a_thread), 32);
  if (threads > kMostRowThreads) {
    fail(ErrorKind::kDevice,
         "a normalised row of {} elements is too wide for a GPU: at most {} of this alignment", cols,
         kMostRowThreads * packs_a_thread * pack);
  }
  const std::int64_t rows = threads == 32 ? kBlockThreads / 32 : 1;
  return dim3(static_cast<unsigned>(threads), static_cast<unsigned>(rows));
}

template <typename T, int N, bool kMeasure, bool kCodes>
void launch_forward(cudaStream_t stream, const Forward<T>& p, NormKind kind) {
  const dim3 block = block_of(p.cols, N, kForwardPacks<N>);
  const unsigned grid = grid_size(divide_up(p.rows, block.y));
  if (kind == NormKind::kLayer) {
    forward_kernel<T, N, true, kMeasure, kCodes><<<grid, block, 0, stream>>>(p);
  } else {
    forward_kernel<T, N, false, kMeasure, kCodes><<<grid, block, 0, stream>>>(p);
  }
}

// Sums columns of dx too where `sums` and it can.
template <typename T, int N, int K, int kThreads, bool kLayer>
std::int64_t launch_backward(cudaStream_t stream, Backward<T> p, Tensor largest, bool sums,
                             Scratch& scratch) {
  const dim3 block = block_of(p.cols, N, K);
  const std::int64_t resident =
      scratch.multiprocessors() * (kResident<kThreads> * kThreads / std::int64_t{block.x * block.y});
  const std::int64_t blocks = std::max<std::int64_t>(1, std::min(divide_up(p.rows, block.y), resident));
  p.partials = static_cast<float*>(scratch.reserve(blocks * p.cols * (sums ? 3 : 2) * size_of(DType::kF32)));
  const std::int64_t places = kAhead<T, N> ? std::int64_t{3} * K * block.x * block.y * 16 : 0;
  const std::int64_t columns = block.y == 1 ? 0 : std::int64_t{block.y} * p.cols * size_of(DType::kF32);
  const auto shared = static_cast<std::size_t>(std::max(places, columns));
  with_measuring<T>(largest, [&](auto measure) {
    constexpr bool kMeasure = decltype(measure)::value;
    const auto run = [&](auto summing) {
      constexpr bool kSums = decltype(summing)::value;
      const auto kernel = backward_kernel<T, N, K, kThreads, kLayer, kMeasure, kSums>;
      OCTET_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      static_cast<int>(shared)));
      OCTET_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                      cudaSharedmemCarveoutMaxShared));
      backward_kernel<T, N, K, kThreads, kLayer, kMeasure, kSums>
          <<<grid_size(blocks), block, shared, stream>>>(p);
    };
    if constexpr (kCanSum<T, N, K, kLayer>) {
      if (sums) return run(std::true_type{});
    }
    run(std::false_type{});
  });
  return blocks;
}

}  // namespace

void norm_forward(cudaStream_t stream, const NormForward& a) {
  if (a.residual.size() == 0) return;
  const DType type = a.residual.dtype;
  const bool full =
      takes_full_packs(type, a.residual.cols, a.residual.data, a.delta.data, a.weight.data, a.bias.data,
                       a.delta ? a.sum.data : nullptr, a.y.data, a.codes.codes.data);
  with_width(type, full, [&](auto element, auto width) {
    using T = decltype(element);
    constexpr int N = decltype(width)::value;
    Forward<T> p{};
    p.residual = static_cast<const T*>(a.residual.data);
    p.delta = static_cast<const T*>(a.delta.data);
    p.weight = static_cast<const T*>(a.weight.data);
    p.bias = static_cast<const T*>(a.bias.data);
    p.sum = static_cast<T*>(a.sum.data);
    p.y = static_cast<T*>(a.y.data);
    p.rstd = a.rstd.as<float>();
    p.mean = a.mean.as<float>();
    const Tensor& raised = a.codes ? a.codes.seen : a.largest;
    p.largest = static_cast<float*>(raised.data);
    p.rows = a.residual.rows;
    p.cols = static_cast<int>(a.residual.cols);
    p.epsilon = a.epsilon;
    p.codes = CodesOut(a.codes);
    with_measuring<T>(raised, [&](auto measure) {
      constexpr bool kMeasure = decltype(measure)::value;
      if constexpr (std::is_same_v<T, bf16> && N == 8) {
        if (a.codes) return launch_forward<T, N, kMeasure, true>(stream, p, a.kind);
      }
      OCTET_ASSERT(!a.codes);
      launch_forward<T, N, kMeasure, false>(stream, p, a.kind);
    });
  });
  OCTET_CUDA_LAUNCH("norm_forward");
}

void norm_backward(cudaStream_t stream, const NormBackward& a, Scratch& scratch) {
  const DType type = a.x.dtype;
  const std::int64_t cols = a.x.cols;
  if (cols == 0) return;
  const bool full =
      takes_full_packs(type, cols, a.x.data, a.weight.data, a.bias.data, a.dy.data, a.dx.data, a.y.data);
  const bool layer = a.kind == NormKind::kLayer;
  std::int64_t blocks = 0;
  bool sums = static_cast<bool>(a.dx_sums);
  with_width(type, full, [&](auto element, auto width) {
    using T = decltype(element);
    constexpr int N = decltype(width)::value;
    constexpr int kFew = N == 1 ? 8 : 2, kMany = kForwardPacks<N>;
    Backward<T> p{};
    p.x = static_cast<const T*>(a.x.data);
    p.weight = static_cast<const T*>(a.weight.data);
    p.bias = static_cast<const T*>(a.bias.data);
    p.rstd = a.rstd.as<float>();
    p.mean = a.mean.as<float>();
    p.dy = static_cast<const T*>(a.dy.data);
    p.dx = static_cast<T*>(a.dx.data);
    p.y = static_cast<T*>(a.y.data);
    p.largest = static_cast<float*>(a.largest.data);
    p.rows = a.x.rows;
    p.cols = static_cast<int>(cols);
    const std::int64_t packs = cols / N;
    const auto launch = [&](auto held, auto most, auto normed) {
      constexpr int K = decltype(held)::value, kThreads = decltype(most)::value;
      constexpr bool kLayer = decltype(normed)::value;
      if (sums && !kCanSum<T, N, K, kLayer>) {
        bias_backward(stream, a.dx, a.dx_sums, a.accumulate, scratch);
        sums = false;
      }
      blocks = launch_backward<T, N, K, kThreads, kLayer>(stream, p, a.largest, sums, scratch);
    };
    const auto launch_kind = [&](auto held, auto most) {
      if (layer) {
        launch(held, most, std::true_type{});
      } else {
        launch(held, most, std::false_type{});
      }
    };
    if (packs <= 32 * 3) {
      launch_kind(Width<3>{}, Width<kBlockThreads>{});
    } else if (packs <= kMostRowThreads * kFew) {
      launch_kind(Width<kFew>{}, Width<kMostRowThreads>{});
    } else {
      launch_kind(Width<kMany>{}, Width<kMostRowThreads>{});
    }
  });
  OCTET_CUDA_LAUNCH("norm_backward");
  const auto* partials = static_cast<const float*>(scratch.reserve(0));
  sum_partials(stream, partials, blocks, cols, cols, a.dweight.as<float>(), a.accumulate,
               layer ? a.dbias.as<float>() : nullptr, sums ? a.dx_sums.as<float>() : nullptr);
}

}  // namespace octet::cuda
