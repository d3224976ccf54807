// Takes the place of src/ops/cuda/async_copy.cuh, which is assembly, under emulation. A copy arrives as late
// as it may, and until then its destination holds NaNs: a missing wait shows.
#pragma once

#include <deque>
#include <map>
#include <vector>

#include "kernel_tools.cuh"

namespace octet::cuda {

namespace emulated {

struct AsyncCopy {
  void* to;
  const void* from;
};

/// What one thread has started: its groups, of which the last is still open.
struct AsyncCopies {
  std::deque<std::vector<AsyncCopy>> groups{1};
};

inline AsyncCopies& copies_of_this_thread() {
  static std::map<unsigned, AsyncCopies> all;
  return all[threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)];
}

}  // namespace emulated

inline void copy_async(void* shared, const void* global) {
  memset(shared, 0xff, 16);
  emulated::copies_of_this_thread().groups.back().push_back({shared, global});
}

inline void end_copy_group() {
  emulated::copies_of_this_thread().groups.emplace_back();
}

template <int kPending>
void wait_for_copies() {
  auto& groups = emulated::copies_of_this_thread().groups;
  while (groups.size() > kPending + 1u) {
    for (const auto& copy : groups.front()) memcpy(copy.to, copy.from, 16);
    groups.pop_front();
  }
}

}  // namespace octet::cuda
