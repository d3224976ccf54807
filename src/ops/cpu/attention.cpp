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

/// Columns [col, col + size) of `rows` rows of x from `first_row`: float32 where they lie, bfloat16 widened
/// to `scratch`.
template <typename T>
Operand head_of(const Tensor& x, std::int64_t first_row, std::int64_t rows, std::int64_t col, int size,
                float* scratch) {
  const T* const from = x.as<T>() + first_row * x.cols + col;
  if constexpr (std::is_same_v<T, float>) {
    return {from, x.cols};
  } else {
    for (std::int64_t row = 0; row < rows; ++row) {
      for (int i = 0; i < size; ++i) scratch[row * size + i] = static_cast<float>(from[row * x.cols + i]);
    }
    return {scratch, size};
  }
}

template <typename T>
void store_head(const float* from, std::int64_t rows, int size, T* to, std::int64_t stride) {
  for (std::int64_t row = 0; row < rows; ++row) {
    for (int i = 0; i < size; ++i) to[row * stride + i] = static_cast<T>(from[row * size + i]);
  }
}

Operand rows_from(const Operand& x, std::int64_t row) {
  return {x.data + row * x.stride, x.stride, x.transposed};
}
Operand transpose(const Operand& x) {
  return {x.data, x.stride, !x.transposed};
}

/// Columns of the heads in a packed row.
struct HeadColumns {
  const HeadLayout& layout;
  std::int64_t query(int head) const { return std::int64_t{head} * layout.head_size; }
  std::int64_t key(int kv_head) const { return query(layout.heads + kv_head); }
  std::int64_t value(int kv_head) const { return query(layout.heads + layout.kv_heads + kv_head); }
  int kv_head_of(int head) const { return (head + layout.head_offset) / layout.group; }
};

/// Turns a row of scores into probabilities of the keys [0, keys), zero up to `width`; returns the
/// log-sum-exp.
float softmax_row(float* row, std::int64_t keys, std::int64_t width) {
  const float peak = cpu::largest(keys, [&](std::int64_t j) { return row[j]; });
  for (std::int64_t j = 0; j < keys; ++j) row[j] = cpu::exp(row[j] - peak);
  const double total = cpu::sum(keys, [&](std::int64_t j) { return row[j]; });
  const float inverse = static_cast<float>(1.0 / total);
  for (std::int64_t j = 0; j < keys; ++j) row[j] *= inverse;
  std::fill(row + keys, row + width, 0.0f);
  return peak + static_cast<float>(std::log(total));
}

template <typename T>
void forward(const AttentionShape& shape, const Tensor& qkv, const Tensor& out, const Tensor& statistics,
             Scratch scratch) {
  const HeadColumns columns{shape.layout};
  const std::int64_t length = shape.sequence;
  const int size = shape.layout.head_size;
  float* const q_copy = scratch.take(length * size);
  float* const k_copy = scratch.take(length * size);
  float* const v_copy = scratch.take(length * size);
  float* const scores = scratch.take(kQueryBlock * length);
  float* const result = scratch.take(kQueryBlock * size);
  for (std::int64_t sample = 0; sample < shape.batch; ++sample) {
    const std::int64_t first = sample * length;
    for (int head = 0; head < shape.layout.heads; ++head) {
      const int kv_head = columns.kv_head_of(head);
      const Operand q = head_of<T>(qkv, first, length, columns.query(head), size, q_copy);
      const Operand k = head_of<T>(qkv, first, length, columns.key(kv_head), size, k_copy);
      const Operand v = head_of<T>(qkv, first, length, columns.value(kv_head), size, v_copy);
      float* const log_sums = statistics.as<float>() + (sample * shape.layout.heads + head) * length;
      for (std::int64_t begin = 0; begin < length; begin += kQueryBlock) {
        const std::int64_t rows = std::min(kQueryBlock, length - begin), keys = begin + rows;
        gemm(rows, keys, size, shape.scale, rows_from(q, begin), transpose(k), 0.0f, scores, keys);
        for (std::int64_t row = 0; row < rows; ++row) {
          log_sums[begin + row] = softmax_row(scores + row * keys, begin + row + 1, keys);
        }
        gemm(rows, size, keys, 1.0f, {scores, keys}, v, 0.0f, result, size);
        store_head(result, rows, size, out.as<T>() + (first + begin) * out.cols + columns.query(head),
                   out.cols);
      }
    }
  }
}

/// From scores to probabilities p = exp(score - log_sum), and from dp = dout·vᵀ to the gradient of the
/// scores, p · (dp - dout·out), for the keys [0, keys); zero up to `width`.
void softmax_backward_row(float* p, float* dp, std::int64_t keys, std::int64_t width, float log_sum,
                          float along) {
  for (std::int64_t j = 0; j < keys; ++j) {
    p[j] = cpu::exp(p[j] - log_sum);
    dp[j] = p[j] * (dp[j] - along);
  }
  std::fill(p + keys, p + width, 0.0f);
  std::fill(dp + keys, dp + width, 0.0f);
}

template <typename T>
void backward(const AttentionShape& shape, const Tensor& qkv, const Tensor& out, const Tensor& statistics,
              const Tensor& dout, const Tensor& dqkv, Scratch scratch) {
  const HeadColumns columns{shape.layout};
  const std::int64_t length = shape.sequence;
  const int size = shape.layout.head_size;
  float* const q_copy = scratch.take(length * size);
  float* const k_copy = scratch.take(length * size);
  float* const v_copy = scratch.take(length * size);
  float* const dout_copy = scratch.take(length * size);
  float* const dk = scratch.take(length * size);
  float* const dv = scratch.take(length * size);
  float* const p = scratch.take(kQueryBlock * length);
  float* const dp = scratch.take(kQueryBlock * length);
  float* const dq = scratch.take(kQueryBlock * size);

  const auto add_query_head = [&](std::int64_t sample, int head, const Operand& k, const Operand& v) {
    const std::int64_t first = sample * length, col = columns.query(head);
    const Operand q = head_of<T>(qkv, first, length, col, size, q_copy);
    const Operand d = head_of<T>(dout, first, length, col, size, dout_copy);
    const float* const log_sums = statistics.as<float>() + (sample * shape.layout.heads + head) * length;
    for (std::int64_t begin = 0; begin < length; begin += kQueryBlock) {
      const std::int64_t rows = std::min(kQueryBlock, length - begin), keys = begin + rows;
      gemm(rows, keys, size, shape.scale, rows_from(q, begin), transpose(k), 0.0f, p, keys);
      gemm(rows, keys, size, 1.0f, rows_from(d, begin), transpose(v), 0.0f, dp, keys);
      for (std::int64_t row = 0; row < rows; ++row) {
        const T* const output = out.as<T>() + (first + begin + row) * out.cols + col;
        const float* const gradient = d.data + (begin + row) * d.stride;
        const double along =
            cpu::sum(size, [&](std::int64_t i) { return gradient[i] * static_cast<float>(output[i]); });
        softmax_backward_row(p + row * keys, dp + row * keys, begin + row + 1, keys, log_sums[begin + row],
                             static_cast<float>(along));
      }
      gemm(keys, size, rows, 1.0f, {p, keys, true}, rows_from(d, begin), 1.0f, dv, size);
      gemm(keys, size, rows, shape.scale, {dp, keys, true}, rows_from(q, begin), 1.0f, dk, size);
      gemm(rows, size, keys, shape.scale, {dp, keys}, k, 0.0f, dq, size);
      store_head(dq, rows, size, dqkv.as<T>() + (first + begin) * dqkv.cols + col, dqkv.cols);
    }
  };

  for (std::int64_t sample = 0; sample < shape.batch; ++sample) {
    const std::int64_t first = sample * length;
    T* const rows = dqkv.as<T>() + first * dqkv.cols;
    for (int kv_head = 0; kv_head < shape.layout.kv_heads; ++kv_head) {
      const Operand k = head_of<T>(qkv, first, length, columns.key(kv_head), size, k_copy);
      const Operand v = head_of<T>(qkv, first, length, columns.value(kv_head), size, v_copy);
      std::fill_n(dk, length * size, 0.0f);
      std::fill_n(dv, length * size, 0.0f);
      for (int head = 0; head < shape.layout.heads; ++head) {
        if (columns.kv_head_of(head) == kv_head) add_query_head(sample, head, k, v);
      }
      store_head(dk, length, size, rows + columns.key(kv_head), dqkv.cols);
      store_head(dv, length, size, rows + columns.value(kv_head), dqkv.cols);
    }
  }
}

void check(const AttentionShape& shape, const Tensor& qkv, const Tensor& out, const Tensor& statistics) {
  const HeadLayout& layout = shape.layout;
  OCTET_ASSERT(layout.group >= 1 && (layout.heads - 1 + layout.head_offset) / layout.group < layout.kv_heads);
  OCTET_ASSERT(qkv.rows == shape.batch * shape.sequence && qkv.cols == layout.packed());
  OCTET_ASSERT(out.rows == qkv.rows && out.cols == layout.query());
  OCTET_ASSERT(statistics.size() == qkv.rows * layout.heads);
}

}  // namespace

void CpuOps::attention_forward(Stream&, const AttentionShape& shape, Tensor qkv, Tensor out,
                               Tensor statistics) {
  check(shape, qkv, out, statistics);
  cpu::with_type(qkv.dtype, [&](auto zero) {
    forward<decltype(zero)>(shape, qkv, out, statistics, Scratch(attention_scratch_));
  });
}

void CpuOps::attention_backward(Stream&, const AttentionShape& shape, Tensor qkv, Tensor out,
                                Tensor statistics, Tensor dout, Tensor dqkv) {
  check(shape, qkv, out, statistics);
  OCTET_ASSERT(dout.rows == out.rows && dout.cols == out.cols);
  OCTET_ASSERT(dqkv.rows == qkv.rows && dqkv.cols == qkv.cols);
  cpu::with_type(qkv.dtype, [&](auto zero) {
    backward<decltype(zero)>(shape, qkv, out, statistics, dout, dqkv, Scratch(attention_scratch_));
  });
}

}  // namespace octet
