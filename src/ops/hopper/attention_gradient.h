#pragma once

#include <cuda_runtime.h>

#include "octet/ops/ops.h"

namespace octet::hopper {

/// The gradient of causal attention by own kernels for GPUs of compute capability 9.0: heads of 64 or 128
/// bfloat16 elements, float32 sums, no documents apart. The same bits in every run. Where sequences are short
/// it beats cuDNN's by far, which adds query gradients to zeroed memory and converts them by kernels of their
/// own.
class AttentionGradients {
 public:
  /// Of the current device. On GPUs of another kind takes() is always false.
  AttentionGradients();

  /// Whether rows begin at multiples of 16 bytes, as the copy engine wants it, and query heads are shared
  /// evenly over all key heads.
  bool takes(const AttentionShape& shape, const AttentionOperands& operands, const SampleRows& out,
             const SampleRows& dout, const SampleRows& dquery, const SampleRows& dkey,
             const SampleRows& dvalue) const;
  /// Than cuDNN's, as measured on an H200.
  static bool is_faster(const AttentionShape& shape) { return shape.layout.head_size == 64; }
  /// 0 where no rows of this shape are taken.
  std::int64_t scratch_bytes(const AttentionShape& shape) const;
  /// Takes what takes() says. scratch: scratch_bytes(shape), at a multiple of 256.
  void run(cudaStream_t stream, const AttentionShape& shape, const AttentionOperands& operands,
           const SampleRows& out, Tensor statistics, const SampleRows& dout, const SampleRows& dquery,
           const SampleRows& dkey, const SampleRows& dvalue, void* scratch) const;

 private:
  int multiprocessors_ = 0;  ///< 0 on other GPUs
};

}  // namespace octet::hopper
