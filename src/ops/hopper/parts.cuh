#pragma once

#include "instructions.cuh"
#include "warpgroup.cuh"

/// float32 results on their way from registers to a matrix, through shared memory in the swizzle of 128
/// bytes.
namespace octet::hopper {

constexpr int kPartBytes = 64 * 128;  ///< 64 rows of 128 bytes
constexpr int kPartsBytes = 2 * kPartBytes;

/// How a computing warpgroup hands on its 64 rows: parts of 128 bytes a row, in two places by turns.
class Parts {
 public:
  __device__ Parts(std::uint32_t places, int barrier, int thread, int first_row)
      : places_(places), barrier_(barrier), thread_(thread), first_row_(first_row) {}

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

}  // namespace octet::hopper
