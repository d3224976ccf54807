#pragma once

#include "kernel_tools.cuh"

namespace octet::cuda {

/// Sums over the threads of a row, where a block of at most kMostRowThreads works on blockDim.y rows of whole
/// warps. The warps of a row wait for one another once a sum, and for no other row: sums take turns in shared
/// memory.
template <int kCount>
class RowSums {
  static constexpr int kMostWarps = kMostRowThreads / 32, kMostRows = kMostWarps / 2;

 public:
  /// In shared memory, aligned to 16 bytes.
  using Storage = float[2][kMostRows][kCount][kMostWarps];

  /// A barrier of all threads of the block.
  __device__ explicit RowSums(Storage& storage)
      : now_(storage[0][blockDim.x == 32 ? 0 : threadIdx.y][0]),
        next_(now_ + sizeof storage[0] / sizeof(float)) {
    for (unsigned i = threadIdx.y * blockDim.x + threadIdx.x; i < sizeof storage / sizeof(float);
         i += blockDim.x * blockDim.y)
      storage[0][0][0][i] = 0.0f;
    __syncthreads();
  }

  /// The same values in all threads of the row.
  __device__ void add_up(float (&sums)[kCount]) {
#pragma unroll
    for (int c = 0; c < kCount; ++c) sums[c] = warp_sum(sums[c]);
    if (blockDim.x == 32) return;
    if (threadIdx.x % 32 == 0) {
#pragma unroll
      for (int c = 0; c < kCount; ++c) now_[c * kMostWarps + threadIdx.x / 32] = sums[c];
    }
    __barrier_sync_count(threadIdx.y + 1, blockDim.x);
#pragma unroll
    for (int c = 0; c < kCount; ++c) {
      sums[c] = 0.0f;
#pragma unroll 1
      for (unsigned warp = 0; warp < blockDim.x / 32; warp += 4) {
        const auto four = Pack<float, 4>::load(now_ + c * kMostWarps + warp);
        sums[c] += (four[0] + four[1]) + (four[2] + four[3]);
      }
    }
    float* const done = now_;
    now_ = next_;
    next_ = done;
  }

 private:
  float *now_, *next_;
};

}  // namespace octet::cuda
