#pragma once

#include <cublasLt.h>

#include <compare>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "../hopper/matmul.h"
#include "handle.h"
#include "octet/ops/ops.h"
#include "scratch.h"

namespace octet::cuda {

/// Matrix products: by hopper::Products where those are faster, else by cuBLASLt, of which an algorithm is
/// chosen at the first use of a shape and kept: what the cache says, where there is one and it knows the
/// product on this device, or the library's first proposal. Biases and GELUs are the library's epilogues;
/// where it has no algorithm with one, or timing finds that slower, kernels after the product.
class MatmulPlans {
 public:
  /// `device`: its name, part of what the cache's choices hold for.
  MatmulPlans(Scratch& scratch, const std::string& device, int architecture, const CudaOpsOptions& options);

  /// Bytes of scratch that the algorithms may use.
  std::int64_t workspace_bytes() const { return workspace_; }
  /// And that a product of so many rows and columns takes for Matmul::bias_gradient.
  static std::int64_t column_sums_scratch(std::int64_t tokens, std::int64_t cols);
  void run(cudaStream_t stream, const Matmul& args);
  /// See Ops::time_products. Timing may choose differently from run to run, so results may then differ in the
  /// last bits; a choice that the cache knows is never timed again.
  void time_products(cudaStream_t stream);

 private:
  /// What an algorithm is chosen for. All of it also goes into text_of.
  struct Key {
    cublasLtEpilogue_t epilogue;  ///< first: plain products come before those that end in more
    std::int64_t m, n, k;
    bool transpose_a, transpose_b, accumulate;
    DType a, b, result;
    ScaleCut a_cut, b_cut;                      ///< of 8-bit operands
    int alignment_a, alignment_b, alignment_y;  ///< bytes, at most 256
    int alignment_inner;                        ///< likewise; 0 without it

    auto operator<=>(const Key&) const = default;
  };
  struct Plan {
    Handle<cublasLtMatmulDesc_t, cublasLtMatmulDescDestroy> operation;
    Handle<cublasLtMatrixLayout_t, cublasLtMatrixLayoutDestroy> a, b, y;
    cublasLtMatmulAlgo_t algorithm;
    bool fused = true;        ///< false: run_apart()
    bool remembered = false;  ///< the algorithm is the cache's
    Matmul first_use;
  };

  /// Whether the own kernel is the faster one.
  bool prefers_own(const Matmul& args) const;
  /// By cuBLASLt, without Matmul::bias_gradient.
  void run_library(cudaStream_t stream, const Matmul& args);
  static Key key_of(const Matmul& args, cublasLtEpilogue_t epilogue);
  Plan make_plan(const Key& key, const Matmul& args) const;
  /// Addresses that are part of the description of an operation, not arguments of its launch.
  void set_pointers(const Key& key, const Plan& plan, const Matmul& args) const;
  /// The product without epilogue, and kernels for all else but Matmul::bias_gradient.
  void run_apart(cudaStream_t stream, const Matmul& args);
  /// Proposals for the product that a plan describes, best first, with at most so much workspace.
  std::vector<cublasLtMatmulAlgo_t> proposals(const Key& key, const Plan& plan, int most,
                                              std::int64_t workspace) const;
  /// The name of a product in the cache.
  std::string text_of(const Key& key) const;
  /// Takes the algorithm that the cache has, if any; forgets it there where the library refuses it.
  void recall(const Key& key, Plan& plan) const;
  void choose_fastest(cudaStream_t stream, const Key& key, Plan& plan);
  cublasStatus_t launch(cudaStream_t stream, const Plan& plan, const Matmul& args);

  Scratch* scratch_;
  std::int64_t workspace_;
  PlanCache* cache_;
  std::string context_;  ///< device and library, as the cache's keys begin
  Handle<cublasLtHandle_t, cublasLtDestroy> handle_;
  std::unique_ptr<hopper::Products> own_;  ///< null: not wanted, or another kind of GPU
  bool always_own_ = false;
  std::map<Key, Plan> plans_;
};

}  // namespace octet::cuda
