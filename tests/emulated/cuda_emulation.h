// Enough of CUDA's device language to run octet's kernels on the CPU, where continuous integration has no
// GPU: included ahead of a .cu file that launches.pl rewrote. Threads of a block are fibers that take turns
// at barriers and warp exchanges; blocks run one after another, but all at once where they form clusters.
// Results are those of the kernels' arithmetic and indexing; speed, races and memory ordering are not shown.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>

#undef __global__
#undef __device__
#undef __host__
#undef __shared__
#undef __launch_bounds__
#undef __cluster_dims__
#undef __grid_constant__
#define __global__ static
#define __device__
#define __host__
#define __shared__ static
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __grid_constant__
#define OCTET_EMULATED_CLUSTER 1

namespace emulation {

class Block;

/// The thread that runs now, and the launch that it belongs to.
struct Here {
  dim3 thread, block, threads, blocks;
  int lane = 0;
  Block* owner = nullptr;
};
extern Here here;

/// Dynamic shared memory of the present block.
void* dynamic_shared();
/// Waits for all threads of the block that have not returned.
void block_barrier();
/// What a lane can show at once.
constexpr std::size_t kShownBytes = 32;
/// Shows `bytes` of this lane to its warp, and returns where lane `lane` of it put the same, once all have;
/// that of the next lane lies kShownBytes further. Good until this lane's next exchange.
const void* exchange(const void* value, std::size_t bytes, int lane);

/// What fibers wait for: that it counts on from what they saw.
using Event = std::uint64_t;
void wait_for_change(const Event& event, Event seen);
/// Waits for `threads` threads of the block that name the same barrier.
void named_barrier(int barrier, int threads);
/// Waits for all threads of the cluster that have not returned.
void cluster_barrier();
int rank_in_cluster();
/// Number of this thread in its block.
int thread_in_block();
/// Number of the block of this cluster that has this rank, in the grid.
int block_of_cluster(int rank);
/// Shared memory of a block of this grid, its size, and whether threads of the block still run.
std::byte* shared_of(int block);
std::size_t shared_bytes();
bool is_running(int block);
/// Done once no thread can go on without: as late as it may be.
void at_last(std::function<void()> event);
/// Number of the launch that runs now.
std::uint64_t launch_number();
/// Ends the launch with an error of this text.
[[noreturn]] void stop(const std::string& reason);

class Launch {
 public:
  Launch(unsigned cluster, dim3 blocks, dim3 threads, std::size_t shared, cudaStream_t)
      : cluster_(cluster), blocks_(blocks), threads_(threads), shared_(shared) {}
  /// kernel(arguments…) is one thread's work.
  template <typename Kernel>
  auto with(Kernel kernel) {
    return [*this, kernel](auto... arguments) { run([&] { kernel(arguments...); }); };
  }

 private:
  void run(const std::function<void()>& thread) const;

  unsigned cluster_;
  dim3 blocks_, threads_;
  std::size_t shared_;
};

template <typename T>
T shuffle(T value, int lane) {
  T result;
  std::memcpy(&result, exchange(&value, sizeof value, lane), sizeof result);
  return result;
}

}  // namespace emulation

inline const dim3& threadIdx = emulation::here.thread;
inline const dim3& blockIdx = emulation::here.block;
inline const dim3& blockDim = emulation::here.threads;
inline const dim3& gridDim = emulation::here.blocks;

using std::isfinite;
using std::isnan;
using std::max;
using std::min;

inline void __syncthreads() {
  emulation::block_barrier();
}
inline void __barrier_sync_count(unsigned barrier, unsigned threads) {
  emulation::named_barrier(static_cast<int>(barrier), static_cast<int>(threads));
}
inline void __syncwarp(unsigned = 0xffffffffu) {
  emulation::shuffle(0, 0);
}
template <typename T>
T __shfl_xor_sync(unsigned, T value, int offset) {
  return emulation::shuffle(value, emulation::here.lane ^ offset);
}
template <typename T>
T __shfl_sync(unsigned, T value, int lane) {
  return emulation::shuffle(value, lane);
}
inline unsigned __ballot_sync(unsigned, bool predicate) {
  unsigned votes = 0;
  for (int lane = 0; lane < 32; ++lane) votes |= (emulation::shuffle(predicate, lane) ? 1u : 0u) << lane;
  return votes;
}
inline bool __any_sync(unsigned mask, bool predicate) {
  return __ballot_sync(mask, predicate) != 0;
}
inline int __popc(unsigned bits) {
  return __builtin_popcount(bits);
}
template <typename T>
T atomicMax(T* address, T value) {
  const T before = *address;
  if (value > before) *address = value;
  return before;
}
template <typename T>
T atomicAdd(T* address, T value) {
  const T before = *address;
  *address += value;
  return before;
}
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const std::uint64_t bytes = std::uint64_t{y} << 32 | x;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i)
    result |= static_cast<unsigned>(bytes >> (8 * (selector >> (4 * i) & 7)) & 0xff) << (8 * i);
  return result;
}
inline int __float_as_int(float value) {
  int bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}
inline float __int_as_float(int bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
inline float __uint_as_float(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
template <typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel*, cudaFuncAttribute, int) {
  return cudaSuccess;
}
inline float __fmul_rn(float x, float y) {
  const volatile float product = x * y;  // is not fused with a sum
  return product;
}
inline float __fmaf_rn(float x, float y, float z) {
  return std::fma(x, y, z);
}
template <typename T>
void __stwb(T* to, T value) {
  *to = value;
}
template <typename T>
T __ldcg(const T* from) {
  return *from;
}
inline float __expf(float x) {
  return std::exp(x);
}
inline float __fdividef(float x, float y) {
  return x / y;
}
inline float rsqrtf(float x) {
  return 1.0f / std::sqrt(x);
}
