#include "cudnn_attention_graphs.h"

namespace octet::cuda {
namespace {

using namespace attention_operand;

constexpr cudnnDataType_t kHalf = CUDNN_DATA_BFLOAT16, kFloat = CUDNN_DATA_FLOAT;

Extents swap_last(const Extents& x) {
  return {x[0], x[1], x[3], x[2]};
}

// Of [batch, heads, rows, head size], heads lying side by side in a row.
Extents strides(const RowStrides& rows, std::int64_t head_size) {
  return {rows.sample, head_size, rows.row, 1};
}

// The position among the keys of the key row that belongs to each query row.
CudnnGraph::Tensor own_positions(CudnnGraph& graph, CudnnGraph::Tensor scores, const AttentionPlanKey& key,
                                 const Extents& extents) {
  CudnnGraph::Tensor rows = graph.value(CUDNN_DATA_INT32, extents);
  graph.index(2, scores, rows);
  if (key.keys == key.sequence) return rows;
  CudnnGraph::Tensor moved = graph.value(CUDNN_DATA_INT32, extents);
  graph.add_integers(rows, graph.scalar(kKeysBefore, CUDNN_DATA_INT32), moved);
  return moved;
}

// The scores of later keys become kHiddenScore. cuDNN knows this pattern, indices of the very scores that are
// selected from, and passes over blocks of later keys.
CudnnGraph::Tensor causal(CudnnGraph& graph, CudnnGraph::Tensor scores, CudnnGraph::Tensor hidden,
                          const AttentionPlanKey& key, const Extents& extents) {
  CudnnGraph::Tensor positions = own_positions(graph, scores, key, extents);
  CudnnGraph::Tensor cols = graph.value(CUDNN_DATA_INT32, extents);
  graph.index(3, scores, cols);
  CudnnGraph::Tensor seen = graph.value(CUDNN_DATA_BOOLEAN, extents), result = graph.value(kFloat, extents);
  graph.at_least(positions, cols, seen);
  graph.select(scores, hidden, seen, result);
  return result;
}

// The scores of keys whose document has ended become kHiddenScore. By a limit for every key, since on sm_80
// backward passes take no third vector of queries.
CudnnGraph::Tensor same_document(CudnnGraph& graph, CudnnGraph::Tensor scores, CudnnGraph::Tensor hidden,
                                 const AttentionPlanKey& key, const Extents& extents) {
  const std::int64_t stride = key_limit_stride(key.keys);
  CudnnGraph::Tensor limits =
      graph.operand(kKeyLimits, CUDNN_DATA_INT32, {key.batch, 1, 1, key.keys}, {stride, stride, stride, 1});
  CudnnGraph::Tensor positions = own_positions(graph, scores, key, extents);
  CudnnGraph::Tensor seen = graph.value(CUDNN_DATA_BOOLEAN, extents), result = graph.value(kFloat, extents);
  graph.less(positions, limits, seen);
  graph.select(scores, hidden, seen, result);
  return result;
}

CudnnGraph::Tensor only_visible(CudnnGraph& graph, CudnnGraph::Tensor scores, const AttentionPlanKey& key) {
  const Extents extents{key.batch, key.query_heads, key.sequence, key.keys};
  CudnnGraph::Tensor hidden = graph.scalar(kHidden);
  if (!key.documents) return causal(graph, scores, hidden, key, extents);
  return causal(graph, same_document(graph, scores, hidden, key, extents), hidden, key, extents);
}

}  // namespace

// Operands: q, k, v, out, statistics, scale. S = scale·Q·Kᵀ, masked; statistics = log Σ exp S; out =
// softmax(S)·V.
CudnnPlan build_attention_forward(cudnnHandle_t handle, const AttentionPlanKey& key) {
  const std::int64_t b = key.batch, s = key.sequence, t = key.keys, d = key.head_size;
  const std::int64_t hq = key.query_heads, hk = key.key_heads;
  const Extents scores_extents{b, hq, s, t}, row{b, hq, s, 1};
  CudnnGraph graph;
  CudnnGraph::Tensor q = graph.operand(kQuery, kHalf, {b, hq, s, d}, strides(key.query, d));
  CudnnGraph::Tensor k_transposed = graph.operand(kKey, kHalf, {b, hk, d, t}, swap_last(strides(key.key, d)));
  CudnnGraph::Tensor v = graph.operand(kValue, kHalf, {b, hk, t, d}, strides(key.value, d));
  CudnnGraph::Tensor out = graph.operand(kOut, kHalf, {b, hq, s, d}, strides(key.out, d));
  CudnnGraph::Tensor statistics = graph.operand(kStatistics, kFloat, row, {key.heads * s, s, 1, 1});

  CudnnGraph::Tensor product = graph.value(kFloat, scores_extents),
                     scores = graph.value(kFloat, scores_extents);
  graph.matmul(q, k_transposed, product);
  graph.binary(CUDNN_POINTWISE_MUL, product, graph.scalar(kScale), scores);
  CudnnGraph::Tensor masked = only_visible(graph, scores, key);

  CudnnGraph::Tensor largest = graph.value(kFloat, row), shifted = graph.value(kFloat, scores_extents);
  graph.reduce(CUDNN_REDUCE_TENSOR_MAX, masked, largest);
  graph.binary(CUDNN_POINTWISE_SUB, masked, largest, shifted);
  CudnnGraph::Tensor exponentials = graph.value(kFloat, scores_extents), sum = graph.value(kFloat, row);
  graph.unary(CUDNN_POINTWISE_EXP, shifted, exponentials);
  graph.reduce(CUDNN_REDUCE_TENSOR_ADD, exponentials, sum);
  CudnnGraph::Tensor log_sum = graph.value(kFloat, row);
  graph.unary(CUDNN_POINTWISE_LOG, sum, log_sum);
  graph.binary(CUDNN_POINTWISE_ADD, largest, log_sum, statistics);
  CudnnGraph::Tensor probabilities = graph.value(kHalf, scores_extents);
  graph.binary(CUDNN_POINTWISE_DIV, exponentials, sum, probabilities);
  graph.matmul(probabilities, v, out);
  return graph.build(handle);
}

// P = exp(S - statistics); dV = Pᵀ·dO; dS = scale·P·(dO·Vᵀ - rowsum(dO·O)); dK = dSᵀ·Q; dQ = dS·K. Where
// query heads share a key head, dK and dV are formed for every query head and then summed.
CudnnPlan build_attention_backward(cudnnHandle_t handle, const AttentionPlanKey& key, bool deterministic) {
  const std::int64_t b = key.batch, s = key.sequence, t = key.keys, d = key.head_size;
  const std::int64_t hq = key.query_heads, hk = key.key_heads;
  const Extents scores_extents{b, hq, s, t}, row{b, hq, s, 1};
  const Extents query_extents{b, hq, s, d}, key_extents{b, hk, t, d}, every_key_extents{b, hq, t, d};
  const Extents transposed_extents{b, hq, t, s}, transposed_strides{hq * s * t, s * t, 1, t};
  CudnnGraph graph;
  CudnnGraph::Tensor q = graph.operand(kQuery, kHalf, query_extents, strides(key.query, d));
  CudnnGraph::Tensor k_transposed = graph.operand(kKey, kHalf, {b, hk, d, t}, swap_last(strides(key.key, d)));
  CudnnGraph::Tensor v_transposed =
      graph.operand(kValue, kHalf, {b, hk, d, t}, swap_last(strides(key.value, d)));
  CudnnGraph::Tensor out = graph.operand(kOut, kHalf, query_extents, strides(key.out, d));
  CudnnGraph::Tensor dout = graph.operand(kOutGradient, kHalf, query_extents, strides(key.dout, d));
  CudnnGraph::Tensor statistics = graph.operand(kStatistics, kFloat, row, {key.heads * s, s, 1, 1});
  CudnnGraph::Tensor dq = graph.operand(kQueryGradient, kHalf, query_extents, strides(key.dquery, d));
  CudnnGraph::Tensor dk = graph.operand(kKeyGradient, kHalf, key_extents, strides(key.dkey, d));
  CudnnGraph::Tensor dv = graph.operand(kValueGradient, kHalf, key_extents, strides(key.dvalue, d));
  CudnnGraph::Tensor row_sums = graph.operand(kRowSums, kFloat, row, {hq * s, s, 1, 1});
  CudnnGraph::Tensor scale = graph.scalar(kScale);

  CudnnGraph::Tensor dout_out = graph.value(kFloat, query_extents), unscaled_sums = graph.value(kFloat, row);
  graph.binary(CUDNN_POINTWISE_MUL, dout, out, dout_out);
  graph.reduce(CUDNN_REDUCE_TENSOR_ADD, dout_out, unscaled_sums);
  graph.binary(CUDNN_POINTWISE_MUL, unscaled_sums, graph.scalar(kOne), row_sums);

  CudnnGraph::Tensor product = graph.value(kFloat, scores_extents),
                     scores = graph.value(kFloat, scores_extents);
  graph.matmul(q, k_transposed, product);
  graph.binary(CUDNN_POINTWISE_MUL, product, scale, scores);
  CudnnGraph::Tensor shifted = graph.value(kFloat, scores_extents);
  graph.binary(CUDNN_POINTWISE_SUB, scores, statistics, shifted);
  CudnnGraph::Tensor masked = only_visible(graph, shifted, key),
                     probabilities = graph.value(kFloat, scores_extents);
  graph.unary(CUDNN_POINTWISE_EXP, masked, probabilities);

  // One key head's gradient from those of the query heads that use it.
  const auto into_keys = [&](CudnnGraph::Tensor a, CudnnGraph::Tensor rows, CudnnGraph::Tensor gradient) {
    if (hq == hk) {
      graph.matmul(a, rows, gradient);
      return;
    }
    CudnnGraph::Tensor every_head = graph.value(kHalf, every_key_extents);
    graph.matmul(a, rows, every_head);
    graph.reduce(CUDNN_REDUCE_TENSOR_ADD, every_head, gradient);
  };
  CudnnGraph::Tensor probabilities_transposed = graph.value(kHalf, transposed_extents, transposed_strides);
  graph.reshape(probabilities, probabilities_transposed);
  into_keys(probabilities_transposed, dout, dv);

  CudnnGraph::Tensor dprobabilities = graph.value(kFloat, scores_extents),
                     centred = graph.value(kFloat, scores_extents);
  graph.matmul(dout, v_transposed, dprobabilities);
  graph.binary(CUDNN_POINTWISE_SUB, dprobabilities, row_sums, centred);
  CudnnGraph::Tensor unscaled = graph.value(kFloat, scores_extents),
                     dscores = graph.value(kHalf, scores_extents);
  graph.binary(CUDNN_POINTWISE_MUL, centred, probabilities, unscaled);
  graph.binary(CUDNN_POINTWISE_MUL, unscaled, scale, dscores);

  CudnnGraph::Tensor dscores_transposed = graph.value(kHalf, transposed_extents, transposed_strides);
  graph.reshape(dscores, dscores_transposed);
  into_keys(dscores_transposed, q, dk);

  CudnnGraph::Tensor k = graph.value(kHalf, key_extents, strides(key.key, d));
  graph.reshape(k_transposed, k);
  if (deterministic) {
    graph.matmul(dscores, k, dq);
  } else {
    CudnnGraph::Tensor query_sums =
        graph.operand(kQuerySums, kFloat, query_extents, {hq * s * d, s * d, d, 1});
    graph.matmul(dscores, k, query_sums);
    graph.unary(CUDNN_POINTWISE_IDENTITY, query_sums, dq);
  }
  return graph.build(handle);
}

}  // namespace octet::cuda
