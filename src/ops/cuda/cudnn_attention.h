#pragma once

#include <compare>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "cudnn_graph.h"
#include "octet/ops/ops.h"
#include "scratch.h"

namespace octet::cuda {

/// Causal attention in bfloat16 by cuDNN's fused kernels (softmax never leaves the chip, as in
/// FlashAttention, Dao et al. 2022), on heads as they lie in packed rows. The backward pass sums query
/// gradients with atomic additions in no fixed order, unless `deterministic`, which takes
/// 2·batch·heads·sequence² bytes of workspace.
class CudnnAttention {
 public:
  CudnnAttention(Scratch& scratch, bool deterministic);

  /// Builds the plans of a shape, which takes a second or so, unless that is done. False where cuDNN has no
  /// kernel for it.
  bool supports(const AttentionShape& shape);
  /// Scratch bytes of a supported shape.
  std::int64_t workspace_bytes(const AttentionShape& shape);

  void forward(cudaStream_t stream, const AttentionShape& shape, Tensor qkv, Tensor out, Tensor statistics);
  void backward(cudaStream_t stream, const AttentionShape& shape, Tensor qkv, Tensor out, Tensor statistics,
                Tensor dout, Tensor dqkv);

 private:
  /// Query heads [query, query + queries) that share key heads [key, key + keys) evenly: one call.
  struct HeadGroup {
    int query, queries, key, keys;
  };
  struct Key {
    std::int64_t batch, sequence, packed;
    int heads, queries, keys, head_size;

    auto operator<=>(const Key&) const = default;
  };
  struct Plans {
    CudnnPlan forward, backward;
  };

  static std::vector<HeadGroup> groups_of(const HeadLayout& layout);
  static Key key_of(const AttentionShape& shape, const HeadGroup& group);
  std::int64_t backward_bytes(const Key& key, const Plans& plans) const;
  const std::optional<Plans>& plans_for(const Key& key);
  CudnnPlan build_forward(const Key& key);
  CudnnPlan build_backward(const Key& key);

  Scratch* scratch_;
  bool deterministic_;
  Handle<cudnnHandle_t, cudnnDestroy> handle_;
  std::map<Key, std::optional<Plans>> plans_;
};

}  // namespace octet::cuda
