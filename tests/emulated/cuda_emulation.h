// Enough of CUDA's device language to run octet's kernels on the CPU, where continuous integration has no
// GPU: included ahead of a .cu file that launches.pl rewrote. Threads of a block are fibers that take turns
// at barriers and warp exchanges; blocks run one after another. Results are those of the kernels' arithmetic
// and indexing; speed, races and memory ordering are not shown.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>

#undef __global__
#undef __device__
#undef __host__
#undef __shared__
#undef __launch_bounds__
#define __global__ static
#define __device__
#define __host__
#define __shared__ static
#define __launch_bounds__(...)

namespace emulation {

/// The thread that runs now, and the launch that it belongs to.
struct Here {
  dim3 thread, block, threads, blocks;
  int lane = 0;
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

class Launch {
 public:
  Launch(dim3 blocks, dim3 threads, std::size_t shared, cudaStream_t)
      : blocks_(blocks), threads_(threads), shared_(shared) {}
  /// kernel(arguments…) is one thread's work.
  template <typename Kernel>
  auto with(Kernel kernel) {
    return [*this, kernel](auto... arguments) { run([&] { kernel(arguments...); }); };
  }

 private:
  void run(const std::function<void()>& thread) const;

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

#define threadIdx (::emulation::here.thread)
#define blockIdx (::emulation::here.block)
#define blockDim (::emulation::here.threads)
#define gridDim (::emulation::here.blocks)

using std::isfinite;
using std::isnan;
using std::max;
using std::min;

inline void __syncthreads() {
  emulation::block_barrier();
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
inline float __expf(float x) {
  return std::exp(x);
}
inline float __fdividef(float x, float y) {
  return x / y;
}
inline float rsqrtf(float x) {
  return 1.0f / std::sqrt(x);
}
