#include "octet/model/tensor_axis.h"

namespace octet {

TensorAxis::TensorAxis(Device& device, Communicator& ranks, bool sequence_parallel, int chunks,
                       StreamTimer& timer)
    : ranks_(ranks),
      sequence_(sequence_parallel && ranks.size() > 1),
      chunks_(ranks.size() > 1 ? chunks : 1),
      timer_(timer) {
  if (chunks_ == 1) return;
  stream_ = device.make_stream(true);
  ready_ = device.make_event();
  for (int i = 0; i < chunks_; ++i) done_.push_back(device.make_event());
}

void TensorAxis::follow(Stream& compute) const {
  ready_->record(compute);
  ready_->block(*stream_);
}

void TensorAxis::wait(Stream& compute, int number) const {
  timer_.begin(compute);
  done_[static_cast<std::size_t>(number)]->block(compute);
  timer_.end(compute);
}

void TensorAxis::gather_piece(Stream& stream, const Tensor& shard, const Tensor& whole, int number) const {
  ranks_.all_gather(stream, piece(shard.rows, number).of(shard), piece(whole.rows, number).of(whole));
}

void TensorAxis::reduce_piece(Stream& stream, const Tensor& partial, const Tensor& shard, int number) const {
  const Tensor rows = piece(partial.rows, number).of(partial);
  if (sequence_) {
    ranks_.reduce_scatter(stream, rows, piece(shard.rows, number).of(shard));
  } else {
    ranks_.all_reduce(stream, rows, ReduceOp::kSum);
  }
}

Tensor TensorAxis::gather(Stream& stream, Tensor shard, Tensor whole, const PieceWork& product,
                          const Work& meanwhile) const {
  if (sequence_ && overlaps(product, meanwhile)) {
    OCTET_ASSERT(shard.rows % chunks_ == 0 && whole.rows == shard.rows * size());
    follow(stream);
    for (int i = 0; i < chunks_; ++i) {
      gather_piece(*stream_, shard, whole, i);
      done_[static_cast<std::size_t>(i)]->record(*stream_);
    }
    if (meanwhile) meanwhile();
    for (int i = 0; i < chunks_; ++i) {
      wait(stream, i);
      if (product) product(piece(whole.rows, i));
    }
    return whole;
  }
  if (sequence_) {
    timer_.begin(stream);
    for (int i = 0; i < chunks_; ++i) gather_piece(stream, shard, whole, i);
    timer_.end(stream);
  }
  const Tensor all = gathered(shard, whole);
  if (meanwhile) meanwhile();
  if (product) product({0, all.rows});
  return all;
}

Tensor TensorAxis::reduce(Stream& stream, Tensor partial, Tensor shard, const PieceWork& product,
                          const Work& meanwhile) const {
  const Tensor sum = sequence_ ? shard : partial;
  if (overlaps(product, meanwhile)) {
    OCTET_ASSERT(partial.rows % chunks_ == 0 && sum.rows % chunks_ == 0);
    for (int i = 0; i < chunks_; ++i) {
      if (product) product(piece(partial.rows, i));
      follow(stream);
      reduce_piece(*stream_, partial, shard, i);
    }
    done_.back()->record(*stream_);
    if (meanwhile) meanwhile();
    wait(stream, chunks_ - 1);
    return sum;
  }
  if (product) product({0, partial.rows});
  if (meanwhile) meanwhile();
  if (size() == 1) return sum;
  timer_.begin(stream);
  for (int i = 0; i < chunks_; ++i) reduce_piece(stream, partial, shard, i);
  timer_.end(stream);
  return sum;
}

Tensor TensorAxis::gather_all(Stream& stream, Tensor values, Tensor all) const {
  if (size() == 1) return values;
  timer_.begin(stream);
  ranks_.all_gather(stream, values, all);
  timer_.end(stream);
  return all;
}

}  // namespace octet
