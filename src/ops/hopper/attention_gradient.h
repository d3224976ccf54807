#pragma once

#include <cuda_runtime.h>

#include "octet/ops/ops.h"

namespace octet::hopper {

/// The gradient of causal attention by own kernels for GPUs of compute capability 9.0: heads of 64 or 128
/// bfloat16 elements, float32 sums, no documents apart. The same bits in every run, and no memory that grows
/// with the square of the sequence.
class AttentionGradients {
 public:
  /// Of the current device. On GPUs of another kind takes() is always false.
  AttentionGradients();

  /// Whether query heads are shared evenly over all key heads, and numbers fit kernels.
  bool takes(const AttentionShape& shape) const;
  /// The same, and whether rows begin at multiples of 16 bytes, as the copy engine wants it.
  bool takes(const AttentionShape& shape, const AttentionOperands& operands, const SampleRows& out,
             const SampleRows& dout, const SampleRows& dquery, const SampleRows& dkey,
             const SampleRows& dvalue) const;
  /// Of a shape that is taken.
  std::int64_t scratch_bytes(const AttentionShape& shape) const;
  /// Of all shapes with as many queries and no more keys, some of which take more than this one; 0 where none
  /// is taken.
  std::int64_t most_scratch_bytes(const AttentionShape& shape) const;
  /// Takes what takes() says. scratch: scratch_bytes(shape), at a multiple of 256.
  void run(cudaStream_t stream, const AttentionShape& shape, const AttentionOperands& operands,
           const SampleRows& out, Tensor statistics, const SampleRows& dout, const SampleRows& dquery,
           const SampleRows& dkey, const SampleRows& dvalue, void* scratch) const;

 private:
  int multiprocessors_;  ///< 0 on other GPUs
};

}  // namespace octet::hopper
