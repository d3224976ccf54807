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
  static constexpr int kKeyBytes = kPieceKeys * kHead * 2, kQueryBytes = kQueries * kHead * 2;
  static constexpr int kRowBytes = kQueries * 8;
  static constexpr int kStageBytes = 2 * kQueryBytes;
  static constexpr int kScoreBytes = kPieceKeys * kQueries * 2;
  static constexpr int kSums = kQueries * kHead;  ///< of a tile of query gradients
  static constexpr int kBarriers = 2 * (kKeyStages + kStages + kSumPlaces);
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
  const float2* rows;  ///< [batch·heads, q_tiles·kQueries]: log2(e) · log-sum-exp and sum(out · dout)
  float* sums;         ///< [slots, group, q_tiles, kSums]: of query gradients
  unsigned* counters;  ///< [slots, group, q_tiles]: what was done to each of these tiles; 0 at first
  unsigned* taken;     ///< pieces; 0 at first
  int batch, kv_heads, group;  ///< group: query heads of a key head
  int sequence, keys;          ///< rows of a sample
  int q_tiles, pieces;         ///< of a sample's queries, and of its keys
  int slots;                   ///< key heads of samples whose query gradients can be at work at once
  float scale;
};

/// Piece `number` of all: the last keys of a key head come first, since the others wait for their parts.
struct Piece {
  int pair, sample, kv_head, part;  ///< pair: of sample and key head; part: which 128 keys
  int first_tile;                   ///< of queries that see any of them

  template <int kQueries>
  __device__ static Piece at(const AttentionGradient& p, int number) {
    Piece result;
    result.pair = number / p.pieces;
    result.part = p.pieces - 1 - number % p.pieces;
    result.sample = result.pair / p.kv_heads;
    result.kv_head = result.pair % p.kv_heads;
    result.first_tile = max(0, result.part * kPieceKeys - (p.keys - p.sequence)) / kQueries;
    return result;
  }
  /// Query gradients of this piece are the last part of the sum.
  __device__ bool is_last() const { return part == 0; }
};

/// The queries that see keys of a piece, head by head.
struct Cursor {
  int head = 0, tile, left;

  __device__ Cursor(const AttentionGradient& p, const Piece& piece)
      : tile(piece.first_tile), left(p.group * (p.q_tiles - piece.first_tile)) {}
  __device__ bool is_last() const { return left == 1; }
  /// By as many tiles, if there are.
  __device__ void skip(const AttentionGradient& p, const Piece& piece, int tiles) {
    for (; tiles > 0 && left > 0; --tiles) advance(p, piece);
  }
  __device__ void advance(const AttentionGradient& p, const Piece& piece) {
    if (++tile == p.q_tiles) tile = piece.first_tile, ++head;
    --left;
  }
};

/// A tile of query gradients as pieces add to it.
struct QueryTile {
  std::int64_t index;    ///< in counters, and in sums
  unsigned turn, parts;  ///< the count when it is this piece's turn; parts in all

  /// The last piece that has a part in a tile.
  template <int kQueries>
  __device__ static int last_part(const AttentionGradient& p, int tile) {
    return min(p.pieces - 1, ((tile + 1) * kQueries - 1 + p.keys - p.sequence) / kPieceKeys);
  }
  template <int kQueries>
  __device__ static QueryTile at(const AttentionGradient& p, const Piece& piece, const Cursor& cursor) {
    const int last = last_part<kQueries>(p, cursor.tile);
    QueryTile result;
    result.index = (std::int64_t{piece.pair % p.slots} * p.group + cursor.head) * p.q_tiles + cursor.tile;
    result.parts = static_cast<unsigned>(last + 1);
    // Every pair that had the slot before counted all its parts.
    result.turn =
        static_cast<unsigned>(piece.pair / p.slots) * result.parts + static_cast<unsigned>(last - piece.part);
    return result;
  }
  __device__ bool is_first() const { return turn % parts == 0; }
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
  __device__ std::uint32_t empty(int stage) const { return full(kStages + stage); }
  /// sums() may be written, and hold the other parts where this is the last one; they were written.
  __device__ std::uint32_t sums_ready(int place) const { return empty(kStages + place); }
  __device__ std::uint32_t sums_full(int place) const { return sums_ready(kSumPlaces + place); }

  __device__ void init() const {
    constexpr int kWarps = 2 * kGroup / 32;
    Tickets::init(tickets(), kWarps + 1 + kSumPlaces);  // and who loads, and who add
    for (int stage = 0; stage < kKeyStages; ++stage) {
      barrier_init(keys_full(stage), 1);
      barrier_init(keys_empty(stage), 2);
    }
    for (int stage = 0; stage < kStages; ++stage) {
      barrier_init(full(stage), 1);
      barrier_init(empty(stage), 2);
    }
    for (int place = 0; place < kSumPlaces; ++place) {
      barrier_init(sums_ready(place), 1);
      barrier_init(sums_full(place), kWarps);
    }
    barriers_ready();
  }
};

}  // namespace octet::hopper
