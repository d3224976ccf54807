#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include <cstdint>

/// Instructions of sm_90a that CUDA C++ has no names for (PTX ISA 8.0): barriers in shared memory, tiles
/// copied by the tensor memory accelerator, and products by warpgroups of 128 threads. Addresses are those of
/// the shared window.
namespace octet::hopper {

__device__ inline std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

/// threadIdx.x, so that what follows from it is not computed ahead, where registers are scarce.
__device__ inline int thread_read_here() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

__device__ inline std::uint32_t rank_in_cluster() {
  std::uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ inline void cluster_synchronize() {
  asm volatile("barrier.cluster.arrive;\n barrier.cluster.wait;" ::: "memory");
}

/// The registers of each thread of a warpgroup, from now on: given back to the block, or taken from it.
template <int kRegisters>
__device__ inline void lower_registers_to() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ inline void raise_registers_to() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

/// Off by at most 2^-11 of the result.
__device__ inline float approximate_tanh(float x) {
  float tangent;
  asm("tanh.approx.f32 %0, %1;" : "=f"(tangent) : "f"(x));
  return tangent;
}

/// 2^x within 2 units in the last place; 0 below 2^-126.
__device__ inline float approximate_exp2(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
}

/// Waits for `threads` threads that name the same barrier, 1 to 15.
__device__ inline void named_barrier(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

__device__ inline void barrier_init(std::uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

/// Makes initialised barriers known to the cluster, whose next synchronisation must follow.
__device__ inline void barriers_ready() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

/// Arrives, and has the phase last until so many bytes were copied.
__device__ inline void arrive_expecting(std::uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

__device__ inline void arrive(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/// Arrives at the barrier that has this address in block `rank` of the cluster.
__device__ inline void arrive_in_cluster(std::uint32_t barrier, int rank) {
  asm volatile(
      "{\n .reg .b32 there;\n"
      " mapa.shared::cluster.u32 there, %0, %1;\n"
      " mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(barrier),
      "r"(rank)
      : "memory");
}

/// Stores a word in block `rank` of the cluster, and arrives there by its four bytes.
__device__ inline void send(std::uint32_t to, std::uint32_t barrier, int rank, int value) {
  asm volatile(
      "{\n .reg .b32 there, arrival;\n"
      " mapa.shared::cluster.u32 there, %0, %2;\n"
      " mapa.shared::cluster.u32 arrival, %1, %2;\n"
      " st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [there], %3, [arrival];\n}" ::"r"(to),
      "r"(barrier), "r"(rank), "r"(value)
      : "memory");
}

__device__ inline void store_word(std::uint32_t to, int value) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(value) : "memory");
}
__device__ inline int load_word(std::uint32_t from) {
  int value;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(from) : "memory");
  return value;
}
/// From an address that is a multiple of 16.
__device__ inline uint4 load_words(std::uint32_t from) {
  uint4 four;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(four.x), "=r"(four.y), "=r"(four.z), "=r"(four.w)
               : "r"(from)
               : "memory");
  return four;
}

/// Waits for the phase of this parity to end, asleep for milliseconds if need be: who asks again and again
/// takes turns from warps that compute.
__device__ inline void wait(std::uint32_t barrier, int parity) {
  asm volatile(
      "{\n .reg .pred done;\n"
      "again:\n mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1, %2;\n"
      " @!done bra again;\n}" ::"r"(barrier),
      "r"(parity), "r"(10000000)
      : "memory");
}

/// Copies the map's box at (x, y), or (x, y, z), to shared memory, and arrives there by its bytes.
__device__ inline void load(std::uint32_t to, const CUtensorMap& map, std::uint32_t barrier, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], "
      "[%2];" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(x), "r"(y)
      : "memory");
}
__device__ inline void load(std::uint32_t to, const CUtensorMap& map, std::uint32_t barrier, int x, int y,
                            int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], "
      "[%2];" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z)
      : "memory");
}
/// Copies so many bytes, a multiple of 16, from global to shared memory, and arrives there by them.
__device__ inline void load_bytes(std::uint32_t to, const void* from, int bytes, std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
      "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(barrier)
      : "memory");
}
/// The same to these addresses in both blocks of a cluster of two.
__device__ inline void load_for_both(std::uint32_t to, const CUtensorMap& map, std::uint32_t barrier, int x,
                                     int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%4, %5}], [%2], %3;" ::"r"(to),
      "l"(&map), "r"(barrier), "h"(std::uint16_t{3}), "r"(x), "r"(y)
      : "memory");
}
__device__ inline void load_for_both(std::uint32_t to, const CUtensorMap& map, std::uint32_t barrier, int x,
                                     int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%4, %5, %6}], [%2], %3;" ::"r"(to),
      "l"(&map), "r"(barrier), "h"(std::uint16_t{3}), "r"(x), "r"(y), "r"(z)
      : "memory");
}

/// Brings the map's box at (x, y) to the L2 cache.
__device__ inline void prefetch(const CUtensorMap& map, int x, int y) {
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];" ::"l"(&map), "r"(x), "r"(y)
               : "memory");
}

/// Makes this thread's stores to shared memory visible to the copies that follow a barrier.
__device__ inline void stores_before_copies() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
/// Copies a box from shared memory to (x, y), or (x, y, z), as one group of this thread's. What lies beyond
/// the matrix is left out.
__device__ inline void store(const CUtensorMap& map, std::uint32_t from, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];\n"
      "cp.async.bulk.commit_group;" ::"l"(&map),
      "r"(from), "r"(x), "r"(y)
      : "memory");
}
__device__ inline void store(const CUtensorMap& map, std::uint32_t from, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];\n"
      "cp.async.bulk.commit_group;" ::"l"(&map),
      "r"(from), "r"(x), "r"(y), "r"(z)
      : "memory");
}
/// Adds the box to what the matrix holds.
__device__ inline void add(const CUtensorMap& map, std::uint32_t from, int x, int y) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.bulk_group [%0, {%2, %3}], [%1];\n"
      "cp.async.bulk.commit_group;" ::"l"(&map),
      "r"(from), "r"(x), "r"(y)
      : "memory");
}
/// Copies float32 numbers from shared to consecutive global memory, or adds them there, as one group.
__device__ inline void store_floats_at(float* to, std::uint32_t from, int bytes) {
  asm volatile(
      "cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n"
      "cp.async.bulk.commit_group;" ::"l"(__cvta_generic_to_global(to)),
      "r"(from), "r"(bytes)
      : "memory");
}
__device__ inline void add_floats_at(float* to, std::uint32_t from, int bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;\n"
      "cp.async.bulk.commit_group;" ::"l"(__cvta_generic_to_global(to)),
      "r"(from), "r"(bytes)
      : "memory");
}
/// Until all groups of this thread but the last kGroups have read shared memory.
template <int kGroups>
__device__ inline void wait_for_reads() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kGroups) : "memory");
}
__device__ inline void wait_for_stores() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

/// Four matrices of 8 x 8 bfloat16, each lane giving the address of a row of 16 bytes.
__device__ inline void store_matrices(std::uint32_t row, const std::uint32_t (&parts)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(parts[0]),
               "r"(parts[1]), "r"(parts[2]), "r"(parts[3])
               : "memory");
}
/// d += a [16, 16] · b [16, 8] by a warp, bfloat16 with float32 sums. A lane holds in d[2·h + i] row 8·h +
/// lane / 4 and column 2·(lane % 4) + i; in a[2·c + h] columns 8·c + 2·(lane % 4) and the next of row 8·h +
/// lane / 4; in b0 rows 2·(lane % 4) and the next of column lane / 4, and in b1 those 8 rows below.
__device__ inline void warp_product(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                    std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ inline void store_floats(std::uint32_t to, float a, float b) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(a), "f"(b) : "memory");
}

__device__ inline void store_floats(std::uint32_t to, float a, float b, float c, float d) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(a), "f"(b), "f"(c), "f"(d)
               : "memory");
}
__device__ inline float2 load_two_floats(std::uint32_t from) {
  float2 two;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(two.x), "=f"(two.y) : "r"(from) : "memory");
  return two;
}
__device__ inline float4 load_floats(std::uint32_t from) {
  float4 four;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(four.x), "=f"(four.y), "=f"(four.z), "=f"(four.w)
               : "r"(from)
               : "memory");
  return four;
}

/// 16 bytes of global memory in one access, which the compiler may otherwise split.
__device__ inline uint4 load_global(const void* from) {
  uint4 four;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(four.x), "=r"(four.y), "=r"(four.z), "=r"(four.w)
               : "l"(__cvta_generic_to_global(from)));
  return four;
}
__device__ inline void store_global(void* to, const uint4& four) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)), "r"(four.x),
               "r"(four.y), "r"(four.z), "r"(four.w)
               : "memory");
}

/// Waits until a counter in global memory, which others count_on(), has come to `value`; what they and their
/// copies wrote before is then visible, to copies of this thread as well.
__device__ inline void wait_for_count(const unsigned* counter, unsigned value) {
  unsigned now;
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
  } while (static_cast<int>(now - value) < 0);
  asm volatile("fence.proxy.async.global;" ::: "memory");
}
/// Adds one, after all that this thread wrote, and copied and waited for.
__device__ inline void count_on(unsigned* counter) {
  asm volatile("fence.proxy.async.global;\n red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter)
               : "memory");
}

/// Describes an operand of warpgroup_product in shared memory, in the swizzle of 128 bytes. As it lies in
/// matrices stored with the sum's index k innermost: rows of 64 k. Otherwise, k by k, rows of 64 elements
/// along m or n, the 64 k of the next 64 elements being 8192 bytes further. Eight rows are 1024 bytes in
/// both.
__device__ inline std::uint64_t operand_at(std::uint32_t address) {
  return static_cast<std::uint64_t>((address & 0x3ffff) >> 4) | std::uint64_t{8192 >> 4} << 16 |
         std::uint64_t{1024 >> 4} << 32 | std::uint64_t{1} << 62;
}

/// Bytes from one 16 of k to the next, in the units of descriptors: across a row, or down the rows.
constexpr int kAcross = 32 / 16, kDown = 16 * 128 / 16;

/// Before the first product of a series, and after registers that it takes were touched.
__device__ inline void products_begin() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ inline void products_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/// Until all committed series but the last kSeries are done.
template <int kSeries>
__device__ inline void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kSeries) : "memory");
}

}  // namespace octet::hopper
