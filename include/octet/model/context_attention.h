#pragma once

#include "octet/comm/communicator.h"
#include "octet/ops/ops.h"
#include "octet/runtime/arena.h"
#include "octet/runtime/stream_timer.h"

namespace octet {

/// Attention of a rank's queries to all keys of their samples. With context parallelism a sample is cut into
/// 2·size runs; a rank has run `rank` and run 2·size - 1 - rank, which makes equal causal work (as in Llama
/// 3, section 3.3.2). Keys and values are gathered over the axis, their gradients reduced.
class ContextAttention {
 public:
  /// `batch` samples of `sequence` tokens on this rank. Without context parallelism nothing is reserved.
  ContextAttention(Ops& ops, Communicator& ranks, StreamTimer& timer, const HeadLayout& layout, DType compute,
                   std::int64_t batch, std::int64_t sequence, bool documents_apart, Arena& scratch);

  /// qkv [batch·sequence, layout.packed()], rotated; starts: int32 [1, batch·sequence] as in MicroBatch; out
  /// [batch·sequence, layout.query()]; statistics: float32, batch·heads·sequence elements.
  void forward(Stream& stream, Tensor qkv, Tensor starts, Tensor out, Tensor statistics);
  void backward(Stream& stream, Tensor qkv, Tensor starts, Tensor out, Tensor statistics, Tensor dout,
                Tensor dqkv);

  /// The shape with the most keys, for Workload.
  AttentionShape largest() const;
  bool documents_apart() const { return documents_apart_; }

 private:
  int size() const { return ranks_.size(); }
  std::int64_t run_rows() const { return sequence_ / 2; }
  /// Number, in the sample, of the first (0) or second (1) run of a rank.
  int run_of(int rank, int half) const { return half == 0 ? rank : 2 * size() - 1 - rank; }
  std::int64_t key_columns() const { return std::int64_t{2} * layout_.kv_heads * layout_.head_size; }
  AttentionShape shape(int half) const;
  AttentionOperands operands(int half, Tensor qkv, Tensor starts) const;
  SampleRows rows(int half, Tensor matrix) const;
  SampleRows keys_in(Tensor matrix) const;
  /// Copies runs between the gathered layout (rank, sample, half) and that of whole samples; `to_whole` gives
  /// the direction.
  void arrange(Stream& stream, Tensor gathered, Tensor whole, bool to_whole);
  void gather_keys(Stream& stream, Tensor qkv);

  Ops& ops_;
  Communicator& ranks_;
  StreamTimer& timer_;
  HeadLayout layout_;
  DType compute_;
  std::int64_t batch_, sequence_;
  bool documents_apart_;
  Arena& scratch_;
  int own_ = -1, gathered_ = -1,
      keys_ = -1;  ///< this rank's keys and values, all ranks', and those in the order of the samples
  int gradients_[2] = {-1, -1};  ///< of keys and values, from each half of the queries
};

}  // namespace octet
