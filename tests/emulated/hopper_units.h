// The units of sm_90a that hopper/instructions.cuh drives, under emulation: shared memory by 32-bit
// addresses, transaction barriers, copied boxes and products of warpgroups. What is asynchronous is done as
// late as it may be, and until then its destination holds NaNs: a missing wait or an early release shows.
#pragma once

#include <cstring>
#include <deque>
#include <map>
#include <unordered_map>
#include <vector>

#include "cuda_emulation.h"
#include "tensor_map.h"

namespace emulation {

/// Where a block's dynamic shared memory begins; not a multiple of what a swizzle needs.
constexpr std::uint32_t kSharedBegin = 16;

/// Shared memory of a block, which must hold so many bytes from this address on.
inline std::byte* shared_at(int block, std::uint32_t address, std::size_t bytes) {
  if (address < kSharedBegin || address - kSharedBegin + bytes > shared_bytes()) {
    stop("address " + std::to_string(address) + " is not in shared memory");
  }
  return shared_of(block) + (address - kSharedBegin);
}
/// The 16 bytes that the swizzle of 128 bytes puts in the place of these.
inline std::uint32_t swizzled(std::uint32_t address) {
  return address ^ (address >> 7 & 7) << 4;
}

/// A phase ends when all arrivals came and all bytes that were expected.
struct TransactionBarrier {
  int arrivals, pending;
  std::int64_t bytes = 0;  ///< expected, less those that came, which may be sooner
  Event phases = 0;

  void arrive() {
    if (--pending < 0) stop("more arrivals at a barrier than it takes in a phase");
    end_if_complete();
  }
  void end_if_complete() {
    if (pending > 0 || bytes != 0) return;
    pending = arrivals;
    ++phases;
  }
};

/// A product of 64 x 16 by 16 x 256.
struct WarpgroupProduct {
  std::uint64_t a, b;
  bool turn_a, turn_b, add;

  bool operator==(const WarpgroupProduct& other) const {
    return a == other.a && b == other.b && turn_a == other.turn_a && turn_b == other.turn_b &&
           add == other.add;
  }
};

struct Warpgroup {
  static constexpr int kRows = 64, kCols = 256, kThreads = 128;

  std::vector<WarpgroupProduct> products;  ///< that were issued
  std::size_t done = 0;
  std::vector<float> sums = std::vector<float>(std::size_t{kRows} * kCols);
  int waiting = 0;
  Event waits = 0;
};

/// What a thread has started.
struct ThreadUnits {
  std::deque<std::function<void()>> stores;  ///< groups of one copy from shared memory
  std::vector<std::uint32_t> unfenced;       ///< addresses of stores that copies may not see yet
  float* sums = nullptr;                     ///< its registers of the products
  std::size_t issued = 0;
  std::deque<std::size_t> series;  ///< products issued when one ended
  bool begun = false;
};

struct BlockUnits {
  std::unordered_map<std::uint32_t, TransactionBarrier> barriers;
  std::map<int, ThreadUnits> threads;
  std::map<int, Warpgroup> warpgroups;
};

/// Of this launch.
inline BlockUnits& units_of(int block) {
  static std::uint64_t launch = 0;
  static std::map<int, BlockUnits> all;
  if (launch != launch_number()) all.clear();
  launch = launch_number();
  return all[block];
}
inline int this_block() {
  return static_cast<int>(here.block.x);
}
inline ThreadUnits& this_thread() {
  return units_of(this_block()).threads[thread_in_block()];
}

inline TransactionBarrier& barrier_at(int block, std::uint32_t address) {
  auto& barriers = units_of(block).barriers;
  const auto found = barriers.find(address);
  if (found == barriers.end()) stop("no barrier at " + std::to_string(address));
  if (!is_running(block)) stop("an arrival at a block that has returned");
  return found->second;
}

/// Bytes arrive at a barrier of a block at last, and before that what `copy` does.
inline void copy_at_last(int block, std::uint32_t barrier, std::int64_t bytes, std::function<void()> copy) {
  at_last([=] {
    TransactionBarrier& arrival = barrier_at(block, barrier);
    copy();
    arrival.bytes -= bytes;
    arrival.end_if_complete();
  });
}

/// Calls body(shared memory, matrix or null where the box is beyond it) for all 16 bytes of the box at
/// (x, y, z) of the map.
template <typename Body>
void for_box(const TensorMap& map, int block, std::uint32_t address, std::int64_t x, std::int64_t y,
             std::int64_t z, Body body) {
  if (address % 128 != 0) stop("a box at an address that is not a multiple of 128");
  const std::int64_t wide = 16 / map.element_bytes();
  std::uint32_t at = address;
  for (std::int64_t k = z; k < z + map.box[2]; ++k) {
    for (std::int64_t j = y; j < y + map.box[1]; ++j) {
      for (std::int64_t i = x; i < x + map.box[0]; i += wide, at += 16) {
        if (i % wide != 0) stop("a box that begins within 16 bytes");
        const bool inside =
            i >= 0 && j >= 0 && k >= 0 && i < map.sizes[0] && j < map.sizes[1] && k < map.sizes[2];
        if (inside && i + wide > map.sizes[0]) stop("rows that are not of whole 16 bytes");
        body(shared_at(block, swizzled(at), 16),
             inside ? map.data + i * map.strides[0] + j * map.strides[1] + k * map.strides[2] : nullptr);
      }
    }
  }
}

inline void load_box(int block, std::uint32_t to, const CUtensorMap& encoded, std::uint32_t barrier, int x,
                     int y, int z) {
  const TensorMap map = decoded(encoded);
  const auto bytes = static_cast<std::size_t>(map.box_bytes());
  std::memset(shared_at(block, to, bytes), 0xff, bytes);
  copy_at_last(block, barrier, map.box_bytes(), [=] {
    for_box(map, block, to, x, y, z, [](std::byte* shared, const std::byte* matrix) {
      if (matrix == nullptr) {
        std::memset(shared, 0, 16);
      } else {
        std::memcpy(shared, matrix, 16);
      }
    });
  });
}

/// Done when this thread waits for it: never, if it does not.
inline void store_box(const CUtensorMap& encoded, std::uint32_t from, int x, int y, bool add) {
  const TensorMap map = decoded(encoded);
  const int block = this_block();
  for (const auto& [thread, units] : units_of(block).threads) {
    for (const std::uint32_t address : units.unfenced) {
      if (address >= from && address < from + map.box_bytes()) stop("a copy of stores that were not fenced");
    }
  }
  if (add && map.type != CU_TENSOR_MAP_DATA_TYPE_FLOAT32) stop("only float32 is added to");
  this_thread().stores.push_back([=] {
    for_box(map, block, from, x, y, 0, [add](const std::byte* shared, std::byte* matrix) {
      if (matrix == nullptr) return;
      if (!add) {
        std::memcpy(matrix, shared, 16);
        return;
      }
      float sums[4], terms[4];
      std::memcpy(sums, matrix, 16);
      std::memcpy(terms, shared, 16);
      for (int i = 0; i < 4; ++i) sums[i] += terms[i];
      std::memcpy(matrix, sums, 16);
    });
  });
}
inline void wait_for_boxes(std::size_t groups) {
  auto& stores = this_thread().stores;
  while (stores.size() > groups) {
    stores.front()();
    stores.pop_front();
  }
}

}  // namespace emulation
