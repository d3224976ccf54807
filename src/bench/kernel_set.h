#pragma once

#include <functional>
#include <vector>

#include "local_sizes.h"
#include "octet/bench/operands.h"

namespace octet {

/// What an operator writes, and the type whose rounding it may show: statistics of rounded numbers are
/// float32, but no more exact than these.
struct KernelResult {
  Tensor tensor;
  DType accuracy = DType::kF32;
};

/// One operator that memory bandwidth bounds, with its operands.
struct Kernel {
  const char* name;
  double bytes;  ///< that must move: every operand read and every result written once
  std::function<void()> run;
  std::vector<KernelResult> results;
  const StepScalars* scalars = nullptr;  ///< loss, tokens and gradient_square are results too
};

/// Rows and elements that kernels work on.
struct KernelCounts {
  std::int64_t tokens = 0, norm_tokens = 0, logits_rows = 0, table_rows = 0;
  std::int64_t elements = 0;  ///< of flat buffers: optimizer, casts, sums of squares
};

/// The model's kernels on these counts. What they are given lies in `memory` and is equal for equal seeds, so
/// that two backends can be compared; `compute` is the type of activations and parameters.
std::vector<Kernel> make_kernels(Ops& ops, Operands& memory, const LocalSizes& sizes,
                                 const KernelCounts& counts, DType compute);

/// The results of a kernel as the last run left them, one vector a result.
std::vector<std::vector<float>> results_of(Operands& memory, const Kernel& kernel);

}  // namespace octet
