#pragma once

#include "kernel_tools.cuh"

// Copies from global to shared memory that pass no register (PTX ISA, cp.async), which every GPU since the
// A100 has. Those that a thread starts between two ends of group are a group; groups arrive in order. A
// thread sees what it copied itself once it has waited for it; other threads do behind a barrier.
namespace octet::cuda {

/// Starts to copy 16 bytes; both addresses are multiples of 16.
__device__ inline void copy_async(void* shared, const void* global) {
  const auto to = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;\n" ::"r"(to), "l"(global) : "memory");
}

__device__ inline void end_copy_group() {
  asm volatile("cp.async.commit_group;\n" ::: "memory");
}

/// Waits for all groups of this thread but the kPending last.
template <int kPending>
__device__ inline void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending) : "memory");
}

}  // namespace octet::cuda
