// Column sums: the gradient of a bias, and the second stage of every gradient that is summed over tokens.
// Bytes moved (compute dtype of s bytes): bias_backward t·n·s. The order of the sums depends on the shape
// alone.
#include <algorithm>

#include "drivers.h"
#include "kernel_tools.cuh"

namespace octet::cuda {
namespace {

constexpr int kLanes = 8;  // rows that a block of bias_backward reads at a time

// Block (x, y): packs of columns in x; rows first_row + y, then every kLanes-th of the block's share of the
// rows.
template <typename T, int N>
__global__ void __launch_bounds__(32 * kLanes)
    column_kernel(const T* dy, std::int64_t rows, std::int64_t cols, std::int64_t rows_a_block,
                  float* partials) {
  __shared__ float shared[kLanes][32 * N];
  const std::int64_t col = (std::int64_t{blockIdx.x} * 32 + threadIdx.x) * N;
  const std::int64_t begin = blockIdx.y * rows_a_block;
  const std::int64_t end = begin + rows_a_block < rows ? begin + rows_a_block : rows;
  float sums[N] = {};
  if (col < cols) {
#pragma unroll 4
    for (std::int64_t row = begin + threadIdx.y; row < end; row += kLanes) {
      const Pack<T, N> pack = Pack<T, N>::load(dy + row * cols + col);
#pragma unroll
      for (int n = 0; n < N; ++n) sums[n] += pack[n];
    }
  }
#pragma unroll
  for (int n = 0; n < N; ++n) shared[threadIdx.y][threadIdx.x * N + n] = sums[n];
  __syncthreads();
  for (int j = threadIdx.y * 32 + threadIdx.x; j < 32 * N; j += 32 * kLanes) {
    const std::int64_t to = std::int64_t{blockIdx.x} * 32 * N + j;
    if (to >= cols) continue;
    float sum = 0.0f;
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) sum += shared[lane][j];
    partials[blockIdx.y * cols + to] = sum;
  }
}

// A block sums 32 columns: its 32 rows of threads take every 32nd partial. In float64, since gradients
// cancel. Blocks of y = 1 and 2 do so with the sets of rows behind the first.
__global__ void __launch_bounds__(1024)
    partials_kernel(const float* partials, std::int64_t rows, std::int64_t cols, std::int64_t stride,
                    float* first_sums, float* second_sums, float* third_sums, bool accumulate) {
  __shared__ double shared[32][33];
  float* const sums = blockIdx.y == 0 ? first_sums : blockIdx.y == 1 ? second_sums : third_sums;
  partials += blockIdx.y * rows * stride;
  const std::int64_t col = std::int64_t{blockIdx.x} * 32 + threadIdx.x;
  double sum = 0.0;
  if (col < cols) {
#pragma unroll 8
    for (std::int64_t row = threadIdx.y; row < rows; row += 32) sum += partials[row * stride + col];
  }
  shared[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  const double total = warp_sum(shared[threadIdx.x][threadIdx.y]);
  const std::int64_t to = std::int64_t{blockIdx.x} * 32 + threadIdx.y;
  if (threadIdx.x == 0 && to < cols) sums[to] = static_cast<float>(accumulate ? sums[to] + total : total);
}

template <typename T>
__global__ void add_bias_kernel(const T* bias, T* y, std::int64_t size, std::int64_t cols) {
  const std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < size) y[i] = from_float<T>(to_float(y[i]) + to_float(bias[i % cols]));
}

__global__ void add_bias_kernel(const bf16* bias, float* y, std::int64_t size, std::int64_t cols) {
  const std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < size) y[i] += to_float(bias[i % cols]);
}

std::int64_t column_blocks(std::int64_t cols, int width) {
  return divide_up(cols, 32 * width);
}

// Shares of the rows, so that all multiprocessors have several blocks.
std::int64_t row_shares(std::int64_t rows, std::int64_t column_blocks, int multiprocessors) {
  const std::int64_t wanted = divide_up(std::int64_t{multiprocessors} * 8, column_blocks);
  return std::max<std::int64_t>(1, std::min(wanted, divide_up(rows, kLanes * 4)));
}

}  // namespace

void sum_partials(cudaStream_t stream, const float* partials, std::int64_t rows, std::int64_t cols,
                  std::int64_t stride, float* sums, bool accumulate, float* second, float* third) {
  if (cols == 0) return;
  const dim3 grid(grid_size(divide_up(cols, 32)), second == nullptr ? 1 : third == nullptr ? 2 : 3);
  partials_kernel<<<grid, dim3(32, 32), 0, stream>>>(partials, rows, cols, stride, sums, second, third,
                                                     accumulate);
  OCTET_CUDA_LAUNCH("sum_partials");
}

void bias_backward(cudaStream_t stream, Tensor dy, Tensor dbias, bool accumulate, Scratch& scratch) {
  const std::int64_t rows = dy.rows, cols = dy.cols;
  if (cols == 0) return;
  std::int64_t shares = 0;
  float* partials = nullptr;
  with_width(dy.dtype, takes_full_packs(dy.dtype, cols, dy.data), [&](auto element, auto width) {
    using T = decltype(element);
    constexpr int N = decltype(width)::value;
    const std::int64_t blocks = column_blocks(cols, N);
    shares = row_shares(rows, blocks, scratch.multiprocessors());
    partials = static_cast<float*>(scratch.reserve(shares * cols * size_of(DType::kF32)));
    const dim3 grid(grid_size(blocks), static_cast<unsigned>(shares));
    column_kernel<T, N>
        <<<grid, dim3(32, kLanes), 0, stream>>>(static_cast<const T*>(dy.data), rows, cols,
                                                std::max<std::int64_t>(1, divide_up(rows, shares)), partials);
  });
  OCTET_CUDA_LAUNCH("bias_backward");
  sum_partials(stream, partials, shares, cols, cols, dbias.as<float>(), accumulate);
}

void add_bias(cudaStream_t stream, Tensor bias, Tensor y) {
  if (y.size() == 0) return;
  constexpr int kThreads = 256;
  const unsigned grid = grid_size(divide_up(y.size(), kThreads));
  if (bias.dtype != y.dtype) {
    OCTET_ASSERT(bias.dtype == DType::kBF16 && y.dtype == DType::kF32);
    add_bias_kernel<<<grid, kThreads, 0, stream>>>(static_cast<const bf16*>(bias.data), y.as<float>(),
                                                   y.size(), y.cols);
  } else {
    with_type(y.dtype, [&](auto element) {
      using T = decltype(element);
      add_bias_kernel<T><<<grid, kThreads, 0, stream>>>(static_cast<const T*>(bias.data),
                                                        static_cast<T*>(y.data), y.size(), y.cols);
    });
  }
  OCTET_CUDA_LAUNCH("add_bias");
}

}  // namespace octet::cuda
