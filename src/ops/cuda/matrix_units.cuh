#pragma once

#include "kernel_tools.cuh"

// Warp-wide bfloat16 products of 16 x 8 x 16 (PTX ISA, mma.m16n8k16), which every GPU since the A100 has.
// With g = lane / 4 and t = lane % 4 a lane holds
//   of a [16, 16]: (g, 2t), (g + 8, 2t), (g, 2t + 8), (g + 8, 2t + 8), each with its right neighbour;
//   of b [16, 8]: (2t, g), (2t + 8, g), each with the one below;
//   of d [16, 8]: (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1).
namespace octet::cuda {

/// d += a·b.
__device__ inline void multiply_add(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, "
      "%2, %3};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// Four 8 x 8 matrices from shared memory: lane i gives the address of row i % 8 of matrix i / 8, and gets of
/// each the elements (g, 2t) and (g, 2t + 1).
__device__ inline void load_matrices(unsigned (&r)[4], const bf16* row) {
  const auto address = static_cast<unsigned>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

/// The same of transposed matrices: the elements (2t, g) and (2t + 1, g).
__device__ inline void load_transposed(unsigned (&r)[4], const bf16* row) {
  const auto address = static_cast<unsigned>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

}  // namespace octet::cuda
