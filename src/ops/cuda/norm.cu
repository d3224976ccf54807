// RMSNorm and LayerNorm over rows of h elements, with the residual sum before them.
// Bytes moved (compute dtype of s bytes): forward 4·t·h·s with delta, else 2·t·h·s, with
// codes s - 1 bytes an element less; backward 5·t·h·s with y (x, dy and dx in; dx and y out), else 4·t·h·s.
// A row is read once and kept in registers; backward in bfloat16 the next row is on its way meanwhile.
// Of an H200's copy rate, in bfloat16, 768 to 8192 wide: forward 92 to 96 %, backward 85 to 94 %.
#include <algorithm>

#include "async_copy.cuh"
#include "drivers.h"
#include "float8_codes.cuh"
#include "kernel_tools.cuh"
#include "row_sums.cuh"

namespace octet::cuda {
namespace {

constexpr int kForwardThreads = 256;  // of a block, unless a row has more; of several rows where it has less

// Packs of a row that a thread holds at most.
template <int N>
constexpr int kForwardPacks = N == 1   ? 16
                              : N == 4 ? 8
                                       : 4;

// Threads that the registers of a multiprocessor are shared out to, three blocks' where they do for that.
template <int N>
constexpr int kForwardShares = N == 8 ? 3 * kForwardThreads : kMostRowThreads;

template <typename T>
struct Forward {
  const T *residual, *delta, *weight, *bias;
  T *sum, *y;
  float *rstd, *mean, *largest;
  int rows, cols;
  float epsilon;
  CodesOut codes;
};

// Number of a thread's first pack in its row; others follow every 32, so that a warp has K·32 adjacent packs.
template <int K>
__device__ int first_pack() {
  return static_cast<int>(threadIdx.x / 32 * (K * 32) + threadIdx.x % 32);
}

// kCodes: of y, codes are written alone, and what is raised is their `seen`.
template <typename T, int N, bool kLayer, bool kMeasure, bool kCodes>
__global__ void __launch_bounds__(kForwardShares<N>) forward_kernel(const Forward<T> p) {
  using Packed = Pack<T, N>;
  constexpr int K = kForwardPacks<N>;
  alignas(16) __shared__ typename RowSums<1>::Storage sums_storage;
  const int row = blockIdx.x * blockDim.y + threadIdx.y;
  const int first = first_pack<K>(), left = row < p.rows ? p.cols / N - first : 0;
  const std::int64_t at = std::int64_t{row} * p.cols + first * N;
  const auto inside = [&](int k) { return 32 * k < left; };

  // All loads at once: rows that pass through the L1 cache leave weights no place in it.
  Packed x[K], delta[K], weight[K], bias[K];
#pragma unroll
  for (int k = 0; k < K; ++k) {
    if (!inside(k)) continue;
    x[k] = Packed::load(p.residual + at + 32 * k * N);
    if (p.delta != nullptr) delta[k] = Packed::load(p.delta + at + 32 * k * N);
  }
#pragma unroll
  for (int k = 0; k < K; ++k) {
    if (!inside(k)) continue;
    weight[k] = Packed::load(p.weight + (first + 32 * k) * N);
    if constexpr (kLayer) bias[k] = Packed::load(p.bias + (first + 32 * k) * N);
  }
  const float known = kMeasure ? *p.largest : 0.0f;
  float found = 0.0f, inverse = 0.0f;
  if constexpr (kCodes) {
    const float scale = scale_of<true>(*p.codes.largest);
    inverse = 1.0f / scale;
    if (row == 0 && threadIdx.x == 0) *p.codes.scale = scale;
  }
  RowSums<1> over_row(sums_storage);
  if (row >= p.rows) return;

  if (p.delta != nullptr) {
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if (!inside(k)) continue;
      Packed sum;
#pragma unroll
      for (int n = 0; n < N; ++n) sum.set(n, x[k][n] + delta[k][n]);
      sum.store(p.sum + at + 32 * k * N);
      x[k] = sum;
    }
  }
  const float inverse_cols = 1.0f / p.cols;
  float mean = 0.0f;
  if constexpr (kLayer) {
    float sums[1] = {0.0f};
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if (!inside(k)) continue;
#pragma unroll
      for (int n = 0; n < N; ++n) sums[0] += x[k][n];
    }
    over_row.add_up(sums);
    mean = sums[0] * inverse_cols;
  }
  float squares[1] = {0.0f};
#pragma unroll
  for (int k = 0; k < K; ++k) {
    if (!inside(k)) continue;
#pragma unroll
    for (int n = 0; n < N; ++n) squares[0] += (x[k][n] - mean) * (x[k][n] - mean);
  }
  over_row.add_up(squares);
  const float rstd = rsqrtf(squares[0] * inverse_cols + p.epsilon);

#pragma unroll
  for (int k = 0; k < K; ++k) {
    if (!inside(k)) continue;
    Packed y;
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const float scaled = (x[k][n] - mean) * rstd * weight[k][n];
      if constexpr (kLayer) {
        y.set(n, scaled + bias[k][n]);
      } else {
        y.set(n, scaled);
      }
    }
    if constexpr (kCodes) {
      *reinterpret_cast<uint2*>(p.codes.codes + at + 32 * k * N) = codes_of<true>(y, inverse);
    } else {
      y.store(p.y + at + 32 * k * N);
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
  int rows, cols;
};

// Whether a thread has its packs of the next row copied to shared memory while it works on one. Weights are
// there as well then, since every row takes them.
template <typename T, int N>
constexpr bool kAhead = std::is_same_v<T, bf16>&& N > 1;
constexpr int kCopied = 3;  // operands: x, dy and dx

// Whether a kernel has registers for the sums of dx as well. What else is asked of it (RMSNorm, wide rows,
// float32) leaves them to a pass of their own.
template <typename T, int N, int K, bool kLayer>
constexpr bool kCanSum = kLayer&& kAhead<T, N>&& K <= 3;

// Adds up a block's columns over its rows of threads in a fixed order, and writes them out as one row. Shared
// memory may have served for something else before.
template <int K, int N>
__device__ void write_partials(const float (&sums)[K][N], int cols, float* shared, float* to) {
  constexpr int kAtOnce = N > 4 ? 4 : N;
  __syncthreads();
#pragma unroll
  for (int k = 0; k < K; ++k) {
    const int col = (first_pack<K>() + 32 * k) * N;
    if (col >= cols) continue;
#pragma unroll
    for (int n = 0; n < N; n += kAtOnce) {
      Pack<float, kAtOnce> part;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) part.set(i, sums[k][n + i]);
      part.store(shared + threadIdx.y * cols + col + n);
    }
  }
  __syncthreads();
  for (int col = threadIdx.y * blockDim.x + threadIdx.x; col < cols; col += blockDim.x * blockDim.y) {
    float sum = 0.0f;
    for (unsigned y = 0; y < blockDim.y; ++y) sum += shared[y * cols + col];
    to[col] = sum;
  }
}

// A persistent grid, so that the parameters' gradients are summed in registers: a block has a multiprocessor
// to itself, and works on several rows at a time. K packs of a row a thread. kSums: columns of dx as it comes
// in are summed too.
template <typename T, int N, int K, bool kLayer, bool kMeasure, bool kSums>
__global__ void __launch_bounds__(kMostRowThreads, 1) backward_kernel(const Backward<T> p) {
  using Packed = Pack<T, N>;
  using Sums = RowSums<kLayer ? 2 : 1>;
  extern __shared__ float shared[];
  alignas(16) __shared__ typename Sums::Storage sums_storage;
  const int threads = blockDim.x * blockDim.y, thread = threadIdx.y * blockDim.x + threadIdx.x;
  const int packs = p.cols / N, first = first_pack<K>(), left = packs - first;
  const auto inside = [&](int k) { return 32 * k < left; };

  // A warp's places of x, dy and dx, each one thread's alone, after another's; behind them weight and bias.
  T* const places = reinterpret_cast<T*>(shared) + (thread / 32 * (kCopied * K * 32) + thread % 32) * N;
  const auto place = [&](int operand, int k) { return places + (operand * K + k) * 32 * N; };

  const int rows_at_once = gridDim.x * blockDim.y;
  int row = blockIdx.x * blockDim.y + threadIdx.y;
  std::int64_t at = std::int64_t{row} * p.cols + first * N;
  const std::int64_t stride = std::int64_t{rows_at_once} * p.cols;
  const auto fetch = [&](bool there, std::int64_t from) {
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if (!there || !inside(k)) continue;
      copy_async(place(0, k), p.x + from + 32 * k * N);
      copy_async(place(1, k), p.dy + from + 32 * k * N);
      copy_async(place(2, k), p.dx + from + 32 * k * N);
    }
    end_copy_group();
  };
  if constexpr (kAhead<T, N>) fetch(row < p.rows, at);
  float next_rstd = 0.0f, next_mean = 0.0f;
  if (row < p.rows) {
    next_rstd = p.rstd[row];
    if constexpr (kLayer) next_mean = p.mean[row];
  }

  T* const weights = reinterpret_cast<T*>(shared) + kCopied * K * threads * N;
  if constexpr (kAhead<T, N>) {
    for (int i = thread; i < packs; i += threads) {
      Packed::load(p.weight + i * N).store(weights + i * N);
      if constexpr (kLayer) Packed::load(p.bias + i * N).store(weights + p.cols + i * N);
    }
  }
  Sums over_row(sums_storage);
  const T* const own_weight = (kAhead<T, N> ? weights : p.weight) + first * N;
  const T* const own_bias = (kAhead<T, N> ? weights + p.cols : p.bias) + first * N;

  const float inverse_cols = 1.0f / p.cols;
  float dweight[K][N] = {}, dbias[K][N] = {}, dx_sums[K][N] = {};
  float found = 0.0f;
  while (row < p.rows) {
    Packed x[K], dy[K], dx[K];
    if constexpr (kAhead<T, N>) wait_for_copies<0>();
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if (!inside(k)) continue;
      x[k] = Packed::load(kAhead<T, N> ? place(0, k) : p.x + at + 32 * k * N);
      dy[k] = Packed::load(kAhead<T, N> ? place(1, k) : p.dy + at + 32 * k * N);
      dx[k] = Packed::load(kAhead<T, N> ? place(2, k) : p.dx + at + 32 * k * N);
    }
    const float rstd = next_rstd, mean = next_mean;
    row += rows_at_once;
    if constexpr (kAhead<T, N>) fetch(row < p.rows, at + stride);
    if (row < p.rows) {
      next_rstd = p.rstd[row];
      if constexpr (kLayer) next_mean = p.mean[row];
    }

    float sums[kLayer ? 2 : 1] = {};  // of g·xhat / rstd and of g, where g = dy·weight
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if (!inside(k)) continue;
      const auto weight = Packed::load(own_weight + 32 * k * N);
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const float product = dy[k][n] * (x[k][n] - mean);
        if constexpr (kLayer) {
          sums[1] += dy[k][n] * weight[n];
          dbias[k][n] += dy[k][n];
        }
        sums[0] += product * weight[n];
        dweight[k][n] += product * rstd;
      }
    }
    over_row.add_up(sums);
    // dx += rstd·(g - mean(g) - xhat·mean(g·xhat))
    const float slope = sums[0] * inverse_cols * rstd * rstd;
    float offset = 0.0f;
    if constexpr (kLayer) offset = sums[1] * inverse_cols * rstd;
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if (!inside(k)) continue;
      const auto weight = Packed::load(own_weight + 32 * k * N);
      Packed gradient;
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const float xhat = (x[k][n] - mean) * rstd;
        if constexpr (kSums) dx_sums[k][n] += dx[k][n];
        gradient.set(n, dx[k][n] - offset + dy[k][n] * weight[n] * rstd - xhat * slope);
      }
      gradient.store(p.dx + at + 32 * k * N);
      if constexpr (kMeasure) found = largest_magnitude(found, gradient);
      if (p.y == nullptr) continue;
      Packed bias, y;
      if constexpr (kLayer) bias = Packed::load(own_bias + 32 * k * N);
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const float scaled = (x[k][n] - mean) * rstd * weight[n];
        if constexpr (kLayer) {
          y.set(n, scaled + bias[n]);
        } else {
          y.set(n, scaled);
        }
      }
      y.store(p.y + at + 32 * k * N);
    }
    at += stride;
  }

  if constexpr (kMeasure) raise_by_warp(p.largest, *p.largest, found);
  float* const block = p.partials + std::int64_t{blockIdx.x} * p.cols;
  const std::int64_t set = std::int64_t{gridDim.x} * p.cols;
  write_partials(dweight, p.cols, shared, block);
  if constexpr (kLayer) write_partials(dbias, p.cols, shared, block + set);
  if constexpr (kSums) write_partials(dx_sums, p.cols, shared, block + 2 * set);
}

// Threads of a row in x.
dim3 row_of(std::int64_t cols, int pack, int packs_a_thread) {
  const std::int64_t packs = cols / pack;
  const std::int64_t threads = round_up(divide_up(packs, packs_a_thread), 32);
  if (threads > kMostRowThreads) {
    fail(ErrorKind::kDevice,
         "a normalised row of {} elements is too wide for a GPU: at most {} of this alignment", cols,
         kMostRowThreads * packs_a_thread * pack);
  }
  return dim3(static_cast<unsigned>(threads));
}

template <typename T, int N, bool kMeasure, bool kCodes>
void launch_forward(cudaStream_t stream, const Forward<T>& p, NormKind kind) {
  dim3 block = row_of(p.cols, N, kForwardPacks<N>);
  block.y = std::max(1u, kForwardThreads / block.x);
  const unsigned grid = grid_size(divide_up(p.rows, block.y));
  if (kind == NormKind::kLayer) {
    forward_kernel<T, N, true, kMeasure, kCodes><<<grid, block, 0, stream>>>(p);
  } else {
    forward_kernel<T, N, false, kMeasure, kCodes><<<grid, block, 0, stream>>>(p);
  }
}

// Sums columns of dx too where `sums` and it can.
template <typename T, int N, int K, bool kLayer>
std::int64_t launch_backward(cudaStream_t stream, Backward<T> p, Tensor largest, bool sums,
                             Scratch& scratch) {
  dim3 block = row_of(p.cols, N, K);
  std::int64_t copied = 0, kept = 0;  // bytes of a row's places and of the weights
  if constexpr (kAhead<T, N>) {
    copied = std::int64_t{kCopied} * K * block.x * N * size_of(DType::kBF16);
    kept = std::int64_t{p.cols} * (kLayer ? 2 : 1) * size_of(DType::kBF16);
  }
  block.y = kMostRowThreads / block.x;
  const std::int64_t blocks = std::max<std::int64_t>(
      1, std::min<std::int64_t>(divide_up(p.rows, block.y), scratch.multiprocessors()));
  p.partials = static_cast<float*>(scratch.reserve(blocks * p.cols * (sums ? 3 : 2) * size_of(DType::kF32)));
  const std::int64_t columns = std::int64_t{block.y} * p.cols * size_of(DType::kF32);
  const std::int64_t shared = std::max(copied * block.y + kept, columns);
  using Sums = RowSums<kLayer ? 2 : 1>;
  const std::int64_t all_shared = shared + static_cast<std::int64_t>(sizeof(typename Sums::Storage));
  if (all_shared > scratch.block_shared_bytes()) {
    fail(ErrorKind::kDevice,
         "a normalised row of {} elements takes {} bytes of shared memory; this GPU gives a block {}", p.cols,
         all_shared, scratch.block_shared_bytes());
  }
  with_measuring<T>(largest, [&](auto measure) {
    constexpr bool kMeasure = decltype(measure)::value;
    const auto run = [&](auto summing) {
      constexpr bool kSums = decltype(summing)::value;
      const auto kernel = backward_kernel<T, N, K, kLayer, kMeasure, kSums>;
      OCTET_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      static_cast<int>(shared)));
      OCTET_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                      cudaSharedmemCarveoutMaxShared));
      backward_kernel<T, N, K, kLayer, kMeasure, kSums>
          <<<grid_size(blocks), block, static_cast<std::size_t>(shared), stream>>>(p);
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
    p.rows = static_cast<int>(a.residual.rows);
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
    p.rows = static_cast<int>(a.x.rows);
    p.cols = static_cast<int>(cols);
    const auto launch = [&](auto held, auto normed) {
      constexpr int K = decltype(held)::value;
      constexpr bool kLayer = decltype(normed)::value;
      if (sums && !kCanSum<T, N, K, kLayer>) {
        bias_backward(stream, a.dx, a.dx_sums, a.accumulate, scratch);
        sums = false;
      }
      blocks = launch_backward<T, N, K, kLayer>(stream, p, a.largest, sums, scratch);
    };
    const auto launch_kind = [&](auto held) {
      if (layer) {
        launch(held, std::true_type{});
      } else {
        launch(held, std::false_type{});
      }
    };
    if (cols / N <= kMostRowThreads * kFew) {
      launch_kind(Width<kFew>{});
    } else {
      launch_kind(Width<kMany>{});
    }
  });
  OCTET_CUDA_LAUNCH("norm_backward");
  const auto* partials = static_cast<const float*>(scratch.reserve(0));
  sum_partials(stream, partials, blocks, cols, cols, a.dweight.as<float>(), a.accumulate,
               layer ? a.dbias.as<float>() : nullptr, sums ? a.dx_sums.as<float>() : nullptr);
}

}  // namespace octet::cuda
