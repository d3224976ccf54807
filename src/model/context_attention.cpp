#include "octet/model/context_attention.h"

#include <cmath>

namespace octet {

ContextAttention::ContextAttention(Ops& ops, Communicator& ranks, StreamTimer& timer,
                                   const HeadLayout& layout, DType compute, std::int64_t batch,
                                   std::int64_t sequence, bool documents_apart, Arena& scratch)
    : ops_(ops),
      ranks_(ranks),
      timer_(timer),
      layout_(layout),
      compute_(compute),
      batch_(batch),
      sequence_(sequence),
      documents_apart_(documents_apart),
      scratch_(scratch) {
  if (size() == 1) return;
  OCTET_ASSERT(sequence % 2 == 0);
  const std::int64_t tokens = batch * sequence, columns = key_columns();
  own_ = scratch.reserve(compute, tokens, columns);
  gathered_ = scratch.reserve(compute, tokens * size(), columns);
  keys_ = scratch.reserve(compute, tokens * size(), columns);
  for (int& handle : gradients_) handle = scratch.reserve(compute, tokens * size(), columns);
}

AttentionShape ContextAttention::shape(int half) const {
  AttentionShape shape;
  shape.layout = layout_;
  shape.batch = batch_;
  shape.scale = 1.0f / std::sqrt(static_cast<float>(layout_.head_size));
  shape.sequence = size() == 1 ? sequence_ : run_rows();
  if (size() > 1) shape.keys = (run_of(ranks_.rank(), half) + 1) * run_rows();
  return shape;
}

AttentionShape ContextAttention::largest() const {
  AttentionShape most = shape(1);
  // The same on every rank, so that all reserve alike.
  if (size() > 1) most.keys = 2 * size() * run_rows();
  return most;
}

SampleRows ContextAttention::rows(int half, Tensor matrix) const {
  const std::int64_t begin = half * run_rows() * matrix.cols;
  return {static_cast<std::byte*>(matrix.data) + begin * size_of(matrix.dtype), matrix.cols,
          sequence_ * matrix.cols};
}

SampleRows ContextAttention::keys_in(Tensor matrix) const {
  return {matrix.data, matrix.cols, sequence_ * size() * matrix.cols};
}

AttentionOperands ContextAttention::operands(int half, Tensor qkv, Tensor starts) const {
  const AttentionShape part = shape(half);
  AttentionOperands result;
  if (size() == 1) {
    result = packed_operands(part, qkv);
  } else {
    const Tensor keys = scratch_.tensor(keys_);
    result.dtype = compute_;
    result.query = rows(half, qkv);
    result.key = keys_in(keys);
    result.value = sample_rows(keys, sequence_ * size(), key_columns() / 2);
  }
  const std::int64_t count = batch_ * part.sequence;
  if (documents_apart_)
    result.document_starts = starts.range(half * count, count).reshape(batch_, part.sequence);
  return result;
}

void ContextAttention::arrange(Stream& stream, Tensor gathered, Tensor whole, bool to_whole) {
  const std::int64_t columns = key_columns(), run = run_rows(), width = size_of(compute_);
  for (int rank = 0; rank < size(); ++rank) {
    for (int half = 0; half < 2; ++half) {
      const SampleRows apart{
          static_cast<std::byte*>(gathered.data) + (rank * batch_ * sequence_ + half * run) * columns * width,
          columns, sequence_ * columns};
      const SampleRows together{
          static_cast<std::byte*>(whole.data) + run_of(rank, half) * run * columns * width, columns,
          sequence_ * size() * columns};
      ops_.copy_rows(stream, compute_, batch_, run, columns, to_whole ? apart : together,
                     to_whole ? together : apart, false);
    }
  }
}

void ContextAttention::gather_keys(Stream& stream, Tensor qkv) {
  const Tensor own = scratch_.tensor(own_), gathered = scratch_.tensor(gathered_);
  ops_.copy_rows(stream, compute_, batch_, sequence_, key_columns(),
                 sample_rows(qkv, sequence_, layout_.query()), sample_rows(own, sequence_), false);
  timer_.begin(stream);
  ranks_.all_gather(stream, own, gathered);
  timer_.end(stream);
  arrange(stream, gathered, scratch_.tensor(keys_), true);
}

void ContextAttention::forward(Stream& stream, Tensor qkv, Tensor starts, Tensor out, Tensor statistics) {
  if (size() == 1) {
    ops_.attention_forward(stream, shape(0), operands(0, qkv, starts), sample_rows(out, sequence_),
                           statistics);
    return;
  }
  gather_keys(stream, qkv);
  const std::int64_t heads = batch_ * layout_.heads;
  const Tensor parts = statistics.reshape(2 * heads, run_rows());
  for (int half = 0; half < 2; ++half) {
    ops_.attention_forward(stream, shape(half), operands(half, qkv, starts), rows(half, out),
                           parts.row_range(half * heads, heads));
  }
}

void ContextAttention::backward(Stream& stream, Tensor qkv, Tensor starts, Tensor out, Tensor statistics,
                                Tensor dout, Tensor dqkv) {
  if (size() == 1) {
    const AttentionOperands gradients = packed_operands(shape(0), dqkv);
    ops_.attention_backward(stream, shape(0), operands(0, qkv, starts), sample_rows(out, sequence_),
                            statistics, sample_rows(dout, sequence_), gradients.query, gradients.key,
                            gradients.value);
    return;
  }
  gather_keys(stream, qkv);
  const std::int64_t heads = batch_ * layout_.heads, whole = sequence_ * size();
  const Tensor parts = statistics.reshape(2 * heads, run_rows());
  const Tensor first = scratch_.tensor(gradients_[0]), second = scratch_.tensor(gradients_[1]);
  ops_.fill(stream, second, 0.0f);  // keys behind the rank's last query get no gradient
  for (int half = 0; half < 2; ++half) {
    const Tensor gradient = half == 0 ? first : second;
    ops_.attention_backward(stream, shape(half), operands(half, qkv, starts), rows(half, out),
                            parts.row_range(half * heads, heads), rows(half, dout), rows(half, dqkv),
                            keys_in(gradient), sample_rows(gradient, whole, key_columns() / 2));
  }
  // The first half's keys are a beginning of the second half's.
  ops_.copy_rows(stream, compute_, batch_, shape(0).keys, key_columns(), sample_rows(first, whole),
                 sample_rows(second, whole), true);
  const Tensor own = scratch_.tensor(own_), gathered = scratch_.tensor(gathered_);
  arrange(stream, gathered, second, false);
  timer_.begin(stream);
  ranks_.reduce_scatter(stream, gathered, own);
  timer_.end(stream);
  ops_.copy_rows(stream, compute_, batch_, sequence_, key_columns(), sample_rows(own, sequence_),
                 sample_rows(dqkv, sequence_, layout_.query()), false);
}

}  // namespace octet
