#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "octet/comm/communicator.h"
#include "octet/runtime/stream_timer.h"

namespace octet {

/// A run of the tokens of a micro-batch: rows of all arrays that have one for each of them.
struct TokenPiece {
  std::int64_t begin = 0, rows = 0;

  Tensor of(const Tensor& all) const { return all.row_range(begin, rows); }
};

/// Tensor parallelism as the layers see it. Without sequence parallelism activations between blocks are whole
/// on every tensor rank; with it each rank holds an equal share of their rows (Korthikanti et al. 2022).
///
/// The t tokens of a micro-batch may be cut into n pieces, so that the collective of one piece travels on a
/// stream of the axis' own while the product of another computes. Piece i is the tokens [i·t/n, (i+1)·t/n) of
/// the whole, and rank r's share of it is the r-th of its T equal runs: a share has its rows in the order of
/// pieces, so piece i of a share is contiguous too, and to gather it, or to reduce and scatter it, is one
/// collective on arrays as they lie. Whole arrays are in the order of tokens always; which tokens a share
/// holds concerns nobody else, since all that works on shares works row by row. With n = 1 a share is
/// one run, and everything runs on the caller's stream.
class TensorAxis {
 public:
  /// What computes, on the caller's stream, the rows of a piece.
  using PieceWork = std::function<void(const TokenPiece&)>;
  using Work = std::function<void()>;

  /// `chunks`: n above; it divides the rows of all shares.
  TensorAxis(Device& device, Communicator& ranks, bool sequence_parallel, int chunks, StreamTimer& timer);

  int rank() const { return ranks_.rank(); }
  int size() const { return ranks_.size(); }
  bool sequence_parallel() const { return sequence_; }
  /// Pieces of a micro-batch; one where there is nothing to exchange.
  int chunks() const { return chunks_; }
  std::int64_t shard(std::int64_t rows) const { return sequence_ ? rows / size() : rows; }

  /// All rows of an activation: `shard` itself, or gathered into `whole`. `product` is called for each piece,
  /// in order, once the stream finds its rows there: later pieces are gathered beside it. `meanwhile` is
  /// called before the stream waits for what is left.
  Tensor gather(Stream& stream, Tensor shard, Tensor whole, const PieceWork& product = {},
                const Work& meanwhile = {}) const;
  /// Where gather() leaves the rows.
  Tensor gathered(const Tensor& shard, const Tensor& whole) const { return sequence_ ? whole : shard; }
  /// The sum over ranks of partial results: in place in `partial`, or this rank's rows of it in `shard`,
  /// which does not overlap `partial`. `product` is called for each piece, in order, to compute its rows of
  /// `partial`: earlier pieces are summed beside it. `meanwhile` is called before the stream waits for the
  /// last.
  Tensor reduce(Stream& stream, Tensor partial, Tensor shard, const PieceWork& product = {},
                const Work& meanwhile = {}) const;
  /// Every rank's copy of `values`, in rank order.
  Tensor gather_all(Stream& stream, Tensor values, Tensor all) const;

 private:
  TokenPiece piece(std::int64_t rows, int number) const {
    return {number * (rows / chunks_), rows / chunks_};
  }
  /// Whether the caller has something to do beside the collective.
  bool overlaps(const PieceWork& product, const Work& meanwhile) const {
    return chunks_ > 1 && (product || meanwhile);
  }
  void gather_piece(Stream& stream, const Tensor& shard, const Tensor& whole, int number) const;
  void reduce_piece(Stream& stream, const Tensor& partial, const Tensor& shard, int number) const;
  /// The axis' stream goes on behind what is queued on `compute`.
  void follow(Stream& compute) const;
  /// Lets `compute` go on only behind the collective of a piece.
  void wait(Stream& compute, int number) const;

  Communicator& ranks_;
  bool sequence_;
  int chunks_;
  StreamTimer& timer_;
  std::unique_ptr<Stream> stream_;  ///< null with one chunk, as are the events
  std::unique_ptr<Event> ready_;
  std::vector<std::unique_ptr<Event>> done_;  ///< of each piece
};

}  // namespace octet
