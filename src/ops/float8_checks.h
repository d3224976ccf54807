#pragma once

#include "octet/ops/ops.h"

namespace octet {

/// Assert what ops.h asks of 8-bit operands.
void check_float8(const Matmul& args);
void check_float8(const Quantize& args);
void check_transpose(const Tensor& from, const Tensor& to);
/// Of a [rows, cols] output in 8 bits; `straight`, `transposed`: which copies there are to be.
void check_codes(const OutputCodes& output, std::int64_t rows, std::int64_t cols, DType type, bool straight,
                 bool transposed);
void check_codes(const NormForward& args);
void check_codes(const NormBackward& args);
void check_coded(const CodedActivation& args);
void check_coded(const CodedActivationBackward& args);
/// Of a `largest` that is raised to an output's largest magnitude, or empty.
void check_largest(const Tensor& output, const Tensor& largest);
void check_history(const Tensor& seen, const Tensor& history, const Tensor& largest);

}  // namespace octet
