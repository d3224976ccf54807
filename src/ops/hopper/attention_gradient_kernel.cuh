#pragma once

#include <cuda_bf16.h>

#include "instructions.cuh"
#include "tickets.cuh"
#include "warpgroup_product.cuh"

/// The gradient of causal attention in bfloat16 with float32 sums, as in FlashAttention-3 (Shah et al. 2024):
/// a piece of work is 128 keys of a key head, of whose gradients two warpgroups hold 64 rows each, while the
/// queries that see them come by. The gradients of queries are sums over pieces: pieces add their part to a
/// tile in global memory in the order of falling keys, one after the other, so that every run gives the same
/// bits. Pieces begin with the queries of their own keys: then that order is the one in which they get there,
/// and none waits for long. The first part is stored and the last is followed by the conversion, so that
/// tiles need neither zeros nor a kernel of their own, and few of them are in use at once.
namespace octet::hopper {

constexpr int kKeys = 128;   ///< of a piece
constexpr int kGroup = 128;  ///< threads of a warpgroup
constexpr int kGradientThreads = 3 * kGroup;

/// How the gradient of heads of this size is cut.
template <int kHead>
struct GradientTiles {
  static_assert(kHead == 64 || kHead == 128);
  static constexpr int kQueries = kHead == 64 ? 128 : 64;  ///< that come by at once
  static constexpr int kStages = 2;
  static constexpr int kKeyBytes = kKeys * kHead * 2, kQueryBytes = kQueries * kHead * 2;
  static constexpr int kRowBytes = kQueries * 8;
  static constexpr int kStageBytes = 2 * kQueryBytes;
  static constexpr int kScoreBytes = kKeys * kQueries * 2;
  static constexpr int kSums = kQueries * kHead;  ///< of a tile of query gradients
  static constexpr int kSharedBytes =
      1024 + 2 * kKeyBytes + kStages * (kStageBytes + kRowBytes) + 2 * kScoreBytes + kSums * 4 + 128;
};

struct AttentionGradient {
  CUtensorMap query, key, value, dout;  ///< boxes of 64 columns; 128 keys, or the queries of a tile
  const float2* rows;  ///< [batch·heads, q_tiles·kQueries]: log2(e) · log-sum-exp and sum(out · dout)
  float* sums;         ///< [slots, group, q_tiles, kSums]: of query gradients
  unsigned* counters;  ///< [slots, group, q_tiles]: what was done to each of these tiles; 0 at first
  unsigned* taken;     ///< pieces; 0 at first
  __nv_bfloat16 *dquery, *dkey, *dvalue;
  std::int64_t dquery_row, dquery_sample, dkey_row, dkey_sample, dvalue_row, dvalue_sample;  ///< strides
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
    result.first_tile = max(0, result.part * kKeys - (p.keys - p.sequence)) / kQueries;
    return result;
  }
};

/// A tile of query gradients as pieces add to it.
struct QueryTile {
  std::int64_t index;    ///< in counters, and in sums
  unsigned turn, parts;  ///< the count when it is this piece's turn; parts in all

  template <int kQueries>
  __device__ static QueryTile at(const AttentionGradient& p, const Piece& piece, int head, int tile) {
    const int last = min(p.pieces - 1, ((tile + 1) * kQueries - 1 + p.keys - p.sequence) / kKeys);
    QueryTile result;
    result.index = (std::int64_t{piece.pair % p.slots} * p.group + head) * p.q_tiles + tile;
    result.parts = static_cast<unsigned>(last + 1);
    // Every pair that had the slot before added all its parts, and said when they were converted.
    result.turn = static_cast<unsigned>(piece.pair / p.slots) * (result.parts + 1) +
                  static_cast<unsigned>(last - piece.part);
    return result;
  }
};

__device__ inline std::uint32_t two_bfloat16(float a, float b) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
  return *reinterpret_cast<const std::uint32_t*>(&pair);
}

/// Calls body(head of the group, tile) for all queries of a piece, in order.
template <typename Body>
__device__ inline void for_queries(const AttentionGradient& p, const Piece& piece, Body body) {
  for (int head = 0; head < p.group; ++head) {
    for (int tile = piece.first_tile; tile < p.q_tiles; ++tile) body(head, tile);
  }
}

/// Addresses in shared memory.
template <int kHead>
struct GradientMemory {
  using Tiles = GradientTiles<kHead>;

  std::uint32_t begin;

  __device__ explicit GradientMemory(const void* memory) : begin((shared_address(memory) + 1023) & ~1023u) {}

  __device__ std::uint32_t key() const { return begin; }
  __device__ std::uint32_t value() const { return begin + Tiles::kKeyBytes; }
  __device__ std::uint32_t query(int stage) const {
    return begin + 2 * Tiles::kKeyBytes + stage * Tiles::kStageBytes;
  }
  __device__ std::uint32_t dout(int stage) const { return query(stage) + Tiles::kQueryBytes; }
  /// Score gradients, keys by queries: 64 queries at a time.
  __device__ std::uint32_t scores(int turn) const {
    return query(Tiles::kStages) + turn * Tiles::kScoreBytes;
  }
  __device__ std::uint32_t sums() const { return scores(2); }
  __device__ std::uint32_t rows(int stage) const {
    return sums() + Tiles::kSums * 4 + stage * Tiles::kRowBytes;
  }
  __device__ std::uint32_t tickets() const { return rows(Tiles::kStages); }
  // Barriers. Keys and values have come, and are no longer needed; so have queries.
  __device__ std::uint32_t keys_full() const { return tickets() + Tickets::kBytes; }
  __device__ std::uint32_t keys_empty() const { return keys_full() + 8; }
  __device__ std::uint32_t full(int stage) const { return keys_full() + 16 + 8 * stage; }
  __device__ std::uint32_t empty(int stage) const { return full(Tiles::kStages) + 8 * stage; }
  /// Query gradients of this piece lie in sums(), and may be overwritten.
  __device__ std::uint32_t sums_full() const { return empty(Tiles::kStages); }
  __device__ std::uint32_t sums_empty() const { return sums_full() + 8; }

  __device__ void init() const {
    constexpr int kReaders = 2 * kGroup / 32 + 2 + 2;  // computing warps, who loads, who adds, who convert
    Tickets::init(tickets(), kReaders);
    barrier_init(keys_full(), 1);
    barrier_init(keys_empty(), 2);
    for (int stage = 0; stage < Tiles::kStages; ++stage) {
      barrier_init(full(stage), 1);
      barrier_init(empty(stage), 2);
    }
    barrier_init(sums_full(), 2 * kGroup / 32);
    barrier_init(sums_empty(), 1);
    barriers_ready();
  }
};

/// A place in a ring, and the parity of its present use.
template <int kPlaces>
struct RingPlace {
  int place = 0, parity = 0;
  __device__ void advance() {
    if (++place == kPlaces) place = 0, parity ^= 1;
  }
};

/// One thread: what the computing warpgroups read.
template <int kHead>
__device__ inline void load_operands(const AttentionGradient& p, const GradientMemory<kHead>& at,
                                     int pieces) {
  using Tiles = GradientTiles<kHead>;
  Tickets tickets(at.tickets());
  RingPlace<Tiles::kStages> ring;
  RingPlace<1> keys;
  tickets.ask(p.taken);
  for (int number; (number = tickets.next<false>()) < pieces;) {
    const Piece piece = Piece::at<Tiles::kQueries>(p, number);
    bool keys_asked = false;
    for_queries(p, piece, [&](int head, int tile) {
      const int query_head = piece.kv_head * p.group + head;
      wait(at.empty(ring.place), ring.parity ^ 1);
      arrive_expecting(at.full(ring.place), Tiles::kStageBytes + Tiles::kRowBytes);
      for (int part = 0; part < kHead / 64; ++part) {
        load(at.query(ring.place) + part * Tiles::kQueries * 128, p.query, at.full(ring.place),
             query_head * kHead + part * 64, tile * Tiles::kQueries, piece.sample);
        load(at.dout(ring.place) + part * Tiles::kQueries * 128, p.dout, at.full(ring.place),
             query_head * kHead + part * 64, tile * Tiles::kQueries, piece.sample);
      }
      const std::int64_t row =
          (std::int64_t{piece.sample} * p.kv_heads * p.group + query_head) * p.q_tiles + tile;
      load_bytes(at.rows(ring.place), p.rows + row * Tiles::kQueries, Tiles::kRowBytes, at.full(ring.place));
      ring.advance();
      // After the first queries, for which there is room before the keys of the last piece are given up.
      if (!keys_asked) {
        keys_asked = true;
        wait(at.keys_empty(), keys.parity ^ 1);
        arrive_expecting(at.keys_full(), 2 * Tiles::kKeyBytes);
        for (int part = 0; part < kHead / 64; ++part) {
          load(at.key() + part * kKeys * 128, p.key, at.keys_full(), piece.kv_head * kHead + part * 64,
               piece.part * kKeys, piece.sample);
          load(at.value() + part * kKeys * 128, p.value, at.keys_full(), piece.kv_head * kHead + part * 64,
               piece.part * kKeys, piece.sample);
        }
        keys.advance();
      }
      // Not sooner: pieces that come after it wait for the next one.
      if (head == p.group - 1 && tile == p.q_tiles - 1) tickets.ask(p.taken);
    });
  }
}

/// One warp: adds the query gradients of this block to those of others, in turn.
template <int kHead>
__device__ inline void add_query_gradients(const AttentionGradient& p, const GradientMemory<kHead>& at,
                                           int pieces) {
  using Tiles = GradientTiles<kHead>;
  Tickets tickets(at.tickets());
  int parity = 0;
  for (int number; (number = tickets.next<true>()) < pieces;) {
    if (threadIdx.x % 32 != 0) continue;
    const Piece piece = Piece::at<Tiles::kQueries>(p, number);
    for_queries(p, piece, [&](int head, int tile) {
      const QueryTile sums = QueryTile::at<Tiles::kQueries>(p, piece, head, tile);
      float* const to = p.sums + sums.index * Tiles::kSums;
      unsigned* const counter = p.counters + sums.index;
      wait(at.sums_full(), parity);
      wait_for_count(counter, sums.turn);
      if (sums.turn % (sums.parts + 1) == 0) {
        store_floats_at(to, at.sums(), Tiles::kSums * 4);
      } else {
        add_floats_at(to, at.sums(), Tiles::kSums * 4);
      }
      wait_for_reads<0>();
      arrive(at.sums_empty());
      wait_for_stores();
      count_on(counter);
      parity ^= 1;
    });
  }
}

/// Two warps: query gradients of the piece that adds the last part to them become bfloat16. They lie in tiles
/// as the computing threads had them in registers.
template <int kHead>
__device__ inline void convert_query_gradients(const AttentionGradient& p, const GradientMemory<kHead>& at,
                                               int pieces) {
  using Tiles = GradientTiles<kHead>;
  constexpr int kThreads = 64, kAtOnce = 4;
  const int thread = static_cast<int>(threadIdx.x) % kThreads;
  Tickets tickets(at.tickets());
  for (int number; (number = tickets.next<true>()) < pieces;) {
    const Piece piece = Piece::at<Tiles::kQueries>(p, number);
    if (piece.part != 0) continue;
    for_queries(p, piece, [&](int head, int tile) {
      const QueryTile sums = QueryTile::at<Tiles::kQueries>(p, piece, head, tile);
      wait_for_count(p.counters + sums.index, sums.turn + 1);
      const float4* const from = reinterpret_cast<const float4*>(p.sums + sums.index * Tiles::kSums);
      __nv_bfloat16* const to =
          p.dquery + piece.sample * p.dquery_sample + (std::int64_t{piece.kv_head} * p.group + head) * kHead;
      for (int i = thread; i < Tiles::kSums / 4; i += kThreads * kAtOnce) {
        float4 four[kAtOnce];
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) four[j] = __ldcg(from + i + j * kThreads);
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
          const int place = (i + j * kThreads) % (2 * kGroup), eight = (i + j * kThreads) / (2 * kGroup);
          const int half = place / kGroup, lane = place % 32;
          const int row =
              tile * Tiles::kQueries + (kHead == 64 ? half * 64 : 0) + place % kGroup / 32 * 16 + lane / 4;
          const int col = (kHead == 64 ? 0 : half * 64) + eight * 8 + lane % 4 * 2;
          const std::uint32_t words[2] = {two_bfloat16(four[j].x * p.scale, four[j].y * p.scale),
                                          two_bfloat16(four[j].z * p.scale, four[j].w * p.scale)};
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            if (row + 8 * h < p.sequence) {
              *reinterpret_cast<std::uint32_t*>(to + (row + 8 * h) * p.dquery_row + col) = words[h];
            }
          }
        }
      }
      named_barrier(1, kThreads);
      if (thread == 0) count_on(p.counters + sums.index);
    });
  }
}

/// 64 rows of key or value gradients, from a warpgroup's registers.
template <int kHead>
__device__ inline void write_rows(float (&d)[kHead / 2], float scale, __nv_bfloat16* to, std::int64_t stride,
                                  int first_row, int rows) {
  const int thread = static_cast<int>(threadIdx.x) % kGroup, lane = thread % 32;
  const int row = first_row + thread / 32 * 16 + lane / 4;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (row + 8 * h >= rows) continue;
    __nv_bfloat16* const at = to + (row + 8 * h) * stride + lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < kHead / 8; ++j) {
      *reinterpret_cast<std::uint32_t*>(at + 8 * j) =
          two_bfloat16(d[4 * j + 2 * h] * scale, d[4 * j + 2 * h + 1] * scale);
    }
  }
}

/// A warpgroup: half of the keys of a piece, by all queries that see them; and of the queries' gradients half
/// of the rows (heads of 64) or columns.
template <int kHead>
__device__ inline void compute_gradients(const AttentionGradient& p, const GradientMemory<kHead>& at,
                                         int pieces, int half) {
  using Tiles = GradientTiles<kHead>;
  constexpr int kQueries = Tiles::kQueries;
  const int thread = static_cast<int>(threadIdx.x) % kGroup, lane = thread % 32;
  const int key_row = half * 64 + thread / 32 * 16 + lane / 4;  // and 8 rows below
  const float scale = p.scale * 1.4426950408889634f;            // log2(e)
  Tickets tickets(at.tickets());
  RingPlace<Tiles::kStages> ring;
  RingPlace<1> keys;
  int turn = 0, sums_parity = 1;
  // Operands of 64 rows, or of 64 columns, of 16 of the sum's index.
  const auto key_half = [&](std::uint32_t tile, int i) {
    return operand_at(tile + i / 4 * kKeys * 128 + half * 64 * 128) + i % 4 * kAcross;
  };
  const auto query_all = [&](std::uint32_t tile, int i) {
    return operand_at(tile + i / 4 * kQueries * 128) + i % 4 * kAcross;
  };
  for (int number; (number = tickets.next<true>()) < pieces;) {
    const Piece piece = Piece::at<kQueries>(p, number);
    float dkey[kHead / 2], dvalue[kHead / 2];
    int more = 0;
    wait(at.keys_full(), keys.parity);
    keys.advance();
    for_queries(p, piece, [&](int, int tile) {
      const std::uint32_t query = at.query(ring.place), dout = at.dout(ring.place);
      float s[kQueries / 2], ds[kQueries / 2];
      wait(at.full(ring.place), ring.parity);
      products_begin();
#pragma unroll
      for (int i = 0; i < kHead / 16; ++i) {
        warpgroup_product<false, false>(s, key_half(at.key(), i), query_all(query, i), i > 0);
      }
      products_commit();
      products_begin();
#pragma unroll
      for (int i = 0; i < kHead / 16; ++i) {
        warpgroup_product<false, false>(ds, key_half(at.value(), i), query_all(dout, i), i > 0);
      }
      products_commit();
      // The first query that sees a key of row 0, as a column of the tile, less that row.
      const int sees = piece.part * kKeys - (p.keys - p.sequence) - tile * kQueries;
      const bool hidden = sees + kKeys > 1;
      std::uint32_t probabilities[kQueries / 16][4], gradients[kQueries / 16][4];
      const std::uint32_t rows = at.rows(ring.place) + lane % 4 * 16;
      products_wait<1>();
      settled(s);
#pragma unroll
      for (int j = 0; j < kQueries / 8; ++j) {
        const float4 two = load_floats(rows + j * 64);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float* const pair = s + 4 * j + 2 * h;
          pair[0] = approximate_exp2(pair[0] * scale - two.x);
          pair[1] = approximate_exp2(pair[1] * scale - two.z);
          if (hidden) {
            const int first = sees + key_row + 8 * h, col = 8 * j + lane % 4 * 2;
            if (col < first) pair[0] = 0.0f;
            if (col + 1 < first) pair[1] = 0.0f;
          }
          probabilities[j / 2][j % 2 * 2 + h] = two_bfloat16(pair[0], pair[1]);
        }
      }
      products_wait<0>();
      settled(ds);
      products_begin();
#pragma unroll
      for (int i = 0; i < kQueries / 16; ++i) {
        warpgroup_product<true>(dvalue, probabilities[i], operand_at(dout) + i * kDown, more | (i > 0));
      }
      products_commit();
#pragma unroll
      for (int j = 0; j < kQueries / 8; ++j) {
        const float4 two = load_floats(rows + j * 64);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int i = 4 * j + 2 * h;
          gradients[j / 2][j % 2 * 2 + h] =
              two_bfloat16(s[i] * (ds[i] - two.y), s[i + 1] * (ds[i + 1] - two.w));
        }
      }
      // Both warpgroups are done with the products that read this place two tiles ago: they met since.
      const std::uint32_t scores = at.scores(turn);
      const int row = half * 64 + thread / 32 * 16 + thread % 16, chunk = lane / 16;
#pragma unroll
      for (int i = 0; i < kQueries / 16; ++i) {
        store_matrices(scores + i / 4 * kKeys * 128 + row * 128 + (((i % 4 * 2 + chunk) ^ (row & 7)) << 4),
                       gradients[i]);
      }
      stores_before_copies();
      named_barrier(2, 2 * kGroup);
      float dquery[32];
      products_begin();
#pragma unroll
      for (int i = 0; i < kKeys / 16; ++i) {
        const std::uint32_t left = scores + (kHead == 64 ? half * kKeys * 128 : 0);
        const std::uint32_t right = at.key() + (kHead == 64 ? 0 : half * kKeys * 128);
        warpgroup_product<true, true>(dquery, operand_at(left) + i * kDown, operand_at(right) + i * kDown,
                                      i > 0);
      }
      products_commit();
      products_begin();
#pragma unroll
      for (int i = 0; i < kQueries / 16; ++i) {
        warpgroup_product<true>(dkey, gradients[i], operand_at(query) + i * kDown, more | (i > 0));
      }
      products_commit();
      products_wait<1>();
      settled(dquery);
      wait(at.sums_empty(), sums_parity);
      sums_parity ^= 1;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        store_floats(at.sums() + ((i * 2 + half) * kGroup + thread) * 16, dquery[4 * i], dquery[4 * i + 1],
                     dquery[4 * i + 2], dquery[4 * i + 3]);
      }
      stores_before_copies();
      __syncwarp();
      if (lane == 0) arrive(at.sums_full());
      products_wait<0>();
      settled(dkey);
      settled(dvalue);
      if (thread == 0) arrive(at.empty(ring.place));
      ring.advance();
      turn ^= 1;
      more = 1;
    });
    if (thread == 0) arrive(at.keys_empty());
    const int first_row = piece.part * kKeys + half * 64;
    const std::int64_t head = std::int64_t{piece.kv_head} * kHead;
    write_rows<kHead>(dkey, p.scale, p.dkey + piece.sample * p.dkey_sample + head, p.dkey_row, first_row,
                      p.keys);
    write_rows<kHead>(dvalue, 1.0f, p.dvalue + piece.sample * p.dvalue_sample + head, p.dvalue_row, first_row,
                      p.keys);
  }
}

template <int kHead>
__global__ void __launch_bounds__(kGradientThreads, 1)
    attention_gradient_kernel(const __grid_constant__ AttentionGradient p) {
  extern __shared__ unsigned char memory[];
  const GradientMemory<kHead> at(memory);
  const int group = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kGroup, 0);
  const int warp = static_cast<int>(threadIdx.x) % kGroup / 32;
  const int pieces = p.batch * p.kv_heads * p.pieces;
  if (threadIdx.x == 0) at.init();
  __syncthreads();
  if (group > 0) {
    raise_registers_to<232>();
    compute_gradients<kHead>(p, at, pieces, group - 1);
    return;
  }
  lower_registers_to<40>();
  if (warp == 0) {
    if (threadIdx.x == 0) load_operands<kHead>(p, at, pieces);
  } else if (warp == 1) {
    add_query_gradients<kHead>(p, at, pieces);
  } else {
    convert_query_gradients<kHead>(p, at, pieces);
  }
}

}  // namespace octet::hopper
