// Products of warpgroups under emulation: done when the warpgroup waits for them. Until then the registers of
// their sums hold NaNs.
#pragma once

#include <limits>
#include <set>

#include "hopper_units.h"

namespace emulation {

inline Warpgroup& this_warpgroup() {
  return units_of(this_block()).warpgroups[thread_in_block() / Warpgroup::kThreads];
}
/// The row that register `index` of a thread's sums belongs to, and its column.
inline int row_of(int thread, int index) {
  return thread / 32 * 16 + index / 2 % 2 * 8 + thread % 32 / 4;
}
inline int column_of(int thread, int index) {
  return index / 4 * 8 + thread % 4 * 2 + index % 2;
}
inline float upper_half(std::uint32_t half) {
  const std::uint32_t bits = half << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

/// The 128 bytes of shared memory, by their number, to which threads of the block stored without a fence.
inline std::set<std::uint32_t> unfenced_rows() {
  std::set<std::uint32_t> rows;
  for (const auto& [thread, units] : units_of(this_block()).threads) {
    for (const std::uint32_t address : units.unfenced) rows.insert(address / 128);
  }
  return rows;
}

/// The operand that a descriptor tells of, as [16][rows].
inline void read_operand(std::uint64_t descriptor, bool turned, int rows, float* to) {
  const auto field = [&](int at) { return static_cast<std::uint32_t>(descriptor >> at & 0x3fff) << 4; };
  const std::uint32_t begin = field(0), across = field(16), eight = field(32);
  if (descriptor >> 62 != 1) stop("an operand in another swizzle");
  const std::byte* const shared = shared_of(this_block());
  const std::set<std::uint32_t> unfenced = unfenced_rows();
  for (int k = 0; k < 16; ++k) {
    for (int row = 0; row < rows; ++row) {
      const auto r = static_cast<std::uint32_t>(row), j = static_cast<std::uint32_t>(k);
      const std::uint32_t offset = turned ? r / 64 * across + j / 8 * eight + j % 8 * 128 + r % 64 * 2
                                          : r / 8 * eight + r % 8 * 128 + j * 2;
      const std::uint32_t address = swizzled(begin + offset), at = address - kSharedBegin;
      if (at + 2 > shared_bytes()) stop("an operand beyond shared memory");
      if (unfenced.count(address / 128) > 0) stop("a product of stores that were not fenced");
      std::uint16_t half;
      std::memcpy(&half, shared + at, sizeof half);
      to[k * rows + row] = upper_half(half);
    }
  }
}
inline void read_registers(const Warpgroup::Issued& issued, float* to) {
  for (int thread = 0; thread < Warpgroup::kThreads; ++thread) {
    for (int i = 0; i < 8; ++i) {
      const auto t = static_cast<std::size_t>(thread), word = static_cast<std::size_t>(i / 2);
      if (issued.operand[t][word] != issued.words[t][word]) stop("an operand in registers changed meanwhile");
      const int k = i / 4 * 8 + thread % 4 * 2 + i % 2;
      to[k * Warpgroup::kRows + row_of(thread, i)] =
          upper_half(issued.words[t][word] >> (16 * (i % 2)) & 0xffff);
    }
  }
}

/// A product, of which all threads know by now.
inline void multiply(const Warpgroup::Issued& issued) {
  const WarpgroupProduct& product = issued.product;
  static float a[16 * Warpgroup::kRows], b[16 * 256], sums[Warpgroup::kRows * 256];
  if (product.a_in_registers) {
    read_registers(issued, a);
  } else {
    read_operand(product.a, product.turn_a, Warpgroup::kRows, a);
  }
  read_operand(product.b, product.turn_b, product.cols, b);
  for (int row = 0; row < Warpgroup::kRows; ++row) {
    float* const d = sums + row * product.cols;
    std::fill_n(d, product.cols, 0.0f);
    for (int k = 0; k < 16; ++k) {
      const float left = a[k * Warpgroup::kRows + row];
      const float* const right = b + k * product.cols;
      for (int col = 0; col < product.cols; ++col) d[col] += left * right[col];
    }
  }
  const int first = thread_in_block() / Warpgroup::kThreads * Warpgroup::kThreads;
  for (int thread = 0; thread < Warpgroup::kThreads; ++thread) {
    auto& at_work = units_of(this_block()).threads[first + thread].sums;
    const auto found = at_work.find(issued.sums[static_cast<std::size_t>(thread)]);
    std::vector<float>& values = found->second.values;
    for (int i = 0; i < product.cols / 2; ++i) {
      float& value = values[static_cast<std::size_t>(i)];
      const float term = sums[row_of(thread, i) * product.cols + column_of(thread, i)];
      value = product.add ? value + term : term;
    }
    if (--found->second.products > 0) continue;
    std::copy(values.begin(), values.end(), found->first);
    at_work.erase(found);
  }
}

inline void issue(float* d, const std::uint32_t* operand, const WarpgroupProduct& product) {
  ThreadUnits& self = this_thread();
  Warpgroup& group = this_warpgroup();
  if (!self.begun) stop("a product before products_begin()");
  const auto [at_work, is_new] = self.sums.try_emplace(d);
  const int count = product.cols / 2;
  if (is_new) {
    at_work->second.values.assign(d, d + count);
    std::fill_n(d, count, std::numeric_limits<float>::quiet_NaN());
  }
  for (int i = 0; i < count; ++i) {
    if (!std::isnan(d[i])) stop("sums changed while products work on them");
  }
  ++at_work->second.products;
  const std::size_t index = self.issued++ - group.gone;
  if (index == group.products.size()) group.products.push_back({product});
  Warpgroup::Issued& issued = group.products[index];
  if (!(issued.product == product)) stop("threads of a warpgroup ask for different products");
  const auto thread = static_cast<std::size_t>(thread_in_block() % Warpgroup::kThreads);
  issued.sums[thread] = d;
  issued.operand[thread] = operand;
  if (operand != nullptr) std::copy(operand, operand + 4, issued.words[thread].begin());
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
    for (; group.done < end; ++group.done, ++group.gone) {
      multiply(group.products.front());
      group.products.pop_front();
    }
    group.waiting = 0;
    ++group.waits;
  }
  wait_for_change(group.waits, seen);
}

}  // namespace emulation
