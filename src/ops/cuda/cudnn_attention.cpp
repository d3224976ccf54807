#include "cudnn_attention.h"

#include <algorithm>
#include <cstdio>
#include <limits>

#include "../../runtime/cuda/cuda_check.h"
#include "octet/base/error.h"

namespace octet::cuda {
namespace {

constexpr cudnnDataType_t kHalf = CUDNN_DATA_BFLOAT16, kFloat = CUDNN_DATA_FLOAT;

// Operands of the graphs.
enum Id : std::int64_t {
  kQuery = 1,
  kKey,
  kValue,
  kOut,
  kStatistics,
  kScale,
  kMasked,
  kOutGradient,
  kQueryGradient,
  kKeyGradient,
  kValueGradient,
  kRowSums,
  kQuerySums,
  kOne,
};

constexpr float kMaskedScore = -std::numeric_limits<float>::infinity();
constexpr float kUnit = 1.0f;

Extents swap_last(const Extents& x) {
  return {x[0], x[1], x[3], x[2]};
}

// The scores of later keys become -inf.
CudnnGraph::Tensor causal(CudnnGraph& graph, CudnnGraph::Tensor scores, const Extents& square) {
  CudnnGraph::Tensor rows = graph.value(CUDNN_DATA_INT32, square),
                     cols = graph.value(CUDNN_DATA_INT32, square);
  graph.index(2, scores, rows);
  graph.index(3, scores, cols);
  CudnnGraph::Tensor mask = graph.value(CUDNN_DATA_BOOLEAN, square);
  graph.at_least(rows, cols, mask);
  CudnnGraph::Tensor masked = graph.value(kFloat, square);
  graph.select(scores, graph.scalar(kMasked), mask, masked);
  return masked;
}

const std::byte* at(const Tensor& tensor, std::int64_t element) {
  return static_cast<const std::byte*>(tensor.data) + element * size_of(tensor.dtype);
}

constexpr std::int64_t round_to_256(std::int64_t bytes) {
  return (bytes + 255) / 256 * 256;
}

// Zeroes key and value gradients of key heads [begin, end).
void zero_key_heads(cudaStream_t stream, const HeadLayout& layout, const Tensor& dqkv, int begin, int end) {
  if (begin == end) return;
  const std::int64_t size = size_of(dqkv.dtype);
  for (int part = 0; part < 2; ++part) {
    const std::int64_t first = std::int64_t{layout.heads + part * layout.kv_heads + begin} * layout.head_size;
    OCTET_CUDA(cudaMemset2DAsync(static_cast<std::byte*>(dqkv.data) + first * size,
                                 static_cast<std::size_t>(layout.packed() * size), 0,
                                 static_cast<std::size_t>((end - begin) * layout.head_size * size),
                                 static_cast<std::size_t>(dqkv.rows), stream));
  }
}

}  // namespace

CudnnAttention::CudnnAttention(Scratch& scratch, bool deterministic)
    : scratch_(&scratch), deterministic_(deterministic) {
  cudnnHandle_t handle = nullptr;
  check_cudnn(cudnnCreate(&handle), "cudnnCreate");
  handle_.reset(handle);
}

std::vector<CudnnAttention::HeadGroup> CudnnAttention::groups_of(const HeadLayout& layout) {
  const auto key_of_query = [&](int query) { return (query + layout.head_offset) / layout.group; };
  const int first = key_of_query(0), keys = key_of_query(layout.heads - 1) - first + 1;
  bool even = layout.heads % keys == 0;
  for (int query = 0; even && query < layout.heads; ++query) {
    even = key_of_query(query) - first == query / (layout.heads / keys);
  }
  if (even) return {{0, layout.heads, first, keys}};
  std::vector<HeadGroup> groups;
  for (int query = 0; query < layout.heads; ++query) {
    const int key = key_of_query(query);
    if (groups.empty() || groups.back().key != key) groups.push_back({query, 0, key, 1});
    ++groups.back().queries;
  }
  return groups;
}

CudnnAttention::Key CudnnAttention::key_of(const AttentionShape& shape, const HeadGroup& group) {
  return {shape.batch,   shape.sequence, shape.layout.packed(), shape.layout.heads,
          group.queries, group.keys,     shape.layout.head_size};
}

// Operands: q, k, v, out, statistics, scale. S = scale·Q·Kᵀ, masked; statistics = log Σ exp S; out =
// softmax(S)·V.
CudnnPlan CudnnAttention::build_forward(const Key& key) {
  const std::int64_t b = key.batch, s = key.sequence, d = key.head_size, r = key.packed;
  const std::int64_t hq = key.queries, hk = key.keys, out_row = key.heads * d;
  const Extents square{b, hq, s, s}, row{b, hq, s, 1}, packed{s * r, d, r, 1};
  CudnnGraph graph;
  CudnnGraph::Tensor q = graph.operand(kQuery, kHalf, {b, hq, s, d}, packed);
  CudnnGraph::Tensor k_transposed = graph.operand(kKey, kHalf, {b, hk, d, s}, swap_last(packed));
  CudnnGraph::Tensor v = graph.operand(kValue, kHalf, {b, hk, s, d}, packed);
  CudnnGraph::Tensor out = graph.operand(kOut, kHalf, {b, hq, s, d}, {s * out_row, d, out_row, 1});
  CudnnGraph::Tensor statistics = graph.operand(kStatistics, kFloat, row, {key.heads * s, s, 1, 1});

  CudnnGraph::Tensor product = graph.value(kFloat, square), scores = graph.value(kFloat, square);
  graph.matmul(q, k_transposed, product);
  graph.binary(CUDNN_POINTWISE_MUL, product, graph.scalar(kScale), scores);
  CudnnGraph::Tensor masked = causal(graph, scores, square);

  CudnnGraph::Tensor largest = graph.value(kFloat, row), shifted = graph.value(kFloat, square);
  graph.reduce(CUDNN_REDUCE_TENSOR_MAX, masked, largest);
  graph.binary(CUDNN_POINTWISE_SUB, masked, largest, shifted);
  CudnnGraph::Tensor exponentials = graph.value(kFloat, square), sum = graph.value(kFloat, row);
  graph.unary(CUDNN_POINTWISE_EXP, shifted, exponentials);
  graph.reduce(CUDNN_REDUCE_TENSOR_ADD, exponentials, sum);
  CudnnGraph::Tensor log_sum = graph.value(kFloat, row);
  graph.unary(CUDNN_POINTWISE_LOG, sum, log_sum);
  graph.binary(CUDNN_POINTWISE_ADD, largest, log_sum, statistics);
  CudnnGraph::Tensor probabilities = graph.value(kHalf, square);
  graph.binary(CUDNN_POINTWISE_DIV, exponentials, sum, probabilities);
  graph.matmul(probabilities, v, out);
  return graph.build(handle_.get());
}

// P = exp(S - statistics); dV = Pᵀ·dO; dS = scale·P·(dO·Vᵀ - rowsum(dO·O)); dK = dSᵀ·Q; dQ = dS·K. Where
// query heads share a key head, dK and dV are formed for every query head and then summed.
CudnnPlan CudnnAttention::build_backward(const Key& key) {
  const std::int64_t b = key.batch, s = key.sequence, d = key.head_size, r = key.packed;
  const std::int64_t hq = key.queries, hk = key.keys, out_row = key.heads * d;
  const Extents square{b, hq, s, s}, row{b, hq, s, 1}, packed{s * r, d, r, 1};
  const Extents query_extents{b, hq, s, d}, key_extents{b, hk, s, d}, out_strides{s * out_row, d, out_row, 1};
  const Extents square_transposed{hq * s * s, s * s, 1, s};
  CudnnGraph graph;
  CudnnGraph::Tensor q = graph.operand(kQuery, kHalf, query_extents, packed);
  CudnnGraph::Tensor k_transposed = graph.operand(kKey, kHalf, {b, hk, d, s}, swap_last(packed));
  CudnnGraph::Tensor v_transposed = graph.operand(kValue, kHalf, {b, hk, d, s}, swap_last(packed));
  CudnnGraph::Tensor out = graph.operand(kOut, kHalf, query_extents, out_strides);
  CudnnGraph::Tensor dout = graph.operand(kOutGradient, kHalf, query_extents, out_strides);
  CudnnGraph::Tensor statistics = graph.operand(kStatistics, kFloat, row, {key.heads * s, s, 1, 1});
  CudnnGraph::Tensor dq = graph.operand(kQueryGradient, kHalf, query_extents, packed);
  CudnnGraph::Tensor dk = graph.operand(kKeyGradient, kHalf, key_extents, packed);
  CudnnGraph::Tensor dv = graph.operand(kValueGradient, kHalf, key_extents, packed);
  CudnnGraph::Tensor row_sums = graph.operand(kRowSums, kFloat, row, {hq * s, s, 1, 1});
  CudnnGraph::Tensor scale = graph.scalar(kScale);

  CudnnGraph::Tensor dout_out = graph.value(kFloat, query_extents), unscaled_sums = graph.value(kFloat, row);
  graph.binary(CUDNN_POINTWISE_MUL, dout, out, dout_out);
  graph.reduce(CUDNN_REDUCE_TENSOR_ADD, dout_out, unscaled_sums);
  graph.binary(CUDNN_POINTWISE_MUL, unscaled_sums, graph.scalar(kOne), row_sums);

  CudnnGraph::Tensor product = graph.value(kFloat, square), scores = graph.value(kFloat, square);
  graph.matmul(q, k_transposed, product);
  graph.binary(CUDNN_POINTWISE_MUL, product, scale, scores);
  CudnnGraph::Tensor shifted = graph.value(kFloat, square);
  graph.binary(CUDNN_POINTWISE_SUB, scores, statistics, shifted);
  CudnnGraph::Tensor masked = causal(graph, shifted, square), probabilities = graph.value(kFloat, square);
  graph.unary(CUDNN_POINTWISE_EXP, masked, probabilities);

  // One key head's gradient from those of the query heads that use it.
  const auto into_keys = [&](CudnnGraph::Tensor a, CudnnGraph::Tensor rows, CudnnGraph::Tensor gradient) {
    if (hq == hk) {
      graph.matmul(a, rows, gradient);
      return;
    }
    CudnnGraph::Tensor every_head = graph.value(kHalf, query_extents);
    graph.matmul(a, rows, every_head);
    graph.reduce(CUDNN_REDUCE_TENSOR_ADD, every_head, gradient);
  };
  CudnnGraph::Tensor probabilities_transposed = graph.value(kHalf, square, square_transposed);
  graph.reshape(probabilities, probabilities_transposed);
  into_keys(probabilities_transposed, dout, dv);

  CudnnGraph::Tensor dprobabilities = graph.value(kFloat, square), centred = graph.value(kFloat, square);
  graph.matmul(dout, v_transposed, dprobabilities);
  graph.binary(CUDNN_POINTWISE_SUB, dprobabilities, row_sums, centred);
  CudnnGraph::Tensor unscaled = graph.value(kFloat, square), dscores = graph.value(kHalf, square);
  graph.binary(CUDNN_POINTWISE_MUL, centred, probabilities, unscaled);
  graph.binary(CUDNN_POINTWISE_MUL, unscaled, scale, dscores);

  CudnnGraph::Tensor dscores_transposed = graph.value(kHalf, square, square_transposed);
  graph.reshape(dscores, dscores_transposed);
  into_keys(dscores_transposed, q, dk);

  CudnnGraph::Tensor k = graph.value(kHalf, key_extents, packed);
  graph.reshape(k_transposed, k);
  if (deterministic_) {
    graph.matmul(dscores, k, dq);
  } else {
    CudnnGraph::Tensor query_sums =
        graph.operand(kQuerySums, kFloat, query_extents, {hq * s * d, s * d, d, 1});
    graph.matmul(dscores, k, query_sums);
    graph.unary(CUDNN_POINTWISE_IDENTITY, query_sums, dq);
  }
  return graph.build(handle_.get());
}

const std::optional<CudnnAttention::Plans>& CudnnAttention::plans_for(const Key& key) {
  const auto found = plans_.find(key);
  if (found != plans_.end()) return found->second;
  std::optional<Plans> plans;
  if (key.head_size % 8 == 0 && key.head_size <= 128 && key.sequence > 1) {
    try {
      plans.emplace(Plans{build_forward(key), build_backward(key)});
    } catch (const Error& error) {
      std::fprintf(stderr,
                   "octet: note: cuDNN has no attention for this shape, slower kernels are used (%s)\n",
                   error.what());
      plans.reset();
    }
  }
  return plans_.emplace(key, std::move(plans)).first->second;
}

bool CudnnAttention::supports(const AttentionShape& shape) {
  const std::vector<HeadGroup> groups = groups_of(shape.layout);
  return std::all_of(groups.begin(), groups.end(),
                     [&](const HeadGroup& group) { return plans_for(key_of(shape, group)).has_value(); });
}

std::int64_t CudnnAttention::backward_bytes(const Key& key, const Plans& plans) const {
  const std::int64_t rows = key.batch * key.queries * key.sequence;
  const std::int64_t query_sums = deterministic_ ? 0 : rows * key.head_size;
  return round_to_256(rows * 4) + round_to_256(query_sums * 4) + plans.backward.workspace_bytes();
}

std::int64_t CudnnAttention::workspace_bytes(const AttentionShape& shape) {
  std::int64_t most = 0;
  for (const HeadGroup& group : groups_of(shape.layout)) {
    const Key key = key_of(shape, group);
    const Plans& plans = plans_for(key).value();
    most = std::max({most, plans.forward.workspace_bytes(), backward_bytes(key, plans)});
  }
  return most;
}

void CudnnAttention::forward(cudaStream_t stream, const AttentionShape& shape, Tensor qkv, Tensor out,
                             Tensor statistics) {
  check_cudnn(cudnnSetStream(handle_.get(), stream), "cudnnSetStream");
  const HeadLayout& layout = shape.layout;
  const std::int64_t d = layout.head_size;
  for (const HeadGroup& group : groups_of(layout)) {
    const Plans& plans = plans_for(key_of(shape, group)).value();
    plans.forward.execute(handle_.get(),
                          {{kQuery, at(qkv, group.query * d)},
                           {kKey, at(qkv, (layout.heads + group.key) * d)},
                           {kValue, at(qkv, (layout.heads + layout.kv_heads + group.key) * d)},
                           {kOut, at(out, group.query * d)},
                           {kStatistics, at(statistics, group.query * shape.sequence)},
                           {kScale, &shape.scale},
                           {kMasked, &kMaskedScore}},
                          scratch_->reserve(plans.forward.workspace_bytes()));
  }
}

void CudnnAttention::backward(cudaStream_t stream, const AttentionShape& shape, Tensor qkv, Tensor out,
                              Tensor statistics, Tensor dout, Tensor dqkv) {
  check_cudnn(cudnnSetStream(handle_.get(), stream), "cudnnSetStream");
  const HeadLayout& layout = shape.layout;
  const std::int64_t d = layout.head_size;
  const std::vector<HeadGroup> groups = groups_of(layout);
  zero_key_heads(stream, layout, dqkv, 0, groups.front().key);
  zero_key_heads(stream, layout, dqkv, groups.back().key + groups.back().keys, layout.kv_heads);
  for (const HeadGroup& group : groups) {
    const Key key = key_of(shape, group);
    const Plans& plans = plans_for(key).value();
    const std::int64_t rows = key.batch * key.queries * key.sequence;
    auto* row_sums = static_cast<std::byte*>(scratch_->reserve(backward_bytes(key, plans)));
    std::byte* query_sums = row_sums + round_to_256(rows * 4);
    std::byte* workspace = query_sums + (deterministic_ ? 0 : round_to_256(rows * d * 4));
    const std::int64_t query = group.query * d, key_column = (layout.heads + group.key) * d;
    const std::int64_t value_column = (layout.heads + layout.kv_heads + group.key) * d;
    std::vector<CudnnOperand> operands{{kQuery, at(qkv, query)},
                                       {kKey, at(qkv, key_column)},
                                       {kValue, at(qkv, value_column)},
                                       {kOut, at(out, query)},
                                       {kOutGradient, at(dout, query)},
                                       {kStatistics, at(statistics, group.query * shape.sequence)},
                                       {kQueryGradient, at(dqkv, query)},
                                       {kKeyGradient, at(dqkv, key_column)},
                                       {kValueGradient, at(dqkv, value_column)},
                                       {kRowSums, row_sums},
                                       {kScale, &shape.scale},
                                       {kOne, &kUnit},
                                       {kMasked, &kMaskedScore}};
    if (!deterministic_) operands.push_back({kQuerySums, query_sums});
    plans.backward.execute(handle_.get(), operands, workspace);
  }
}

}  // namespace octet::cuda
