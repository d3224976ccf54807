// Products of warpgroups under emulation: done when the warpgroup waits for them. Until then the registers of
// their sums hold NaNs.
#pragma once

#include <limits>

#include "hopper_units.h"

namespace emulation {

constexpr int kSums = 128;  ///< registers of a thread

inline Warpgroup& this_warpgroup() {
  return units_of(this_block()).warpgroups[thread_in_block() / Warpgroup::kThreads];
}
/// Where register `index` of this thread belongs.
inline std::size_t place_of_sum(int index) {
  const int thread = thread_in_block() % Warpgroup::kThreads, lane = thread % 32;
  const int row = thread / 32 * 16 + index / 2 % 2 * 8 + lane / 4;
  const int col = index / 4 * 8 + lane % 4 * 2 + index % 2;
  return static_cast<std::size_t>(row) * Warpgroup::kCols + static_cast<std::size_t>(col);
}

/// The operand that a descriptor tells of, as [16][rows].
inline void read_operand(std::uint64_t descriptor, bool turned, int rows, float* to) {
  const auto field = [&](int at) { return static_cast<std::uint32_t>(descriptor >> at & 0x3fff) << 4; };
  const std::uint32_t begin = field(0), across = field(16), eight = field(32);
  if (descriptor >> 62 != 1) stop("an operand in another swizzle");
  const std::byte* const shared = shared_of(this_block());
  for (int k = 0; k < 16; ++k) {
    for (int row = 0; row < rows; ++row) {
      const auto r = static_cast<std::uint32_t>(row), j = static_cast<std::uint32_t>(k);
      const std::uint32_t offset = turned ? r / 64 * across + j / 8 * eight + j % 8 * 128 + r % 64 * 2
                                          : r / 8 * eight + r % 8 * 128 + j * 2;
      const std::uint32_t at = swizzled(begin + offset) - kSharedBegin;
      if (at + 2 > shared_bytes()) stop("an operand beyond shared memory");
      std::uint16_t half;
      std::memcpy(&half, shared + at, sizeof half);
      const std::uint32_t bits = std::uint32_t{half} << 16;
      std::memcpy(to + k * rows + row, &bits, sizeof bits);
    }
  }
}

inline void multiply(const WarpgroupProduct& product, std::vector<float>& sums) {
  static float a[16 * Warpgroup::kRows], b[16 * Warpgroup::kCols];
  read_operand(product.a, product.turn_a, Warpgroup::kRows, a);
  read_operand(product.b, product.turn_b, Warpgroup::kCols, b);
  for (int row = 0; row < Warpgroup::kRows; ++row) {
    float* const d = sums.data() + row * Warpgroup::kCols;
    if (!product.add) std::fill_n(d, Warpgroup::kCols, 0.0f);
    for (int k = 0; k < 16; ++k) {
      const float left = a[k * Warpgroup::kRows + row];
      const float* const right = b + k * Warpgroup::kCols;
      for (int col = 0; col < Warpgroup::kCols; ++col) d[col] += left * right[col];
    }
  }
}

inline void issue(float (&d)[kSums], const WarpgroupProduct& product) {
  ThreadUnits& self = this_thread();
  Warpgroup& group = this_warpgroup();
  if (!self.begun) stop("a product before products_begin()");
  if (self.series.empty() && self.sums == nullptr) {
    self.sums = d;
    for (int i = 0; i < kSums; ++i) {
      if (product.add) group.sums[place_of_sum(i)] = d[i];
      d[i] = std::numeric_limits<float>::quiet_NaN();
    }
  } else if (self.sums != d) {
    stop("products into other registers while some are at work");
  }
  if (self.issued == group.products.size()) group.products.push_back(product);
  if (!(group.products[self.issued++] == product)) stop("threads of a warpgroup ask for different products");
}

inline void end_series() {
  ThreadUnits& self = this_thread();
  self.series.push_back(self.issued);
  self.begun = false;
}

inline void wait_for_series(std::size_t series) {
  ThreadUnits& self = this_thread();
  if (self.series.size() <= series) return;
  Warpgroup& group = this_warpgroup();
  while (self.series.size() > series + 1) self.series.pop_front();
  const std::size_t end = self.series.front();
  self.series.pop_front();
  const Event seen = group.waits;
  if (++group.waiting == Warpgroup::kThreads) {
    for (; group.done < end; ++group.done) multiply(group.products[group.done], group.sums);
    group.waiting = 0;
    ++group.waits;
  }
  wait_for_change(group.waits, seen);
  if (!self.series.empty() || self.issued != end) return;
  for (int i = 0; i < kSums; ++i) self.sums[i] = group.sums[place_of_sum(i)];
  self.sums = nullptr;
}

}  // namespace emulation
