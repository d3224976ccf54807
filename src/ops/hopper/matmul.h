#pragma once

#include <cuda_runtime.h>

#include "hopper_gpu.h"
#include "octet/ops/ops.h"

namespace octet::hopper {

/// Matrix products by own kernels for GPUs of compute capability 9.0: bfloat16 operands, float32 sums,
/// results in bfloat16 or, of weight gradients, float32. For large products they are faster than cuBLASLt's
/// under a power limit, and their epilogues cost less than passes of their own, since the next tile's
/// operands arrive meanwhile. Every sum is one accumulator's, in order of k, and the same in every run.
class Products {
 public:
  /// Of the current device. On GPUs of another kind takes() is always false.
  Products();

  /// As in tiling.h.
  bool takes(const Matmul& args) const;
  double efficiency(const Matmul& args) const;
  /// Takes args of takes() alone. All on one stream. column_sums: float32 [column_sum_rows(), columns of y],
  /// which together add up to the sums over rows of y, as it was rounded; null: not wanted. With
  /// Epilogue::kGeluGradient alone.
  void run(cudaStream_t stream, const Matmul& args, float* column_sums = nullptr);

 private:
  int clusters_ = 0;           ///< of two blocks, that run at once
  WorkCounter taken_;          ///< tiles
  unsigned taken_before_ = 0;  ///< by all kernels that were launched
};

}  // namespace octet::hopper
