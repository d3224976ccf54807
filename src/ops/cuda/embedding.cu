// Embedding rows gathered, and their gradients added up in a fixed order.
// Bytes moved (compute dtype of s bytes): forward 2·t·h·s (3·t·h·s with positions); backward t·h·s, and 8·h
// bytes of the table for every distinct id.
#include <algorithm>

#include "drivers.h"
#include "kernel_tools.cuh"

namespace octet::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWindow = 64;  // sorted tokens that one block adds up
constexpr int kUnroll = 8;   // rows in flight a thread

template <typename T, int N>
__global__ void __launch_bounds__(kThreads)
    forward_kernel(const std::int32_t* ids, const T* table, std::int64_t first_id, std::int64_t table_rows,
                   const std::int32_t* positions, const T* position_table, T* out, std::int64_t cols,
                   unsigned blocks_a_row) {
  const std::int64_t token = blockIdx.x / blocks_a_row;
  const std::int64_t col = (std::int64_t{blockIdx.x % blocks_a_row} * kThreads + threadIdx.x) * N;
  if (col >= cols) return;
  const std::int64_t row = ids[token] - first_id;
  Pack<T, N> y;
  if (row >= 0 && row < table_rows) {
    y = Pack<T, N>::load(table + row * cols + col);
  } else {
#pragma unroll
    for (int n = 0; n < N; ++n) y.set(n, 0.0f);
  }
  if (position_table != nullptr) {
    const Pack<T, N> position = Pack<T, N>::load(position_table + positions[token] * cols + col);
#pragma unroll
    for (int n = 0; n < N; ++n) y.set(n, y[n] + position[n]);
  }
  y.store(out + token * cols + col);
}

// A run is a stretch of equal ids among the sorted tokens. A window's block sums each run inside it in a
// register and adds it to the table, whose rows it reads together with the tokens' gradients. The part of a
// run that crosses into another window goes to `open` instead: slot 0 of a window is for a run that came in
// from the window before, slot 1 for one that begins here and goes on. open: [windows, 2, cols].
template <typename T, int N>
__global__ void __launch_bounds__(kThreads)
    backward_kernel(const std::int32_t* ids, const std::int32_t* order, const T* dout, std::int64_t first_id,
                    std::int64_t table_rows, std::int64_t tokens, std::int64_t cols, float* dtable,
                    float* open) {
  __shared__ std::int32_t token_of[kWindow];
  __shared__ std::int32_t id_of[kWindow + 2];  // with one neighbour on either side; -1 beyond the ends
  const std::int64_t window = blockIdx.x, begin = window * kWindow;
  const int count = static_cast<int>(tokens - begin < kWindow ? tokens - begin : kWindow);
  for (int i = threadIdx.x; i < kWindow + 2; i += kThreads) {
    const std::int64_t at = begin + i - 1;
    const bool inside = at >= 0 && at < tokens;
    const std::int32_t token = inside ? order[at] : 0;
    id_of[i] = inside ? ids[token] : -1;
    if (i >= 1 && i <= kWindow) token_of[i - 1] = token;
  }
  __syncthreads();
  const std::int64_t col = (std::int64_t{blockIdx.y} * kThreads + threadIdx.x) * N;
  if (col >= cols) return;
  const std::int32_t before = id_of[0], behind = id_of[count + 1];
  // The table's row of an id, if it is among ours.
  const auto row_of = [&](std::int32_t id) -> float* {
    const std::int64_t row = id - first_id;
    return row >= 0 && row < table_rows ? dtable + row * cols + col : nullptr;
  };

  Pack<float, N> none;
#pragma unroll
  for (int n = 0; n < N; ++n) none.set(n, 0.0f);
  Pack<float, N> sums = none;
  for (int first = 0; first < count; first += kUnroll) {
    Pack<T, N> packs[kUnroll];
    Pack<float, N> old[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int i = min(first + u, count - 1);
      packs[u] = Pack<T, N>::load(dout + token_of[i] * cols + col);
      const std::int32_t id = id_of[i + 1];
      const float* const row = row_of(id);
      const bool closes = id != id_of[i + 2] && id != before;
      old[u] = closes && row != nullptr ? Pack<float, N>::load(row) : none;
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int i = first + u;
      if (i >= count) continue;
#pragma unroll
      for (int n = 0; n < N; ++n) sums.set(n, sums[n] + packs[u][n]);
      const std::int32_t id = id_of[i + 1];
      if (id == id_of[i + 2] && i + 1 < count) continue;
      float* to = row_of(id);
      if (to != nullptr) {
        if (id == before) {
          to = open + window * 2 * cols + col;
        } else if (id == behind) {
          to = open + (window * 2 + 1) * cols + col;
        } else {
#pragma unroll
          for (int n = 0; n < N; ++n) sums.set(n, old[u][n] + sums[n]);
        }
        sums.store(to);
      }
      sums = none;
    }
  }
}

// Adds up, for each run that crosses windows, its parts in order. The block of the window where a run begins
// does it.
__global__ void __launch_bounds__(kThreads)
    open_runs_kernel(const std::int32_t* ids, const std::int32_t* order, std::int64_t first_id,
                     std::int64_t table_rows, std::int64_t tokens, std::int64_t cols, float* dtable,
                     const float* open) {
  const std::int64_t window = blockIdx.x, end = (window + 1) * kWindow;
  const std::int64_t col = std::int64_t{blockIdx.y} * kThreads + threadIdx.x;
  if (end >= tokens || col >= cols) return;
  const std::int32_t id = ids[order[end - 1]];
  if (ids[order[end]] != id) return;
  const std::int64_t begin = end - kWindow;
  if (begin > 0 && ids[order[begin - 1]] == id) return;  // began in an earlier window
  const std::int64_t row = id - first_id;
  if (row < 0 || row >= table_rows) return;
  float sum = open[(window * 2 + 1) * cols + col];
  for (std::int64_t next = window + 1; next * kWindow < tokens && ids[order[next * kWindow]] == id; ++next) {
    sum += open[next * 2 * cols + col];
  }
  dtable[row * cols + col] += sum;
}

}  // namespace

void embedding_forward(cudaStream_t stream, Tensor ids, Tensor table, std::int64_t first_id, Tensor positions,
                       Tensor position_table, Tensor out) {
  if (out.size() == 0) return;
  const bool full = takes_full_packs(out.dtype, out.cols, table.data, position_table.data, out.data);
  with_width(out.dtype, full, [&](auto element, auto width) {
    using T = decltype(element);
    constexpr int N = decltype(width)::value;
    const unsigned blocks_a_row = grid_size(divide_up(out.cols / N, kThreads));
    forward_kernel<T, N><<<grid_size(out.rows * blocks_a_row), kThreads, 0, stream>>>(
        ids.as<std::int32_t>(), static_cast<const T*>(table.data), first_id, table.rows,
        positions.as<std::int32_t>(), static_cast<const T*>(position_table.data), static_cast<T*>(out.data),
        out.cols, blocks_a_row);
  });
  OCTET_CUDA_LAUNCH("embedding_forward");
}

std::int64_t embedding_backward_scratch(std::int64_t tokens, std::int64_t cols) {
  return divide_up(tokens, kWindow) * 2 * cols * size_of(DType::kF32);
}

void embedding_backward(cudaStream_t stream, Tensor ids, Tensor order, Tensor dout, std::int64_t first_id,
                        Tensor dtable, Scratch& scratch) {
  if (dout.size() == 0) return;
  const std::int64_t tokens = dout.rows, cols = dout.cols;
  auto* open = static_cast<float*>(scratch.reserve(embedding_backward_scratch(tokens, cols)));
  const unsigned windows = grid_size(divide_up(tokens, kWindow));
  // Four columns a thread: 16 bytes of the table.
  const bool full = cols % 4 == 0 && aligned(4 * size_of(dout.dtype), dout.data) && aligned(16, dtable.data);
  const auto launch = [&](auto element, auto width) {
    using T = decltype(element);
    constexpr int N = decltype(width)::value;
    const dim3 grid(windows, static_cast<unsigned>(divide_up(cols / N, kThreads)));
    backward_kernel<T, N><<<grid, kThreads, 0, stream>>>(ids.as<std::int32_t>(), order.as<std::int32_t>(),
                                                         static_cast<const T*>(dout.data), first_id,
                                                         dtable.rows, tokens, cols, dtable.as<float>(), open);
  };
  with_type(dout.dtype,
            [&](auto element) { full ? launch(element, Width<4>{}) : launch(element, Width<1>{}); });
  OCTET_CUDA_LAUNCH("embedding_backward");
  const dim3 grid(windows, static_cast<unsigned>(divide_up(cols, kThreads)));
  open_runs_kernel<<<grid, kThreads, 0, stream>>>(ids.as<std::int32_t>(), order.as<std::int32_t>(), first_id,
                                                  dtable.rows, tokens, cols, dtable.as<float>(), open);
  OCTET_CUDA_LAUNCH("embedding_backward");
}

}  // namespace octet::cuda
