#include <algorithm>
#include <cmath>
#include <type_traits>

#include "attention_scratch.h"
#include "blas.h"
#include "cpu_ops.h"
#include "loops.h"

namespace octet {
namespace {

using cpu::gemm;
using cpu::kQueryBlock;
using cpu::Operand;

/// Scratch memory handed out piece by piece.
class Scratch {
 public:
  explicit Scratch(std::vector<float>& memory) : next_(memory.data()), left_(memory.size()) {}
  float* take(std::int64_t count) {
    OCTET_ASSERT(static_cast<std::size_t>(count) <= left_);
    float* const begin = next_;
    next_ += count;
    left_ -= static_cast<std::size_t>(count);
    return begin;
  }

 private:
  float* next_;
  std::size_t left_;
};

/// Rows of one head of one sample.
template <typename T>
struct HeadRows {
  T* data;
  std::int64_t stride;

  T* row(std::int64_t index) const { return data + index * stride; }
};

template <typename T>
HeadRows<T> head_rows(const SampleRows& rows, std::int64_t sample, int head, int size) {
  return {static_cast<T*>(rows.data) + sample * rows.sample_stride + std::int64_t{head} * size,
          rows.row_stride};
}

/// `count` rows of a head: float32 where they lie, bfloat16 widened to `scratch`.
template <typename T>
Operand widened(const HeadRows<T>& from, std::int64_t count, int size, float* scratch) {
  if constexpr (std::is_same_v<T, float>) {
    return {from.data, from.stride};
  } else {
    for (std::int64_t row = 0; row < count; ++row) {
      for (int i = 0; i < size; ++i) scratch[row * size + i] = static_cast<float>(from.row(row)[i]);
    }
    return {scratch, size};
  }
}

template <typename T>
void store(const float* from, std::int64_t count, int size, const HeadRows<T>& to, std::int64_t first = 0) {
  for (std::int64_t row = 0; row < count; ++row) {
    for (int i = 0; i < size; ++i) to.row(first + row)[i] = static_cast<T>(from[row * size + i]);
  }
}

Operand rows_from(const Operand& x, std::int64_t row) {
  return {x.data + row * x.stride, x.stride, x.transposed};
}
Operand transpose(const Operand& x) {
  return {x.data, x.stride, !x.transposed};
}

int kv_head_of(const HeadLayout& layout, int head) {
  return (head + layout.head_offset) / layout.group;
}

/// The key rows [begin, end) that a query row sees.
struct KeyRange {
  std::int64_t begin, end;
};

/// Which key rows the query rows of a sample see.
class Visible {
 public:
  Visible(const AttentionShape& shape, const Tensor& document_starts, std::int64_t sample)
      : starts_(document_starts ? document_starts.as<std::int32_t>() + sample * shape.sequence : nullptr),
        keys_before_(shape.key_rows() - shape.sequence) {}

  KeyRange to(std::int64_t query) const {
    const KeyRange range{starts_ != nullptr ? starts_[query] : 0, keys_before_ + query + 1};
    OCTET_ASSERT(range.begin >= 0 && range.begin < range.end);
    return range;
  }
  /// What any of the rows [first, first + count) sees: ranges only move forward.
  KeyRange to_block(std::int64_t first, std::int64_t count) const {
    return {to(first).begin, to(first + count - 1).end};
  }

 private:
  const std::int32_t* starts_;
  std::int64_t keys_before_;
};

/// Zero where a row of a block's scores belongs to keys that it does not see.
void clear_hidden(float* row, KeyRange block, KeyRange seen) {
  std::fill(row, row + (seen.begin - block.begin), 0.0f);
  std::fill(row + (seen.end - block.begin), row + (block.end - block.begin), 0.0f);
}

/// Turns scores into probabilities; returns the log-sum-exp.
float softmax(float* scores, std::int64_t count) {
  const float peak = cpu::largest(count, [&](std::int64_t j) { return scores[j]; });
  for (std::int64_t j = 0; j < count; ++j) scores[j] = cpu::exp(scores[j] - peak);
  const double total = cpu::sum(count, [&](std::int64_t j) { return scores[j]; });
  const float inverse = static_cast<float>(1.0 / total);
  for (std::int64_t j = 0; j < count; ++j) scores[j] *= inverse;
  return peak + static_cast<float>(std::log(total));
}

template <typename T>
void forward(const AttentionShape& shape, const AttentionOperands& in, const SampleRows& out,
             const Tensor& statistics, Scratch scratch) {
  const std::int64_t length = shape.sequence, keys = shape.key_rows();
  const int size = shape.layout.head_size;
  float* const q_copy = scratch.take(length * size);
  float* const k_copy = scratch.take(keys * size);
  float* const v_copy = scratch.take(keys * size);
  float* const scores = scratch.take(kQueryBlock * keys);
  float* const result = scratch.take(kQueryBlock * size);
  for (std::int64_t sample = 0; sample < shape.batch; ++sample) {
    const Visible visible(shape, in.document_starts, sample);
    for (int head = 0; head < shape.layout.heads; ++head) {
      const int kv_head = kv_head_of(shape.layout, head);
      const Operand q = widened(head_rows<T>(in.query, sample, head, size), length, size, q_copy);
      const Operand k = widened(head_rows<T>(in.key, sample, kv_head, size), keys, size, k_copy);
      const Operand v = widened(head_rows<T>(in.value, sample, kv_head, size), keys, size, v_copy);
      float* const log_sums = statistics.as<float>() + (sample * shape.layout.heads + head) * length;
      for (std::int64_t begin = 0; begin < length; begin += kQueryBlock) {
        const std::int64_t rows = std::min(kQueryBlock, length - begin);
        const KeyRange block = visible.to_block(begin, rows);
        const std::int64_t width = block.end - block.begin;
        gemm(rows, width, size, shape.scale, rows_from(q, begin), transpose(rows_from(k, block.begin)), 0.0f,
             scores, width);
        for (std::int64_t row = 0; row < rows; ++row) {
          const KeyRange seen = visible.to(begin + row);
          float* const row_scores = scores + row * width;
          log_sums[begin + row] = softmax(row_scores + (seen.begin - block.begin), seen.end - seen.begin);
          clear_hidden(row_scores, block, seen);
        }
        gemm(rows, size, width, 1.0f, {scores, width}, rows_from(v, block.begin), 0.0f, result, size);
        store(result, rows, size, head_rows<T>(out, sample, head, size), begin);
      }
    }
  }
}

/// From scores to probabilities p = exp(score - log_sum), and from dp = dout·vᵀ to the gradient of the
/// scores, p · (dp - dout·out).
void softmax_backward(float* p, float* dp, std::int64_t count, float log_sum, float along) {
  for (std::int64_t j = 0; j < count; ++j) {
    p[j] = cpu::exp(p[j] - log_sum);
    dp[j] = p[j] * (dp[j] - along);
  }
}

template <typename T>
void backward(const AttentionShape& shape, const AttentionOperands& in, const SampleRows& out,
              const Tensor& statistics, const SampleRows& dout, const SampleRows& dquery,
              const SampleRows& dkey, const SampleRows& dvalue, Scratch scratch) {
  const std::int64_t length = shape.sequence, keys = shape.key_rows();
  const int size = shape.layout.head_size;
  float* const q_copy = scratch.take(length * size);
  float* const dout_copy = scratch.take(length * size);
  float* const k_copy = scratch.take(keys * size);
  float* const v_copy = scratch.take(keys * size);
  float* const dk = scratch.take(keys * size);
  float* const dv = scratch.take(keys * size);
  float* const p = scratch.take(kQueryBlock * keys);
  float* const dp = scratch.take(kQueryBlock * keys);
  float* const dq = scratch.take(kQueryBlock * size);

  const auto add_query_head = [&](std::int64_t sample, int head, const Operand& k, const Operand& v) {
    const Visible visible(shape, in.document_starts, sample);
    const Operand q = widened(head_rows<T>(in.query, sample, head, size), length, size, q_copy);
    const Operand d = widened(head_rows<T>(dout, sample, head, size), length, size, dout_copy);
    const HeadRows<T> output = head_rows<T>(out, sample, head, size);
    const float* const log_sums = statistics.as<float>() + (sample * shape.layout.heads + head) * length;
    for (std::int64_t begin = 0; begin < length; begin += kQueryBlock) {
      const std::int64_t rows = std::min(kQueryBlock, length - begin);
      const KeyRange block = visible.to_block(begin, rows);
      const std::int64_t width = block.end - block.begin;
      const Operand block_keys = rows_from(k, block.begin), block_values = rows_from(v, block.begin);
      gemm(rows, width, size, shape.scale, rows_from(q, begin), transpose(block_keys), 0.0f, p, width);
      gemm(rows, width, size, 1.0f, rows_from(d, begin), transpose(block_values), 0.0f, dp, width);
      for (std::int64_t row = 0; row < rows; ++row) {
        const T* const result = output.row(begin + row);
        const float* const gradient = d.data + (begin + row) * d.stride;
        const double along =
            cpu::sum(size, [&](std::int64_t i) { return gradient[i] * static_cast<float>(result[i]); });
        const KeyRange seen = visible.to(begin + row);
        const std::int64_t first = row * width + (seen.begin - block.begin);
        softmax_backward(p + first, dp + first, seen.end - seen.begin, log_sums[begin + row],
                         static_cast<float>(along));
        clear_hidden(p + row * width, block, seen);
        clear_hidden(dp + row * width, block, seen);
      }
      gemm(width, size, rows, 1.0f, {p, width, true}, rows_from(d, begin), 1.0f, dv + block.begin * size,
           size);
      gemm(width, size, rows, shape.scale, {dp, width, true}, rows_from(q, begin), 1.0f,
           dk + block.begin * size, size);
      gemm(rows, size, width, shape.scale, {dp, width}, block_keys, 0.0f, dq, size);
      store(dq, rows, size, head_rows<T>(dquery, sample, head, size), begin);
    }
  };

  for (std::int64_t sample = 0; sample < shape.batch; ++sample) {
    for (int kv_head = 0; kv_head < shape.layout.kv_heads; ++kv_head) {
      const Operand k = widened(head_rows<T>(in.key, sample, kv_head, size), keys, size, k_copy);
      const Operand v = widened(head_rows<T>(in.value, sample, kv_head, size), keys, size, v_copy);
      std::fill_n(dk, keys * size, 0.0f);
      std::fill_n(dv, keys * size, 0.0f);
      for (int head = 0; head < shape.layout.heads; ++head) {
        if (kv_head_of(shape.layout, head) == kv_head) add_query_head(sample, head, k, v);
      }
      store(dk, keys, size, head_rows<T>(dkey, sample, kv_head, size));
      store(dv, keys, size, head_rows<T>(dvalue, sample, kv_head, size));
    }
  }
}

void check(const AttentionShape& shape, const AttentionOperands& in, const Tensor& statistics) {
  const HeadLayout& layout = shape.layout;
  OCTET_ASSERT(layout.group >= 1 && (layout.heads - 1 + layout.head_offset) / layout.group < layout.kv_heads);
  OCTET_ASSERT(shape.key_rows() >= shape.sequence);
  OCTET_ASSERT(statistics.size() == shape.batch * layout.heads * shape.sequence);
  OCTET_ASSERT(!in.document_starts || in.document_starts.size() == shape.batch * shape.sequence);
}

/// At least what this shape needs: a shape larger than that of `prepare` grows it.
Scratch scratch_for(const AttentionShape& shape, std::vector<float>& memory) {
  memory.resize(std::max(memory.size(), cpu::attention_scratch_size(shape)));
  return Scratch(memory);
}

}  // namespace

void CpuOps::attention_forward(Stream&, const AttentionShape& shape, const AttentionOperands& operands,
                               SampleRows out, Tensor statistics) {
  check(shape, operands, statistics);
  const Scratch scratch = scratch_for(shape, attention_scratch_);
  cpu::with_type(operands.dtype,
                 [&](auto zero) { forward<decltype(zero)>(shape, operands, out, statistics, scratch); });
}

void CpuOps::attention_backward(Stream&, const AttentionShape& shape, const AttentionOperands& operands,
                                SampleRows out, Tensor statistics, SampleRows dout, SampleRows dquery,
                                SampleRows dkey, SampleRows dvalue) {
  check(shape, operands, statistics);
  const Scratch scratch = scratch_for(shape, attention_scratch_);
  cpu::with_type(operands.dtype, [&](auto zero) {
    backward<decltype(zero)>(shape, operands, out, statistics, dout, dquery, dkey, dvalue, scratch);
  });
}

}  // namespace octet
