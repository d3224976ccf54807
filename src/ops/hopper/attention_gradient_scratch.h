#pragma once

#include <algorithm>
#include <cstdint>

#include "octet/ops/ops.h"

/// The scratch memory of AttentionGradients: all that can be said of it without a GPU.
namespace octet::hopper {

constexpr int kPieceKeys = 128;  ///< of a piece of work
/// Of a tile of queries, that come by at once.
constexpr int tile_queries(int head_size) {
  return head_size == 64 ? 128 : 64;
}

/// What is where, in this order: sums of query gradients, row values, counters; and in which order they come.
struct GradientScratch {
  std::int64_t q_tiles, pieces, padded_rows, slots, mixed;  ///< as in AttentionGradient; rows of whole tiles
  bool rising;                                              ///< as in AttentionGradient
  std::int64_t sums_bytes, rows_bytes, counters_bytes;

  std::int64_t bytes() const { return sums_bytes + rows_bytes + counters_bytes; }
};

/// Whether pieces of these key heads of samples, the longest of so many tiles of queries, add to query
/// gradients in the order of rising keys. Then the longest pieces come first, so that multiprocessors end at
/// the same time, but all pieces of a head begin with the same queries and wait for one another; a simulation
/// says for 7 / longest of the time. In the order of falling keys they hardly wait, but the longest pieces
/// come last, and multiprocessors wait in the end, for 0.6 of the time that such a piece takes.
inline bool adds_by_rising_keys(std::int64_t pairs, std::int64_t pieces, std::int64_t longest,
                                int multiprocessors) {
  const double longest_pieces =
      static_cast<double>(pairs * (pieces + 1)) / 2 / multiprocessors;  // time of all
  return 7.0 / static_cast<double>(longest) < 0.6 / longest_pieces;
}

inline GradientScratch gradient_scratch(const AttentionShape& shape, int multiprocessors) {
  const auto round_up = [](std::int64_t bytes) { return (bytes + 255) / 256 * 256; };
  const HeadLayout& heads = shape.layout;
  const std::int64_t queries = tile_queries(heads.head_size), pairs = shape.batch * heads.kv_heads;
  GradientScratch result{};
  result.q_tiles = (shape.sequence + queries - 1) / queries;
  result.pieces = (shape.key_rows() + kPieceKeys - 1) / kPieceKeys;
  result.padded_rows = shape.batch * heads.heads * result.q_tiles * queries;
  const std::int64_t longest = heads.heads / heads.kv_heads * result.q_tiles;
  result.rising = adds_by_rising_keys(pairs, result.pieces, longest, multiprocessors);
  // By turns, so that pieces of a head do not come too soon after one another. Of more heads, the tiles that
  // are added to would not stay in the cache.
  result.mixed = result.rising ? std::clamp<std::int64_t>(512 / result.pieces, 1, 8) : 1;
  // Twice as many as are at work on the average, since pieces take up to twice as long as on the average.
  result.slots = std::min<std::int64_t>(pairs, 2 * (multiprocessors / result.pieces) + 6 + result.mixed);
  const std::int64_t tiles = result.slots * (heads.heads / heads.kv_heads) * result.q_tiles;
  result.sums_bytes = tiles * queries * heads.head_size * 4;
  result.rows_bytes = round_up(result.padded_rows * 8);
  result.counters_bytes = round_up((tiles + 1) * 4);
  return result;
}

/// The most that gradient_scratch() takes of all shapes with these queries and no more keys. Fewer keys are
/// fewer pieces a head, so that more heads are at work at once: the fewest keys take the most.
inline std::int64_t most_gradient_scratch(AttentionShape shape, int multiprocessors) {
  shape.keys = shape.sequence;
  return gradient_scratch(shape, multiprocessors).bytes();
}

}  // namespace octet::hopper
