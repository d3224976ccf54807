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

__device__ inline int load_word(std::uint32_t from) {
  int value;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(from) : "memory");
  return value;
}

/// Waits for the phase of this parity to end.
__device__ inline void wait(std::uint32_t barrier, int parity) {
  asm volatile(
      "{\n .reg .pred done;\n"
      "again:\n mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      " @!done bra again;\n}" ::"r"(barrier),
      "r"(parity)
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

/// Makes this thread's stores to shared memory visible to the copies that follow a barrier.
__device__ inline void stores_before_copies() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
/// Copies a box from shared memory to (x, y), as one group of this thread's. What lies beyond the matrix is
/// left out.
__device__ inline void store(const CUtensorMap& map, std::uint32_t from, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];\n"
      "cp.async.bulk.commit_group;" ::"l"(&map),
      "r"(from), "r"(x), "r"(y)
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
__device__ inline void store_floats(std::uint32_t to, float a, float b) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(a), "f"(b) : "memory");
}

/// Describes an operand of warpgroup_product in shared memory, in the swizzle of 128 bytes. As it lies in
/// matrices stored with the sum's index k innermost: rows of 64 k. Otherwise, k by k, rows of 64 elements
/// along m or n, the 64 k of the next 64 elements being 8192 bytes further. Eight rows are 1024 bytes in
/// both.
__device__ inline std::uint64_t operand_at(std::uint32_t address) {
  return static_cast<std::uint64_t>((address & 0x3ffff) >> 4) | std::uint64_t{8192 >> 4} << 16 |
         std::uint64_t{1024 >> 4} << 32 | std::uint64_t{1} << 62;
}

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

/// d (+)= a [64, 16] · b [16, 256], bfloat16 in float32 sums, by a warpgroup. kTurnA, kTurnB: k is not the
/// innermost index of that operand. Thread t of warp w holds in d[4·j + 2·h + i] row 16·w + 8·h + t / 4 and
/// column 8·j + 2·(t % 4) + i.
template <bool kTurnA, bool kTurnB>
__device__ inline void warpgroup_product(float (&d)[128], std::uint64_t a, std::uint64_t b, int add) {
  asm volatile(
      "{\n .reg .pred more;\n setp.ne.b32 more, %130, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
      " %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31,"
      " %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47,"
      " %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63,"
      " %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79,"
      " %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95,"
      " %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111,"
      " %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "
      "%128, %129, more, 1, 1, %131, %132;\n}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]),
        "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]),
        "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]),
        "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]),
        "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]), "+f"(d[50]),
        "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]),
        "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]), "+f"(d[64]),
        "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]),
        "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]),
        "+f"(d[79]), "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]),
        "+f"(d[86]), "+f"(d[87]), "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]),
        "+f"(d[93]), "+f"(d[94]), "+f"(d[95]), "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]),
        "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]), "+f"(d[104]), "+f"(d[105]), "+f"(d[106]),
        "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111]), "+f"(d[112]), "+f"(d[113]),
        "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]), "+f"(d[120]),
        "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])
      : "l"(a), "l"(b), "r"(add), "n"(int{kTurnA}), "n"(int{kTurnB}));
}

}  // namespace octet::hopper
