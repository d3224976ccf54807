#pragma once

#include "kernel_tools.cuh"
#include "octet/ops/ops.h"

namespace octet::cuda {

constexpr int kLargestHead = 256;

/// What the kernels of attention know of their shape.
struct Problem {
  std::int64_t sequence, keys;
  int heads, kv_heads, head_size, group, offset;
  float scale;
  const std::int32_t* starts;  // of documents, or null
};

/// SampleRows of heads of one element type.
template <typename T>
struct Rows {
  T* data;
  std::int64_t row_stride, sample_stride;

  // Where a head of a row begins.
  __device__ T* at(std::int64_t sample, std::int64_t row, int head, int size) const {
    return data + sample * sample_stride + row * row_stride + std::int64_t{head} * size;
  }
};

/// How many query rows of a sample, which come first, belong to documents that start at key row `key` or
/// before.
__device__ inline std::int64_t queries_that_begin_by(const Problem& p, std::int64_t sample,
                                                     std::int64_t key) {
  if (p.starts == nullptr) return p.sequence;
  const std::int32_t* const starts = p.starts + sample * p.sequence;
  std::int64_t low = 0, high = p.sequence;  // starts never fall
  while (low < high) {
    const std::int64_t middle = (low + high) / 2;
    if (starts[middle] <= key) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

inline Problem problem_of(const AttentionShape& shape, const AttentionOperands& operands) {
  const HeadLayout& layout = shape.layout;
  if (layout.head_size > kLargestHead) {
    fail(ErrorKind::kDevice, "attention on a GPU takes heads of up to {} elements; these have {}",
         kLargestHead, layout.head_size);
  }
  return {shape.sequence,     shape.key_rows(), layout.heads,
          layout.kv_heads,    layout.head_size, layout.group,
          layout.head_offset, shape.scale,      operands.document_starts.as<std::int32_t>()};
}

template <typename T>
Rows<T> rows_of(const SampleRows& rows) {
  return {static_cast<T*>(rows.data), rows.row_stride, rows.sample_stride};
}

}  // namespace octet::cuda
