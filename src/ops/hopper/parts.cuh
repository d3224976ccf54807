#pragma once

#include "instructions.cuh"
#include "warpgroup.cuh"

/// Results on their way from registers to a matrix, through shared memory in the swizzle of 128 bytes.
namespace octet::hopper {

constexpr int kPartBytes = 64 * 128;  ///< 64 rows of 128 bytes
constexpr int kPartsBytes = 2 * kPartBytes;

/// How a computing warpgroup hands on its 64 rows: parts of 128 bytes a row, in two places by turns.
class Parts {
 public:
  __device__ Parts(std::uint32_t places, int barrier, int thread, int first_row)
      : places_(places), barrier_(barrier), thread_(thread), first_row_(first_row) {}

  /// 64 columns from x on of a bfloat16 matrix: words(j, h) are columns 8·j + 2·(lane % 4) and the one after
  /// it, of row 8·h + lane / 4 of the warp's 16.
  template <typename Words>
  __device__ void write(const CUtensorMap& map, int x, Words words) {
    const std::uint32_t place = begin();
    const int row = thread_ / 32 * 16 + thread_ % 16, chunk = thread_ % 32 / 16;
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      const std::uint32_t four[4] = {words(j, 0), words(j, 1), words(j + 1, 0), words(j + 1, 1)};
      store_matrices(place + row * 128 + (((j + chunk) ^ (row & 7)) << 4), four);
    }
    end();
    if (thread_ == 0) store(map, place, x, first_row_);
  }

  /// 32 columns from x on of a float32 matrix, written or added: value(j, h, i).
  template <bool kAdd, typename Value>
  __device__ void write_floats(const CUtensorMap& map, int x, Value value) {
    const std::uint32_t place = begin();
    const int lane = thread_ % 32;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = thread_ / 32 * 16 + h * 8 + lane / 4, chunk = 2 * j + lane % 4 / 2;
        store_floats(place + row * 128 + ((chunk ^ (row & 7)) << 4) + lane % 2 * 8, value(j, h, 0),
                     value(j, h, 1));
      }
    }
    end();
    if (thread_ != 0) return;
    if constexpr (kAdd) {
      add(map, place, x, first_row_);
    } else {
      store(map, place, x, first_row_);
    }
  }

  __device__ void move_to(int first_row) {
    first_row_ = first_row;
  }
  /// The part that was written last, which stays until the next but one.
  __device__ std::uint32_t last() const {
    return places_ + turn_ * kPartBytes;
  }

 private:
  __device__ std::uint32_t begin() {
    if (thread_ == 0) wait_for_reads<1>();
    named_barrier(barrier_, kGroup);
    turn_ ^= 1;
    return places_ + turn_ * kPartBytes;
  }
  __device__ void end() {
    stores_before_copies();
    named_barrier(barrier_, kGroup);
  }

  std::uint32_t places_;
  int barrier_, thread_, first_row_, turn_ = 0;
};

/// Sums over the 64 rows of a warpgroup's four bfloat16 parts, 16 columns a warp, by matrix units: what lies
/// in shared memory, read transposed, times ones. Eight instructions a part, that wait for one another
/// between those of the next part: so nothing is written before the last.
class ColumnSums {
 public:
  __device__ explicit ColumnSums(int thread) : lane_(thread % 32), warp_(thread / 32) {
    const int row = lane_ / 16 * 8 + lane_ % 8, chunk = 2 * warp_ + lane_ / 8 % 2;
    from_ = row * 128 + ((chunk ^ (row & 7)) << 4);
  }

  /// Of a part that all threads have written at `place`.
  __device__ void take(int part, std::uint32_t place) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sums_[part][i] = 0.0f;
#pragma unroll
    for (int rows = 0; rows < 64; rows += 16) {
      std::uint32_t columns[4];
      load_transposed(place + from_ + rows * 128, columns);
      add_row_sums(sums_[part], columns);
    }
  }
  /// `cols`: that there are from the first part's on, a multiple of 64.
  __device__ void write(float* to, int cols) const {
    if (lane_ % 4 > 1) return;  // four lanes have the same sums, of two columns
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      if (part * 64 >= cols) return;
      to[part * 64 + 16 * warp_ + lane_ % 4 * 8 + lane_ / 4] =
          lane_ % 4 == 0 ? sums_[part][0] : sums_[part][2];
    }
  }

 private:
  int lane_, warp_;
  std::uint32_t from_;
  float sums_[4][4];
};

}  // namespace octet::hopper
