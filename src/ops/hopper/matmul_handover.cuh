#pragma once

#include "instructions.cuh"
#include "matmul_product.cuh"
#include "tiling.h"
#include "warpgroup.cuh"

/// How sums in bfloat16 get from the warps that compute them to those that finish them.
namespace octet::hopper {

/// Adds a bias's elements 8·j + 2·(lane % 4) and the next to the sums of these columns.
__device__ inline void add_to_columns(float (&d)[128], int j, std::uint32_t bias) {
  const float2 two = unpacked(bias);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    d[4 * j + 2 * h] += two.x;
    d[4 * j + 2 * h + 1] += two.y;
  }
}
__device__ inline std::uint32_t packed_sums(const float (&d)[128], int j, int h) {
  return packed(d[4 * j + 2 * h], d[4 * j + 2 * h + 1]);
}

constexpr int kFinishingWarps = 3;

/// The way of a block's tile, in bfloat16, from the two warpgroups that computed 64 rows each to the warps
/// that finish it; and of the bias of the tile's columns from the loading thread to the two. A thread uses
/// one Handover for all tiles, in order.
class Handover {
 public:
  static constexpr int kHalfBytes = 64 * kCols * 2;
  static constexpr int kBiasPlaces = 4;  ///< as many tiles as the loading thread may be ahead, and one
  static constexpr int kBiasBytes = kCols * 2;
  static constexpr int kColumnSumBytes = kFinishingWarps * kCols * 4;
  static constexpr int kBarriersAt = 2 * kHalfBytes + kBiasPlaces * kBiasBytes + 2 * kColumnSumBytes;
  static constexpr int kBytes = kBarriersAt + 2 * (8 + 8);

  __device__ explicit Handover(std::uint32_t at) : at_(at) {}

  __device__ void init() const {
    for (int half = 0; half < 2; ++half) {
      barrier_init(full(half), kGroup / 32);
      barrier_init(empty(half), kFinishingWarps);
    }
  }

  /// Of the loading thread: the bias of a tile's columns comes with its first stage. Zero bytes: there is
  /// none.
  __device__ int bias_bytes(const Product& product, const Tile& tile) const {
    return product.bias == nullptr ? 0 : min(kCols, product.cols - tile.col * kCols) * 2;
  }
  __device__ void load_bias(const Product& product, const Tile& tile, int bytes, std::uint32_t barrier) {
    load_bytes(next_bias(), product.bias + tile.col * kCols, bytes, barrier);
  }
  /// Of a computing warpgroup, once a tile.
  __device__ void add_bias(float (&d)[128], int thread) {
    const std::uint32_t bias = next_bias() + thread % 4 * 4;
#pragma unroll
    for (int j = 0; j < 32; ++j) add_to_columns(d, j, static_cast<std::uint32_t>(load_word(bias + j * 16)));
  }

  /// Hands over the sums of 64 rows.
  __device__ void give(int half, const float (&d)[128], int thread) {
    wait(empty(half), parity_ ^ 1);
    const int row = thread / 32 * 16 + thread % 16;
#pragma unroll
    for (int j = 0; j < 32; j += 2) {
      const std::uint32_t four[4] = {packed_sums(d, j, 0), packed_sums(d, j, 1), packed_sums(d, j + 1, 0),
                                     packed_sums(d, j + 1, 1)};
      store_matrices(eight_at(half, row, j + thread % 32 / 16), four);
    }
    stores_before_copies();
    __syncwarp();
    if (thread % 32 == 0) arrive(full(half));
    parity_ ^= 1;
  }

  /// Of the finishing warps: waits for a half.
  __device__ void take(int half) const {
    wait(full(half), parity_);
  }
  /// Address of elements 8·place and the next seven of a row of the half; and, given that, of those of the
  /// row that is i further down, where that sets bits of the row's number that were 0.
  __device__ std::uint32_t eight_at(int half, int row, int place) const {
    return at_ + half * kHalfBytes + place / 8 * kBoxBytes + row * 128 + (((place ^ row) & 7) << 4);
  }
  __device__ static std::uint32_t below(std::uint32_t eight, int i) {
    return (eight ^ i << 4) + i * 128;
  }
  /// Copies 64 columns of the half, the part-th of four, to (x, y) of a matrix, by one thread.
  __device__ void copy(int half, int part, const CUtensorMap& map, int x, int y) const {
    store(map, eight_at(half, 0, part * 8), x, y);
  }
  /// After a warp's last read of the half.
  __device__ void release(int half) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(empty(half));
    if (half == 1) parity_ ^= 1;
  }
  /// Shared memory for [warp, column] sums of a tile, in two places by turns.
  __device__ std::uint32_t next_column_sums() const {
    return at_ + 2 * kHalfBytes + kBiasPlaces * kBiasBytes + parity_ * kColumnSumBytes;
  }

 private:
  __device__ std::uint32_t full(int half) const {
    return at_ + kBarriersAt + 8 * half;
  }
  __device__ std::uint32_t empty(int half) const {
    return full(half) + 16;
  }
  __device__ std::uint32_t next_bias() {
    bias_place_ = (bias_place_ + 1) % kBiasPlaces;
    return at_ + 2 * kHalfBytes + bias_place_ * kBiasBytes;
  }

  std::uint32_t at_;
  int parity_ = 0, bias_place_ = 0;
};

}  // namespace octet::hopper
