#pragma once

#include <compare>

#include "cudnn_graph.h"

namespace octet::cuda {

/// Distances, in elements, between the rows of a sample and between samples.
struct RowStrides {
  std::int64_t row = 0, sample = 0;

  auto operator<=>(const RowStrides&) const = default;
};

/// All that the plans of an attention depend on.
struct AttentionPlanKey {
  std::int64_t batch = 0, sequence = 0, keys = 0;
  int heads = 0;                       ///< rows of statistics a sample
  int query_heads = 0, key_heads = 0;  ///< of this call; the ones divide the others
  int head_size = 0;
  bool documents = false;
  RowStrides query, key, value, out;
  RowStrides dout, dquery, dkey, dvalue;  ///< zero for forward plans

  auto operator<=>(const AttentionPlanKey&) const = default;
};

/// Operands of the graphs.
namespace attention_operand {
enum Id : std::int64_t {
  kQuery = 1,
  kKey,
  kValue,
  kOut,
  kStatistics,
  kScale,
  kHidden,      ///< float32: the score of keys that are not seen
  kKeysBefore,  ///< int32: keys - sequence, where that is not 0
  kKeyLimits,   ///< int32 [batch, key_limit_stride(keys)], with documents
  // backward only
  kOutGradient,
  kQueryGradient,
  kKeyGradient,
  kValueGradient,
  kRowSums,    ///< float32 [batch, query_heads, sequence], work space
  kQuerySums,  ///< float32 [batch, query_heads, sequence, head_size], work space, unless deterministic
  kOne,        ///< float32
};
}

/// Elements between the limits of two samples: rows of 16 bytes.
constexpr std::int64_t key_limit_stride(std::int64_t keys) {
  return (keys + 3) / 4 * 4;
}

/// Throw Error(kDevice) where cuDNN has no kernel.
CudnnPlan build_attention_forward(cudnnHandle_t handle, const AttentionPlanKey& key);
CudnnPlan build_attention_backward(cudnnHandle_t handle, const AttentionPlanKey& key, bool deterministic);

}  // namespace octet::cuda
