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

/// What is where, in this order: sums of query gradients, row values, counters.
struct GradientScratch {
  std::int64_t q_tiles, pieces, padded_rows, slots;  ///< as in AttentionGradient; rows of whole tiles
  std::int64_t sums_bytes, rows_bytes, counters_bytes;

  std::int64_t bytes() const { return sums_bytes + rows_bytes + counters_bytes; }
};

inline GradientScratch gradient_scratch(const AttentionShape& shape, int multiprocessors) {
  const auto round_up = [](std::int64_t bytes) { return (bytes + 255) / 256 * 256; };
  const HeadLayout& heads = shape.layout;
  const std::int64_t queries = tile_queries(heads.head_size);
  GradientScratch result{};
  result.q_tiles = (shape.sequence + queries - 1) / queries;
  result.pieces = (shape.key_rows() + kPieceKeys - 1) / kPieceKeys;
  result.padded_rows = shape.batch * heads.heads * result.q_tiles * queries;
  // Twice as many key heads as are at work on the average: the piece of a head that is last takes twice as
  // long.
  result.slots =
      std::min<std::int64_t>(shape.batch * heads.kv_heads, 2 * (multiprocessors / result.pieces) + 6);
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
