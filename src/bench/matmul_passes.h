#pragma once

#include <vector>

#include "octet/bench/operands.h"
#include "octet/bench/session.h"

namespace octet {

/// y[rows, out] = x[rows, in]·w[out, in]ᵀ.
struct Linear {
  const char* name;
  std::int64_t rows, out, in;
  bool before_gelu = false, behind_gelu = false;
};

/// One of the products of a linear layer, with its operands.
struct MatmulPass {
  const char* name;
  Matmul args;
  double start = 0.0;  ///< what y holds everywhere before

  /// Length of the sums.
  std::int64_t inner() const { return args.transpose_a ? args.a.rows : args.a.cols; }
};

/// Forward, input gradient, weight gradient, as training calls them.
std::vector<MatmulPass> make_passes(Operands& memory, const Linear& linear, DType compute);
/// Those of them that can end in a GELU, behind a bias, or in its gradient, in that form.
std::vector<MatmulPass> make_fused_passes(Operands& memory, const Linear& linear, DType compute);
/// The three of 8-bit copies: activations and weights E4M3, gradients E5M2, with one scale each; by block all
/// E4M3.
std::vector<MatmulPass> make_float8_passes(Ops& ops, Operands& memory, const Linear& linear, bool by_block);

/// After one run: whether elements of y, where some rows and columns cross, and of what else is written, are
/// what sums in float64 of what the operands hold make of them.
bool product_right(BenchSession& session, const MatmulPass& pass);

}  // namespace octet
