#pragma once

#include "octet/ops/ops.h"

namespace octet {

/// Assert what ops.h asks of 8-bit operands.
void check_float8(const Matmul& args);
void check_float8(const Quantize& args);
/// Of a `largest` that is raised to an output's largest magnitude, or empty.
void check_largest(const Tensor& output, const Tensor& largest);
void check_history(const Tensor& seen, const Tensor& history, const Tensor& largest);

}  // namespace octet
