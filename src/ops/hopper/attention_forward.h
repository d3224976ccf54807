#pragma once

#include <cuda_runtime.h>

#include "hopper_gpu.h"
#include "octet/ops/ops.h"

namespace octet::hopper {

/// Causal attention by own kernels for GPUs of compute capability 9.0: heads of 64 or 128 bfloat16 elements,
/// float32 sums, no documents apart. The same bits in every run. Faster than cuDNN 9.19 in all shapes that
/// were measured on an H200.
class AttentionForward {
 public:
  /// Of the current device. On GPUs of another kind takes() is always false.
  AttentionForward();

  /// Whether query heads are shared evenly over the key heads that they attend with, and numbers fit kernels.
  bool takes(const AttentionShape& shape) const;
  /// The same, and whether rows begin at multiples of 16 bytes, as the copy engine wants it.
  bool takes(const AttentionShape& shape, const AttentionOperands& operands, const SampleRows& out) const;
  /// Takes what takes() says. statistics: as Ops::attention_forward writes them. All on one stream.
  void run(cudaStream_t stream, const AttentionShape& shape, const AttentionOperands& operands,
           const SampleRows& out, Tensor statistics);

 private:
  int multiprocessors_;        ///< 0 on other GPUs
  WorkCounter taken_;          ///< tiles
  unsigned taken_before_ = 0;  ///< by all kernels that were launched
};

}  // namespace octet::hopper
