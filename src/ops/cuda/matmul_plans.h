#pragma once

#include <cublasLt.h>

#include <compare>
#include <map>
#include <vector>

#include "handle.h"
#include "octet/ops/ops.h"
#include "scratch.h"

namespace octet::cuda {

/// Matrix products by cuBLASLt. An algorithm is chosen at the first use of a shape and kept: the library's
/// first proposal, or with `timed` the fastest of several proposals on the operands at hand (products that
/// accumulate are never timed). Timing may choose differently from run to run, so results may then differ in
/// the last bits.
class MatmulPlans {
 public:
  MatmulPlans(Scratch& scratch, int architecture, bool timed);

  /// Bytes of scratch that the algorithms may use.
  std::int64_t workspace_bytes() const { return workspace_; }
  void run(cudaStream_t stream, const Matmul& args);

 private:
  struct Key {
    std::int64_t m, n, k;
    bool transpose_a, transpose_b, accumulate, bias;
    DType a, b, result;
    ScaleCut a_cut, b_cut;                      ///< of 8-bit operands
    int alignment_a, alignment_b, alignment_y;  ///< bytes, at most 256

    auto operator<=>(const Key&) const = default;
  };
  struct Plan {
    Handle<cublasLtMatmulDesc_t, cublasLtMatmulDescDestroy> operation;
    Handle<cublasLtMatrixLayout_t, cublasLtMatrixLayoutDestroy> a, b, y;
    cublasLtMatmulAlgo_t algorithm;
    bool adds_bias = false;
  };

  static Key key_of(const Matmul& args, bool fuse_bias);
  Plan make_plan(cudaStream_t stream, const Key& key, const Matmul& args);
  /// Proposals for the product that a plan describes, best first.
  std::vector<cublasLtMatmulHeuristicResult_t> proposals(const Key& key, const Plan& plan) const;
  void choose_fastest(cudaStream_t stream, Plan& plan, const Matmul& args,
                      const std::vector<cublasLtMatmulHeuristicResult_t>& results);
  cublasStatus_t launch(cudaStream_t stream, const Plan& plan, const Matmul& args);

  Scratch* scratch_;
  std::int64_t workspace_;
  bool timed_;
  Handle<cublasLtHandle_t, cublasLtDestroy> handle_;
  std::map<Key, Plan> plans_;
};

}  // namespace octet::cuda
