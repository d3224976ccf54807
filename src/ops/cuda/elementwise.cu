// Casts, sums and fills. None of them uses scratch memory, so they may run on any stream.
// Bytes moved: cast and fill each element once in and once out at its own size; add reads both and writes
// one.
#include "drivers.h"
#include "kernel_tools.cuh"
#include "octet/base/rng.h"

namespace octet::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kUnroll = 4;  // packs in flight a thread

template <typename From, typename To, int N, bool kAdd>
__global__ void __launch_bounds__(kThreads) convert_kernel(const From* from, To* to, std::int64_t packs) {
  const std::int64_t first = std::int64_t{blockIdx.x} * kThreads * kUnroll + threadIdx.x;
  Pack<From, N> x[kUnroll];
  Pack<To, N> y[kUnroll];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const std::int64_t i = first + u * kThreads;
    if (i >= packs) continue;
    x[u] = Pack<From, N>::load(from + i * N);
    if constexpr (kAdd) y[u] = Pack<To, N>::load(to + i * N);
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const std::int64_t i = first + u * kThreads;
    if (i >= packs) continue;
#pragma unroll
    for (int n = 0; n < N; ++n) {
      if constexpr (kAdd) {
        y[u].set(n, y[u][n] + x[u][n]);
      } else {
        y[u].set(n, x[u][n]);
      }
    }
    y[u].store(to + i * N);
  }
}

// Whole packs of 4 elements where the addresses allow, then the rest one by one.
template <bool kAdd>
void convert(cudaStream_t stream, Tensor from, Tensor to) {
  const std::int64_t size = to.size();
  with_type(from.dtype, [&](auto from_element) {
    with_type(to.dtype, [&](auto to_element) {
      using From = decltype(from_element);
      using To = decltype(to_element);
      const auto* in = static_cast<const From*>(from.data);
      auto* out = static_cast<To*>(to.data);
      const bool full = aligned(4 * sizeof(From), in) && aligned(4 * sizeof(To), out);
      const std::int64_t packs = full ? size / 4 : 0, rest = size - packs * 4;
      if (packs > 0) {
        convert_kernel<From, To, 4, kAdd>
            <<<grid_size(divide_up(packs, kThreads * kUnroll)), kThreads, 0, stream>>>(in, out, packs);
      }
      if (rest > 0) {
        convert_kernel<From, To, 1, kAdd>
            <<<grid_size(divide_up(rest, kThreads * kUnroll)), kThreads, 0, stream>>>(in + packs * 4,
                                                                                      out + packs * 4, rest);
      }
    });
  });
}

template <typename T>
__global__ void __launch_bounds__(kThreads) fill_kernel(T* values, std::int64_t size, T value) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < size) values[i] = value;
}

__global__ void __launch_bounds__(kThreads)
    normal_kernel(float* values, std::int64_t size, std::int64_t cols, float deviation, std::uint64_t key,
                  std::int64_t first_index, std::int64_t stride) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= size) return;
  const std::int64_t row = i / cols, col = i - row * cols;
  values[i] = deviation * normal_at(key, static_cast<std::uint64_t>(first_index + row * stride + col));
}

// One pack of columns a thread.
template <typename T, int N>
__global__ void __launch_bounds__(kThreads)
    copy_rows_kernel(const SampleRows from, const SampleRows to, std::int64_t all_rows, std::int64_t rows,
                     std::int64_t packs, bool add) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= all_rows * packs) return;
  const std::int64_t row = i / packs, column = i % packs * N, sample = row / rows, at = row % rows;
  const T* source =
      static_cast<const T*>(from.data) + sample * from.sample_stride + at * from.row_stride + column;
  T* target = static_cast<T*>(to.data) + sample * to.sample_stride + at * to.row_stride + column;
  Pack<T, N> values = Pack<T, N>::load(source);
  if (add) {
    const Pack<T, N> before = Pack<T, N>::load(target);
#pragma unroll
    for (int n = 0; n < N; ++n) values.set(n, before[n] + values[n]);
  }
  values.store(target);
}

}  // namespace

void cast(cudaStream_t stream, Tensor from, Tensor to) {
  if (to.size() == 0) return;
  convert<false>(stream, from, to);
  OCTET_CUDA_LAUNCH("cast");
}

void add(cudaStream_t stream, Tensor from, Tensor to) {
  if (to.size() == 0) return;
  convert<true>(stream, from, to);
  OCTET_CUDA_LAUNCH("add");
}

void copy_rows(cudaStream_t stream, DType dtype, std::int64_t batch, std::int64_t rows, std::int64_t columns,
               const SampleRows& from, const SampleRows& to, bool add) {
  if (batch * rows * columns == 0) return;
  with_type(dtype, [&](auto element) {
    using T = decltype(element);
    const auto launch = [&](auto width) {
      constexpr int kWidth = decltype(width)::value;
      const std::int64_t packs = batch * rows * (columns / kWidth);
      copy_rows_kernel<T, kWidth><<<grid_size(divide_up(packs, kThreads)), kThreads, 0, stream>>>(
          from, to, batch * rows, rows, columns / kWidth, add);
    };
    constexpr int kFullPack = kFull<T>;
    const bool full = columns % kFullPack == 0 && from.row_stride % kFullPack == 0 &&
                      to.row_stride % kFullPack == 0 && from.sample_stride % kFullPack == 0 &&
                      to.sample_stride % kFullPack == 0 && aligned(16, from.data, to.data);
    if (full) {
      launch(Width<kFullPack>{});
    } else {
      launch(Width<1>{});
    }
  });
  OCTET_CUDA_LAUNCH("copy_rows");
}

void fill(cudaStream_t stream, Tensor values, float value) {
  if (values.size() == 0) return;
  if (value == 0.0f) {
    OCTET_CUDA(cudaMemsetAsync(values.data, 0, static_cast<std::size_t>(values.bytes()), stream));
    return;
  }
  with_type(values.dtype, [&](auto element) {
    using T = decltype(element);
    fill_kernel<T><<<grid_size(divide_up(values.size(), kThreads)), kThreads, 0, stream>>>(
        static_cast<T*>(values.data), values.size(), T(value));
  });
  OCTET_CUDA_LAUNCH("fill");
}

void fill_normal(cudaStream_t stream, Tensor values, float deviation, std::uint64_t key,
                 std::int64_t first_index, std::int64_t stride) {
  if (values.size() == 0) return;
  normal_kernel<<<grid_size(divide_up(values.size(), kThreads)), kThreads, 0, stream>>>(
      values.as<float>(), values.size(), values.cols, deviation, key, first_index, stride);
  OCTET_CUDA_LAUNCH("fill_normal");
}

}  // namespace octet::cuda
