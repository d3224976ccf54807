#include "octet/ops/ops.h"

namespace octet {
namespace {

void check_packed(const AttentionShape& shape, const Tensor& qkv, const Tensor& out) {
  OCTET_ASSERT(qkv.cols == shape.layout.packed() && shape.key_rows() == shape.sequence);
  OCTET_ASSERT(qkv.rows == shape.batch * shape.sequence);
  OCTET_ASSERT(out.rows == qkv.rows && out.cols == shape.layout.query() && out.dtype == qkv.dtype);
}

}  // namespace

SampleRows sample_rows(const Tensor& matrix, std::int64_t rows_per_sample, std::int64_t column) {
  OCTET_ASSERT(column >= 0 && column <= matrix.cols);
  return {static_cast<std::byte*>(matrix.data) + column * size_of(matrix.dtype), matrix.cols,
          rows_per_sample * matrix.cols};
}

AttentionOperands packed_operands(const AttentionShape& shape, const Tensor& qkv) {
  const HeadLayout& layout = shape.layout;
  const std::int64_t keys = layout.query(), values = keys + std::int64_t{layout.kv_heads} * layout.head_size;
  return {qkv.dtype, sample_rows(qkv, shape.sequence), sample_rows(qkv, shape.sequence, keys),
          sample_rows(qkv, shape.sequence, values)};
}

void Ops::attention_forward(Stream& stream, const AttentionShape& shape, Tensor qkv, Tensor out,
                            Tensor statistics) {
  check_packed(shape, qkv, out);
  attention_forward(stream, shape, packed_operands(shape, qkv), sample_rows(out, shape.sequence), statistics);
}

void Ops::attention_backward(Stream& stream, const AttentionShape& shape, Tensor qkv, Tensor out,
                             Tensor statistics, Tensor dout, Tensor dqkv) {
  check_packed(shape, qkv, out);
  check_packed(shape, dqkv, dout);
  const AttentionOperands gradients = packed_operands(shape, dqkv);
  attention_backward(stream, shape, packed_operands(shape, qkv), sample_rows(out, shape.sequence), statistics,
                     sample_rows(dout, shape.sequence), gradients.query, gradients.key, gradients.value);
}

}  // namespace octet
