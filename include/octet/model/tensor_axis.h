#pragma once

#include "octet/comm/communicator.h"
#include "octet/runtime/stream_timer.h"

namespace octet {

/// Tensor parallelism as the layers see it. Without sequence parallelism activations between blocks are whole
/// on every tensor rank; with it each rank holds an equal run of their rows (Korthikanti et al. 2022).
class TensorAxis {
 public:
  TensorAxis(Communicator& ranks, bool sequence_parallel, StreamTimer& timer)
      : ranks_(ranks), sequence_(sequence_parallel && ranks.size() > 1), timer_(timer) {}

  int rank() const { return ranks_.rank(); }
  int size() const { return ranks_.size(); }
  bool sequence_parallel() const { return sequence_; }
  std::int64_t shard(std::int64_t rows) const { return sequence_ ? rows / size() : rows; }

  /// All rows of an activation: `shard` itself, or gathered into `whole`.
  Tensor gather(Stream& stream, Tensor shard, Tensor whole) const;
  /// The sum over ranks of partial results: in place in `partial`, or this rank's rows of it in `shard`.
  Tensor reduce(Stream& stream, Tensor partial, Tensor shard) const;
  /// Every rank's copy of `values`, in rank order.
  Tensor gather_all(Stream& stream, Tensor values, Tensor all) const;

 private:
  Communicator& ranks_;
  bool sequence_;
  StreamTimer& timer_;
};

}  // namespace octet
