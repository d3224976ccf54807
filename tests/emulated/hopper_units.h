// The units of sm_90a that hopper/instructions.cuh drives, under emulation: shared memory by 32-bit
// addresses, transaction barriers, copied boxes and products of warpgroups. What is asynchronous is done as
// late as it may be, and until then its destination holds NaNs: a missing wait or an early release shows.
#pragma once

#include <array>
#include <cstring>
#include <deque>
#include <map>
#include <unordered_map>
#include <vector>

#include "cuda_emulation.h"
#include "tensor_map.h"

namespace emulation {

/// Where a block's dynamic shared memory begins; not a multiple of what a swizzle needs.
constexpr std::uint32_t kSharedBegin = 768;

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

/// A product of 64 x 16 by 16 x `cols`.
struct WarpgroupProduct {
  int cols;
  bool a_in_registers;
  std::uint64_t a, b;  ///< descriptors; a is 0 where it is in registers
  bool turn_a, turn_b, add;

  bool operator==(const WarpgroupProduct& other) const {
    return cols == other.cols && a_in_registers == other.a_in_registers && a == other.a && b == other.b &&
           turn_a == other.turn_a && turn_b == other.turn_b && add == other.add;
  }
};

struct Warpgroup {
  static constexpr int kRows = 64, kThreads = 128;

  struct Issued {
    WarpgroupProduct product;
    std::array<float*, kThreads> sums{};  ///< registers of each thread
    std::array<const std::uint32_t*, kThreads> operand{};
    std::array<std::array<std::uint32_t, 4>, kThreads> words{};  ///< that were there when it was issued
  };

  std::deque<Issued> products;
  std::size_t gone = 0;  ///< products that were before those
  std::size_t done = 0;
  int waiting = 0;
  Event waits = 0;
};

/// Sums of a thread while products work on them.
struct SumsAtWork {
  std::vector<float> values;
  int products = 0;
};

/// What a thread has started.
struct ThreadUnits {
  std::deque<std::function<void()>> stores;  ///< groups of one copy from shared memory
  std::vector<std::uint32_t> unfenced;       ///< addresses of stores that copies may not see yet
  std::map<float*, SumsAtWork> sums;         ///< by the registers that they go to
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

/// What lies in shared memory where a barrier is, so that a store over it is noticed.
constexpr std::uint64_t kBarrierMark = 0xb0a71e45c3d2f196;

inline void make_barrier(int block, std::uint32_t address, int arrivals) {
  std::memcpy(shared_at(block, address, sizeof kBarrierMark), &kBarrierMark, sizeof kBarrierMark);
  units_of(block).barriers[address] = {arrivals, arrivals};
}
inline TransactionBarrier& barrier_at(int block, std::uint32_t address) {
  auto& barriers = units_of(block).barriers;
  const auto found = barriers.find(address);
  if (found == barriers.end()) stop("no barrier at " + std::to_string(address));
  if (std::memcmp(shared_at(block, address, sizeof kBarrierMark), &kBarrierMark, sizeof kBarrierMark) != 0) {
    stop("the barrier at " + std::to_string(address) + " was written over");
  }
  if (!is_running(block)) stop("an arrival at a block that has returned");
  return found->second;
}

/// Grows with every counter in global memory that is counted on.
inline Event& counts() {
  static Event all = 0;
  return all;
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

/// That what copies read was not stored without a fence.
inline void check_fenced(std::uint32_t from, std::int64_t bytes) {
  for (const auto& [thread, units] : units_of(this_block()).threads) {
    for (const std::uint32_t address : units.unfenced) {
      if (address >= from && address < from + bytes) stop("a copy of stores that were not fenced");
    }
  }
}

/// Done when this thread waits for it: never, if it does not.
inline void store_box(const CUtensorMap& encoded, std::uint32_t from, int x, int y, int z, bool add) {
  const TensorMap map = decoded(encoded);
  const int block = this_block();
  check_fenced(from, map.box_bytes());
  if (add && map.type != CU_TENSOR_MAP_DATA_TYPE_FLOAT32) stop("only float32 is added to");
  this_thread().stores.push_back([=] {
    for_box(map, block, from, x, y, z, [add](const std::byte* shared, std::byte* matrix) {
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
/// Bytes from global to shared memory.
inline void load_span(std::uint32_t to, const void* from, int bytes, std::uint32_t barrier) {
  const int block = this_block();
  if (to % 16 != 0 || bytes % 16 != 0 || reinterpret_cast<std::uintptr_t>(from) % 16 != 0) {
    stop("a copy that is not of whole 16 bytes");
  }
  std::byte* const place = shared_at(block, to, static_cast<std::size_t>(bytes));
  std::memset(place, 0xff, static_cast<std::size_t>(bytes));
  copy_at_last(block, barrier, bytes, [=] { std::memcpy(place, from, static_cast<std::size_t>(bytes)); });
}
/// Float32 numbers from shared to global memory, or added there.
inline void store_span(float* to, std::uint32_t from, int bytes, bool add) {
  const int block = this_block();
  check_fenced(from, bytes);
  if (from % 16 != 0 || bytes % 16 != 0 || reinterpret_cast<std::uintptr_t>(to) % 16 != 0) {
    stop("a copy that is not of whole 16 bytes");
  }
  this_thread().stores.push_back([=] {
    const auto* const values =
        reinterpret_cast<const float*>(shared_at(block, from, static_cast<std::size_t>(bytes)));
    for (int i = 0; i < bytes / 4; ++i) to[i] = add ? to[i] + values[i] : values[i];
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
