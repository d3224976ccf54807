#pragma once

#include "attention_gradient_scratch.h"
#include "instructions.cuh"
#include "tickets.cuh"
#include "warpgroup.cuh"

/// How attention_gradient_kernel.cuh cuts its work, and where things are in shared memory.
namespace octet::hopper {

constexpr int kGradientThreads = 3 * kGroup;

/// How the gradient of heads of this size is cut.
template <int kHead>
struct GradientTiles {
  static_assert(kHead == 64 || kHead == 128);
  static constexpr int kQueries = tile_queries(kHead);
  static constexpr int kStages = 2, kKeyStages = kHead == 64 ? 2 : 1, kSumPlaces = kHead == 64 ? 1 : 2;
  static constexpr int kAdders = 2;  ///< threads that add query gradients
  static constexpr int kKeyBytes = kPieceKeys * kHead * 2, kQueryBytes = kQueries * kHead * 2;
  static constexpr int kRowBytes = kQueries * 8;
  static constexpr int kStageBytes = 2 * kQueryBytes;
  static constexpr int kScoreBytes = kPieceKeys * kQueries * 2;
  static constexpr int kSums = kQueries * kHead;  ///< of a tile of query gradients
  /// Whether queries may come before gradients of outputs, which the next scores do not need.
  static constexpr bool kDoutApart = kHead == 128;
  /// Whether gradients of keys and queries are computed beside the next tile's scores.
  static constexpr bool kLate = kHead == 64;
  static constexpr int kBarriers =
      2 * (kKeyStages + kStages) + 3 * kSumPlaces + (kDoutApart ? kStages : 0) + (kLate ? 2 : 0);
  /// Whether a thread reads row values by fours, for which they are in another order.
  static constexpr bool kWideRows = kHead == 64;
  /// Where the value of a query is among those of a tile.
  __host__ __device__ static constexpr int row_place(int query) {
    return kWideRows ? query / 16 * 16 + query % 8 / 2 * 4 + query % 16 / 8 * 2 + query % 2 : query;
  }
  /// With 256 bytes to align to the 1024 of a swizzle: on GPUs, where a kernel without static shared memory
  /// has its dynamic memory at a multiple of 1024 already, none are needed, and there is no room for more.
  static constexpr int kSharedBytes = 256 + kKeyStages * 2 * kKeyBytes + kStages * (kStageBytes + kRowBytes) +
                                      2 * kScoreBytes + kSumPlaces * kSums * 4 + Tickets::kBytes +
                                      8 * kBarriers;
  static_assert(kSharedBytes <= 227 * 1024, "what a block may have");
};

struct AttentionGradient {
  CUtensorMap query, key, value, dout;  ///< boxes of 64 columns; 128 keys, or the queries of a tile
  CUtensorMap dquery, dkey, dvalue;     ///< boxes of 64 columns and 64 rows
  /// [batch·heads, q_tiles, 2, kQueries]: log2(e) · log-sum-exp, and sum(out · dout), of a tile's queries in
  /// the order of row_place()
  const float* rows;
  float* sums;                 ///< [slots, group, q_tiles, kSums]: of query gradients
  unsigned* counters;          ///< [slots, group, q_tiles]: what was done to each of these tiles; 0 at first
  unsigned* taken;             ///< pieces; 0 at first
  int batch, kv_heads, group;  ///< group: query heads of a key head
  int sequence, keys;          ///< rows of a sample
  int q_tiles, pieces;         ///< of a sample's queries, and of its keys
  int slots;                   ///< key heads of samples whose query gradients can be at work at once
  int mixed;                   ///< key heads of samples whose pieces are taken by turns
  bool rising;                 ///< whether pieces add to query gradients in the order of rising keys
  float scale;
};

/// A piece of work, of which there are `pieces` a pair.
struct Piece {
  int pair, sample, kv_head, part;  ///< pair: of sample and key head; part: which 128 keys
  int first_tile;                   ///< of queries that see any of them
  int sums_head, round;             ///< where the pair's query gradients are; pairs that were there before

  /// The number of the piece with this ticket: pieces of a pair in the order in which they add to query
  /// gradients, and pairs by turns.
  __device__ static int number_of(const AttentionGradient& p, int ticket) {
    const int pairs = p.batch * p.kv_heads;
    if (ticket >= pairs * p.pieces) return ticket;  // there are no more
    const int all = p.mixed * p.pieces, begin = ticket / all * p.mixed, place = ticket % all;
    const int mixed = min(p.mixed, pairs - begin), turn = place / mixed;
    return (begin + place % mixed) * p.pieces + (p.rising ? turn : p.pieces - 1 - turn);
  }
  template <int kQueries>
  __device__ static Piece at(const AttentionGradient& p, int number) {
    Piece result;
    result.pair = number / p.pieces;
    result.part = number % p.pieces;
    result.sample = result.pair / p.kv_heads;
    result.kv_head = result.pair % p.kv_heads;
    result.sums_head = result.pair % p.slots * p.group;
    result.round = result.pair / p.slots;
    result.first_tile = max(0, result.part * kPieceKeys - (p.keys - p.sequence)) / kQueries;
    return result;
  }
};

/// The queries that see keys of a piece, tile by tile and head by head. In the order of rising keys from the
/// last ones down, so that all pieces of a head take the same way and follow one another; in the order of
/// falling keys from those of its own keys up, with which no piece before it began.
struct Cursor {
  int head = 0, tile, left;

  __device__ Cursor(const AttentionGradient& p, const Piece& piece)
      : tile(p.rising ? p.q_tiles - 1 : piece.first_tile), left(p.group * (p.q_tiles - piece.first_tile)) {}
  __device__ bool is_last() const { return left == 1; }
  /// By as many tiles, if there are.
  __device__ void skip(const AttentionGradient& p, int tiles) {
    for (; tiles > 0 && left > 0; --tiles) advance(p);
  }
  __device__ void advance(const AttentionGradient& p) {
    if (++head == p.group) head = 0, tile += p.rising ? -1 : 1;
    --left;
  }
};

/// Of the parts that pieces add to a tile of query gradients, that of one piece.
struct TilePart {
  int before, after;  ///< parts that come before and after it

  template <int kQueries>
  __device__ static TilePart at(const AttentionGradient& p, const Piece& piece, int tile) {
    const int keys = (tile + 1) * kQueries + p.keys - p.sequence;
    const int last = min(p.pieces - 1, (keys - 1) / kPieceKeys);  // piece that has a part
    return p.rising ? TilePart{piece.part, last - piece.part} : TilePart{last - piece.part, piece.part};
  }
};

/// A tile of query gradients as pieces add to it.
struct QueryTile {
  TilePart part;
  std::int64_t index;  ///< in counters, and in sums
  unsigned turn;       ///< the count when it is this piece's turn

  template <int kQueries>
  __device__ static QueryTile at(const AttentionGradient& p, const Piece& piece, const Cursor& cursor) {
    QueryTile result;
    result.part = TilePart::at<kQueries>(p, piece, cursor.tile);
    result.index = std::int64_t{piece.sums_head + cursor.head} * p.q_tiles + cursor.tile;
    // Every pair that had the slot before counted all its parts.
    const int parts = result.part.before + 1 + result.part.after;
    result.turn = static_cast<unsigned>(piece.round * parts + result.part.before);
    return result;
  }
};

/// Addresses in shared memory.
template <int kHead>
struct GradientMemory {
  using Tiles = GradientTiles<kHead>;
  static constexpr int kStages = Tiles::kStages, kKeyStages = Tiles::kKeyStages,
                       kSumPlaces = Tiles::kSumPlaces;

  std::uint32_t begin;

  __device__ explicit GradientMemory(const void* memory) : begin((shared_address(memory) + 1023) & ~1023u) {}

  __device__ std::uint32_t key(int stage) const { return begin + stage * 2 * Tiles::kKeyBytes; }
  __device__ std::uint32_t value(int stage) const { return key(stage) + Tiles::kKeyBytes; }
  __device__ std::uint32_t query(int stage) const { return key(kKeyStages) + stage * Tiles::kStageBytes; }
  __device__ std::uint32_t dout(int stage) const { return query(stage) + Tiles::kQueryBytes; }
  /// Score gradients, keys by queries, 64 queries at a time. A warpgroup writes boxes of its 64 keys.
  __device__ std::uint32_t scores(int turn) const { return query(kStages) + turn * Tiles::kScoreBytes; }
  __device__ std::uint32_t box(int turn, int half, int i) const {
    return scores(turn) + (2 * i + half) * kBoxBytes;
  }
  /// Query gradients on their way: of each warpgroup its registers, or in the end a box.
  __device__ std::uint32_t sums(int place, int half) const {
    return scores(2) + (2 * place + half) * Tiles::kSums * 2;
  }
  __device__ std::uint32_t rows(int stage) const { return sums(kSumPlaces, 0) + stage * Tiles::kRowBytes; }
  __device__ std::uint32_t tickets() const { return rows(kStages); }
  // Barriers. Keys and values have come, and are no longer needed; so have queries.
  __device__ std::uint32_t keys_full(int stage) const { return tickets() + Tickets::kBytes + 8 * stage; }
  __device__ std::uint32_t keys_empty(int stage) const { return keys_full(kKeyStages + stage); }
  __device__ std::uint32_t full(int stage) const { return keys_empty(kKeyStages + stage); }
  __device__ std::uint32_t dout_full(int stage) const {
    return Tiles::kDoutApart ? full(kStages + stage) : full(stage);
  }
  __device__ std::uint32_t empty(int stage) const {
    return full((Tiles::kDoutApart ? 2 : 1) * kStages + stage);
  }
  /// sums() may be written, and hold the other parts where this is the last one; they were written.
  __device__ std::uint32_t sums_ready(int place) const { return empty(kStages + place); }
  __device__ std::uint32_t sums_full(int place) const { return sums_ready(kSumPlaces + place); }
  /// They were copied from there.
  __device__ std::uint32_t sums_read(int place) const { return sums_full(kSumPlaces + place); }
  /// Of kLate: both warpgroups' score gradients are there.
  __device__ std::uint32_t scores_full(int turn) const { return sums_read(kSumPlaces + turn); }

  __device__ void init() const {
    constexpr int kWarps = 2 * kGroup / 32;
    Tickets::init(tickets(), kWarps + 1 + Tiles::kAdders);  // and who loads, and who add
    for (int stage = 0; stage < kKeyStages; ++stage) {
      barrier_init(keys_full(stage), 1);
      barrier_init(keys_empty(stage), 2);
    }
    for (int stage = 0; stage < kStages; ++stage) {
      barrier_init(full(stage), 1);
      if (Tiles::kDoutApart) barrier_init(dout_full(stage), 1);
      barrier_init(empty(stage), 2);
    }
    for (int place = 0; place < kSumPlaces; ++place) {
      barrier_init(sums_ready(place), 1);
      barrier_init(sums_full(place), kWarps);
      barrier_init(sums_read(place), 1);
    }
    for (int turn = 0; Tiles::kLate && turn < 2; ++turn) barrier_init(scores_full(turn), kWarps);
    barriers_ready();
  }
};

}  // namespace octet::hopper
