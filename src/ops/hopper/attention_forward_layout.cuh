#pragma once

#include "instructions.cuh"
#include "tickets.cuh"
#include "warpgroup.cuh"

/// How attention_forward_kernel.cuh cuts its work, and where things are in shared memory.
namespace octet::hopper::forward {

constexpr int kRows = 64;   ///< query rows of a warpgroup
constexpr int kKeys = 128;  ///< of a tile

/// How a block is laid out for heads of 64 or 128 elements.
template <int kHead>
struct Plan {
  static constexpr int kGroups = kHead == 64 ? 3 : 2;  ///< that compute
  static constexpr int kStages = kHead == 64 ? 4 : 2;  ///< tiles of keys, and of values
  static constexpr int kRegisters = kHead == 64 ? 160 : 240, kLoaderRegisters = kHead == 64 ? 32 : 24;
  static constexpr int kThreads = (1 + kGroups) * kGroup;
  static constexpr int kHalves = kHead / 64;                  ///< of a row: 64 elements, 128 bytes
  static constexpr int kQueryBytes = kHalves * kBoxBytes;     ///< of a warpgroup
  static constexpr int kTileBytes = 2 * kHalves * kBoxBytes;  ///< of keys, or of values
  static constexpr int kBarriers = 4 * kGroups + 4 * kStages;
  /// With room to align to the 1024 bytes of a swizzle.
  static constexpr int kSharedBytes =
      2 * kGroups * kQueryBytes + 2 * kStages * kTileBytes + 8 * kBarriers + Tickets::kBytes + 1024;
};

struct Problem {
  CUtensorMap query, key, value;  ///< boxes of 64 rows
  CUtensorMap out;                ///< boxes of 16 rows
  float* statistics;              ///< [batch, heads, sequence]
  float scale;
  int sequence, keys;
  int kv_heads, group;  ///< key heads, and query heads of each
  int pairs;            ///< samples by key heads
  int section;  ///< pairs that are worked on together, so that their keys and values stay in the cache
  int query_tiles;
  unsigned* taken;        ///< tiles that were asked for, of this and all earlier kernels
  unsigned taken_before;  ///< of all earlier ones
};

/// A tile of queries. Tiles end with the last row, so that the first one may begin before row 0.
struct Tile {
  int sample, head, kv_head;
  int first;   ///< row
  int rounds;  ///< tiles of keys that its last row sees some of
};

__device__ inline int keys_seen(const Problem& p, int end_row) {
  return min(p.keys - p.sequence + end_row, p.keys);
}

/// Section after section, and in each the tiles that see the most keys first.
template <int kHead>
__device__ inline Tile tile_of(const Problem& p, int number) {
  constexpr int kTileRows = Plan<kHead>::kGroups * kRows;
  const int in_section = p.section * p.group * p.query_tiles, section = number / in_section;
  const int within = number - section * in_section;
  const int heads = min(p.section, p.pairs - section * p.section) * p.group;
  const int step = within / heads, index = within - step * heads;
  const int pair = section * p.section + index / p.group;
  Tile tile;
  tile.sample = pair / p.kv_heads;
  tile.kv_head = pair - tile.sample * p.kv_heads;
  tile.head = tile.kv_head * p.group + index % p.group;
  tile.first = (p.sequence + kRows - 1) / kRows * kRows - (step + 1) * kTileRows;
  tile.rounds = (keys_seen(p, tile.first + kTileRows) + kKeys - 1) / kKeys;
  return tile;
}

/// Where things are in shared memory.
template <int kHead>
struct Places {
  using P = Plan<kHead>;
  std::uint32_t begin;

  __device__ std::uint32_t query(int place, int group) const {
    return begin + (place * P::kGroups + group) * P::kQueryBytes;
  }
  __device__ std::uint32_t key(int stage) const {
    return begin + 2 * P::kGroups * P::kQueryBytes + 2 * stage * P::kTileBytes;
  }
  __device__ std::uint32_t value(int stage) const { return key(stage) + P::kTileBytes; }
  __device__ std::uint32_t query_full(int place, int group) const {
    return barrier(place * P::kGroups + group);
  }
  __device__ std::uint32_t query_empty(int place, int group) const {
    return barrier((2 + place) * P::kGroups + group);
  }
  __device__ std::uint32_t key_full(int stage) const { return barrier(4 * P::kGroups + stage); }
  __device__ std::uint32_t key_empty(int stage) const { return key_full(stage) + 8 * P::kStages; }
  __device__ std::uint32_t value_full(int stage) const { return key_full(stage) + 16 * P::kStages; }
  __device__ std::uint32_t value_empty(int stage) const { return key_full(stage) + 24 * P::kStages; }
  __device__ std::uint32_t tickets() const { return barrier(P::kBarriers); }

  __device__ void init() const {
    constexpr int kWarps = kGroup / 32;
    for (int group = 0; group < P::kGroups; ++group) {
      for (int place = 0; place < 2; ++place) {
        barrier_init(query_full(place, group), 1);
        barrier_init(query_empty(place, group), kWarps);
      }
    }
    for (int stage = 0; stage < P::kStages; ++stage) {
      barrier_init(key_full(stage), 1);
      barrier_init(value_full(stage), 1);
      barrier_init(key_empty(stage), P::kGroups * kWarps);
      barrier_init(value_empty(stage), P::kGroups * kWarps);
    }
    Tickets::init(tickets(), 1 + P::kGroups * kWarps);
  }

 private:
  __device__ std::uint32_t barrier(int index) const {
    return begin + 2 * P::kGroups * P::kQueryBytes + 2 * P::kStages * P::kTileBytes + 8 * index;
  }
};

__device__ inline int number_of(const Problem& p, int ticket) {
  return static_cast<int>(gridDim.x + (static_cast<unsigned>(ticket) - p.taken_before));
}

}  // namespace octet::hopper::forward
