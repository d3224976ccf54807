#pragma once

#include <map>
#include <optional>
#include <vector>

#include "cudnn_attention_graphs.h"
#include "octet/ops/ops.h"
#include "scratch.h"

namespace octet::cuda {

/// Causal attention in bfloat16 by cuDNN's fused kernels (softmax never leaves the chip, as in
/// FlashAttention, Dao et al. 2022), on heads where they lie. The backward pass sums query gradients with
/// atomic additions in no fixed order, unless `deterministic`, which takes 2·batch·heads·sequence·keys bytes
/// of workspace. Blocks of later keys are passed over, but not in backward passes with more keys than
/// queries; blocks of other documents are computed and hidden. The first call with new sizes or strides
/// builds plans, which takes a second or so.
class CudnnAttention {
 public:
  CudnnAttention(Scratch& scratch, bool deterministic);

  /// Builds the plans of a shape whose heads lie in packed rows, and returns their scratch bytes, which
  /// depend little on where heads lie; 0 where cuDNN has no kernel.
  std::int64_t workspace_bytes(const AttentionShape& shape, bool documents);

  /// Both return false, with nothing done, where cuDNN has no kernel.
  bool forward(cudaStream_t stream, const AttentionShape& shape, const AttentionOperands& operands,
               SampleRows out, Tensor statistics);
  bool backward(cudaStream_t stream, const AttentionShape& shape, const AttentionOperands& operands,
                SampleRows out, Tensor statistics, SampleRows dout, SampleRows dquery, SampleRows dkey,
                SampleRows dvalue);

 private:
  /// Query heads [query, query + queries) that share key heads [key, key + keys) evenly.
  struct HeadGroup {
    int query, queries, key, keys;
  };
  /// The gradients of a backward pass; none for a forward pass.
  struct Gradients {
    SampleRows dout, dquery, dkey, dvalue;
  };
  /// One call of cuDNN.
  struct Part {
    HeadGroup heads;
    AttentionPlanKey key;
  };
  using Plans = std::map<AttentionPlanKey, std::optional<CudnnPlan>>;

  static std::vector<HeadGroup> groups_of(const HeadLayout& layout);
  static std::vector<Part> parts_of(const AttentionShape& shape, bool documents,
                                    const AttentionOperands& operands, const SampleRows& out,
                                    const Gradients& gradients);
  const std::optional<CudnnPlan>& forward_plan(const AttentionPlanKey& key);
  const std::optional<CudnnPlan>& backward_plan(const AttentionPlanKey& key);
  /// Scratch bytes, or nothing where there are no plans.
  std::optional<std::int64_t> forward_bytes(const std::vector<Part>& parts);
  std::optional<std::int64_t> backward_bytes(const std::vector<Part>& parts);
  std::int64_t query_sums_bytes(const AttentionPlanKey& key) const;

  Scratch* scratch_;
  bool deterministic_;
  Handle<cudnnHandle_t, cudnnDestroy> handle_;
  Plans forward_plans_, backward_plans_;
};

}  // namespace octet::cuda
