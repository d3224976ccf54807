#include "cudnn_attention.h"

#include <algorithm>
#include <cstdio>

#include "../../runtime/cuda/cuda_check.h"
#include "../attention_heads.h"
#include "drivers.h"
#include "octet/base/error.h"

namespace octet::cuda {
namespace {

using namespace attention_operand;

// Finite, so that rows of hidden scores alone, as blocks of them within a kernel are, have a largest one that
// can be subtracted; e^(hidden - seen) is 0 exactly.
constexpr float kHiddenScore = -1e30f;
constexpr float kUnit = 1.0f;
constexpr std::int64_t kElement = 2;  // bytes

const std::byte* at(const SampleRows& rows, std::int64_t column) {
  return static_cast<const std::byte*>(rows.data) + column * kElement;
}

const std::byte* at(const Tensor& tensor, std::int64_t element) {
  return static_cast<const std::byte*>(tensor.data) + element * size_of(tensor.dtype);
}

constexpr std::int64_t round_to_256(std::int64_t bytes) {
  return (bytes + 255) / 256 * 256;
}

// Bytes of work space beside cuDNN's own.
std::int64_t key_limits_bytes(const AttentionPlanKey& key) {
  return key.documents ? round_to_256(key.batch * key_limit_stride(key.keys) * 4) : 0;
}
std::int64_t row_sums_bytes(const AttentionPlanKey& key) {
  return round_to_256(key.batch * key.query_heads * key.sequence * 4);
}

// cuDNN was told that all operands begin at multiples of 16 bytes.
bool takes_vectors(std::int64_t batch, std::initializer_list<SampleRows> operands) {
  return std::all_of(operands.begin(), operands.end(),
                     [&](const SampleRows& rows) { return rows_begin_at_16_bytes(rows, batch); });
}

std::int32_t keys_before_queries(const AttentionShape& shape) {
  return static_cast<std::int32_t>(shape.key_rows() - shape.sequence);
}

// For every key: the first position, counted as keys are, whose query no longer sees it.
void write_key_limits(cudaStream_t stream, const AttentionShape& shape, const Tensor& document_starts,
                      std::byte* limits) {
  document_key_limits(stream, shape, document_starts, reinterpret_cast<std::int32_t*>(limits),
                      key_limit_stride(shape.key_rows()));
}

// A sample stride that says nothing is given a fixed value, so that no plan is built twice.
RowStrides strides_of(const SampleRows& rows, std::int64_t batch, std::int64_t row_count) {
  return {rows.row_stride, batch > 1 ? rows.sample_stride : row_count * rows.row_stride};
}

// Zeroes key heads [begin, end) of all rows.
void zero_key_heads(cudaStream_t stream, const AttentionShape& shape, const SampleRows& gradient, int begin,
                    int end) {
  if (begin == end) return;
  const std::int64_t size = shape.layout.head_size;
  for (std::int64_t sample = 0; sample < shape.batch; ++sample) {
    OCTET_CUDA(cudaMemset2DAsync(
        static_cast<std::byte*>(gradient.data) + (sample * gradient.sample_stride + begin * size) * kElement,
        static_cast<std::size_t>(gradient.row_stride * kElement), 0,
        static_cast<std::size_t>((end - begin) * size * kElement), static_cast<std::size_t>(shape.key_rows()),
        stream));
  }
}

// The plan that build() makes, or nothing, with a note, where cuDNN has no kernel.
template <typename Build>
std::optional<CudnnPlan> plan_or_note(const AttentionPlanKey& key, const char* pass, Build build) {
  if (key.head_size % 8 != 0 || key.head_size > 128 || key.sequence <= 1) return std::nullopt;
  try {
    return build();
  } catch (const Error& error) {
    std::fprintf(stderr,
                 "octet: note: cuDNN has no attention %s for this shape, slower kernels are used (%s)\n",
                 pass, error.what());
    return std::nullopt;
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
  const KeyHeads keys = key_heads_of(layout);
  if (keys.group > 0) return {{0, layout.heads, keys.first, keys.count}};
  std::vector<HeadGroup> groups;
  for (int query = 0; query < layout.heads; ++query) {
    const int key = (query + layout.head_offset) / layout.group;
    if (groups.empty() || groups.back().key != key) groups.push_back({query, 0, key, 1});
    ++groups.back().queries;
  }
  return groups;
}

std::vector<CudnnAttention::Part> CudnnAttention::parts_of(const AttentionShape& shape, bool documents,
                                                           const AttentionOperands& operands,
                                                           const SampleRows& out,
                                                           const Gradients& gradients) {
  const std::int64_t batch = shape.batch, sequence = shape.sequence, keys = shape.key_rows();
  std::vector<Part> parts;
  for (const HeadGroup& heads : groups_of(shape.layout)) {
    parts.push_back({heads,
                     {.batch = batch,
                      .sequence = sequence,
                      .keys = keys,
                      .heads = shape.layout.heads,
                      .query_heads = heads.queries,
                      .key_heads = heads.keys,
                      .head_size = shape.layout.head_size,
                      .documents = documents,
                      .query = strides_of(operands.query, batch, sequence),
                      .key = strides_of(operands.key, batch, keys),
                      .value = strides_of(operands.value, batch, keys),
                      .out = strides_of(out, batch, sequence),
                      .dout = strides_of(gradients.dout, batch, sequence),
                      .dquery = strides_of(gradients.dquery, batch, sequence),
                      .dkey = strides_of(gradients.dkey, batch, keys),
                      .dvalue = strides_of(gradients.dvalue, batch, keys)}});
  }
  return parts;
}

const std::optional<CudnnPlan>& CudnnAttention::forward_plan(const AttentionPlanKey& key) {
  auto found = forward_plans_.find(key);
  if (found == forward_plans_.end()) {
    const auto build = [&] { return build_attention_forward(handle_.get(), key); };
    found = forward_plans_.emplace(key, plan_or_note(key, "forward", build)).first;
  }
  return found->second;
}

const std::optional<CudnnPlan>& CudnnAttention::backward_plan(const AttentionPlanKey& key) {
  auto found = backward_plans_.find(key);
  if (found == backward_plans_.end() && key.documents) {
    // cuDNN 9.19 builds this plan and runs it, but every gradient it writes on an H200 is zero: our own
    // kernels do it.
    found = backward_plans_.emplace(key, std::nullopt).first;
  }
  if (found == backward_plans_.end()) {
    const auto build = [&] { return build_attention_backward(handle_.get(), key, deterministic_); };
    found = backward_plans_.emplace(key, plan_or_note(key, "backward", build)).first;
  }
  return found->second;
}

std::int64_t CudnnAttention::query_sums_bytes(const AttentionPlanKey& key) const {
  if (deterministic_) return 0;
  return round_to_256(key.batch * key.query_heads * key.sequence * key.head_size * 4);
}

std::optional<std::int64_t> CudnnAttention::forward_bytes(const std::vector<Part>& parts) {
  std::int64_t most = 0;
  for (const Part& part : parts) {
    const std::optional<CudnnPlan>& plan = forward_plan(part.key);
    if (!plan) return std::nullopt;
    most = std::max(most, key_limits_bytes(part.key) + plan->workspace_bytes());
  }
  return most;
}

std::optional<std::int64_t> CudnnAttention::backward_bytes(const std::vector<Part>& parts) {
  std::int64_t most = 0;
  for (const Part& part : parts) {
    const std::optional<CudnnPlan>& plan = backward_plan(part.key);
    if (!plan) return std::nullopt;
    most = std::max(most, key_limits_bytes(part.key) + row_sums_bytes(part.key) + query_sums_bytes(part.key) +
                              plan->workspace_bytes());
  }
  return most;
}

std::int64_t CudnnAttention::workspace_bytes(const AttentionShape& shape, bool documents) {
  const std::int64_t packed = shape.layout.packed(), width = shape.layout.query();
  const SampleRows queries{nullptr, packed, shape.sequence * packed};
  const SampleRows keys{nullptr, packed, shape.key_rows() * packed};
  const SampleRows out{nullptr, width, shape.sequence * width};
  const AttentionOperands operands{DType::kBF16, queries, keys, keys};
  const auto forward = forward_bytes(parts_of(shape, documents, operands, out, {}));
  const auto backward = backward_bytes(parts_of(shape, documents, operands, out, {out, queries, keys, keys}));
  return std::max(forward.value_or(0), backward.value_or(0));
}

bool CudnnAttention::forward(cudaStream_t stream, const AttentionShape& shape,
                             const AttentionOperands& operands, SampleRows out, Tensor statistics) {
  if (!takes_vectors(shape.batch, {operands.query, operands.key, operands.value, out})) return false;
  const std::vector<Part> parts =
      parts_of(shape, static_cast<bool>(operands.document_starts), operands, out, {});
  const std::optional<std::int64_t> bytes = forward_bytes(parts);
  if (!bytes) return false;
  check_cudnn(cudnnSetStream(handle_.get(), stream), "cudnnSetStream");
  const std::int32_t keys_before = keys_before_queries(shape);
  const std::int64_t d = shape.layout.head_size;
  std::byte* const key_limits = static_cast<std::byte*>(scratch_->reserve(*bytes));
  std::byte* const workspace = key_limits + key_limits_bytes(parts.front().key);
  if (operands.document_starts) write_key_limits(stream, shape, operands.document_starts, key_limits);
  for (const Part& part : parts) {
    const HeadGroup& heads = part.heads;
    std::vector<CudnnOperand> graph{{kQuery, at(operands.query, heads.query * d)},
                                    {kKey, at(operands.key, heads.key * d)},
                                    {kValue, at(operands.value, heads.key * d)},
                                    {kOut, at(out, heads.query * d)},
                                    {kStatistics, at(statistics, heads.query * shape.sequence)},
                                    {kScale, &shape.scale},
                                    {kHidden, &kHiddenScore}};
    if (keys_before != 0) graph.push_back({kKeysBefore, &keys_before});
    if (part.key.documents) graph.push_back({kKeyLimits, key_limits});
    forward_plan(part.key)->execute(handle_.get(), graph, workspace);
  }
  return true;
}

bool CudnnAttention::backward(cudaStream_t stream, const AttentionShape& shape,
                              const AttentionOperands& operands, SampleRows out, Tensor statistics,
                              SampleRows dout, SampleRows dquery, SampleRows dkey, SampleRows dvalue) {
  if (!takes_vectors(shape.batch,
                     {operands.query, operands.key, operands.value, out, dout, dquery, dkey, dvalue})) {
    return false;
  }
  const std::vector<Part> parts = parts_of(shape, static_cast<bool>(operands.document_starts), operands, out,
                                           {dout, dquery, dkey, dvalue});
  const std::optional<std::int64_t> bytes = backward_bytes(parts);
  if (!bytes) return false;
  check_cudnn(cudnnSetStream(handle_.get(), stream), "cudnnSetStream");
  const int first_key = parts.front().heads.key, end_key = parts.back().heads.key + parts.back().heads.keys;
  for (const SampleRows& gradient : {dkey, dvalue}) {
    zero_key_heads(stream, shape, gradient, 0, first_key);
    zero_key_heads(stream, shape, gradient, end_key, shape.layout.kv_heads);
  }
  const std::int32_t keys_before = keys_before_queries(shape);
  const std::int64_t d = shape.layout.head_size;
  std::byte* const key_limits = static_cast<std::byte*>(scratch_->reserve(*bytes));
  std::byte* const row_sums = key_limits + key_limits_bytes(parts.front().key);
  if (operands.document_starts) write_key_limits(stream, shape, operands.document_starts, key_limits);
  for (const Part& part : parts) {
    const HeadGroup& heads = part.heads;
    std::byte* const query_sums = row_sums + row_sums_bytes(part.key);
    std::byte* const workspace = query_sums + query_sums_bytes(part.key);
    std::vector<CudnnOperand> graph{{kQuery, at(operands.query, heads.query * d)},
                                    {kKey, at(operands.key, heads.key * d)},
                                    {kValue, at(operands.value, heads.key * d)},
                                    {kOut, at(out, heads.query * d)},
                                    {kOutGradient, at(dout, heads.query * d)},
                                    {kStatistics, at(statistics, heads.query * shape.sequence)},
                                    {kQueryGradient, at(dquery, heads.query * d)},
                                    {kKeyGradient, at(dkey, heads.key * d)},
                                    {kValueGradient, at(dvalue, heads.key * d)},
                                    {kRowSums, row_sums},
                                    {kScale, &shape.scale},
                                    {kOne, &kUnit},
                                    {kHidden, &kHiddenScore}};
    if (!deterministic_) graph.push_back({kQuerySums, query_sums});
    if (keys_before != 0) graph.push_back({kKeysBefore, &keys_before});
    if (part.key.documents) graph.push_back({kKeyLimits, key_limits});
    backward_plan(part.key)->execute(handle_.get(), graph, workspace);
  }
  return true;
}

}  // namespace octet::cuda
