#include "octet/model/tensor_axis.h"

namespace octet {

Tensor TensorAxis::gather(Stream& stream, Tensor shard, Tensor whole) const {
  return sequence_ ? gather_all(stream, shard, whole) : shard;
}

Tensor TensorAxis::reduce(Stream& stream, Tensor partial, Tensor shard) const {
  if (size() == 1) return partial;
  timer_.begin(stream);
  if (sequence_) {
    ranks_.reduce_scatter(stream, partial, shard);
  } else {
    ranks_.all_reduce(stream, partial, ReduceOp::kSum);
  }
  timer_.end(stream);
  return sequence_ ? shard : partial;
}

Tensor TensorAxis::gather_all(Stream& stream, Tensor values, Tensor all) const {
  if (size() == 1) return values;
  timer_.begin(stream);
  ranks_.all_gather(stream, values, all);
  timer_.end(stream);
  return all;
}

}  // namespace octet
