#pragma once

#include <type_traits>

#include "attention_gradient_layout.cuh"
#include "instructions.cuh"
#include "tickets.cuh"
#include "warpgroup.cuh"
#include "warpgroup_product.cuh"

/// The gradient of causal attention in bfloat16 with float32 sums, as in FlashAttention-3 (Shah et al. 2024):
/// a piece of work is 128 keys of a key head, of whose gradients two warpgroups hold 64 rows each, while the
/// queries that see them come by. The gradients of queries are sums over pieces: pieces add their part to a
/// tile in global memory in the order of their keys, rising or falling, one after the other, so that every
/// run gives the same bits. Pieces take queries in such an order that they get there one after the other,
/// too, so that none waits for long. The first part is stored and the last one becomes the result, so that
/// tiles need neither zeros nor a pass of their own, and few of them are in use at once.
///
/// Pieces wait for pieces of lower tickets alone: for those before them of the same key head, and for the key
/// head that had the memory of their tiles before. Blocks take tickets in rising order and work on them one
/// after the other, so that of all unfinished pieces that are taken the lowest waits for none, however few
/// blocks run at once.
namespace octet::hopper {

/// One thread: what the computing warpgroups read.
template <int kHead>
__device__ inline void load_operands(const AttentionGradient& p, const GradientMemory<kHead>& at,
                                     int pieces) {
  using Tiles = GradientTiles<kHead>;
  Tickets tickets(at.tickets());
  RingPlace<Tiles::kStages> ring;
  RingPlace<Tiles::kKeyStages> keys;
  const auto ask = [&] { tickets.ask(p.taken, [&](int ticket) { return Piece::number_of(p, ticket); }); };
  ask();
  for (int number; (number = tickets.next<false>()) < pieces;) {
    const Piece piece = Piece::at<Tiles::kQueries>(p, number);
    const int first_head = piece.kv_head * p.group;
    const int rows_head = piece.sample * p.kv_heads * p.group + first_head;
    bool keys_asked = false;
    for (Cursor cursor(p, piece); cursor.left > 0; cursor.advance(p)) {
      // All that can be computed before the place is free.
      const int head = first_head + cursor.head, col = head * kHead, row = cursor.tile * Tiles::kQueries;
      const float* const rows =
          p.rows + (std::int64_t{rows_head + cursor.head} * p.q_tiles + cursor.tile) * (2 * Tiles::kQueries);
      const std::uint32_t arrival = at.full(ring.place), dout_arrival = at.dout_full(ring.place),
                          query = at.query(ring.place), dout = at.dout(ring.place),
                          rows_place = at.rows(ring.place);
      wait(at.empty(ring.place), ring.parity ^ 1);
      if constexpr (Tiles::kDoutApart) {
        arrive_expecting(arrival, Tiles::kQueryBytes + Tiles::kRowBytes);
        arrive_expecting(dout_arrival, Tiles::kQueryBytes);
      } else {
        arrive_expecting(arrival, 2 * Tiles::kQueryBytes + Tiles::kRowBytes);
      }
      for (int part = 0; part < kHead / 64; ++part) {
        load(query + part * Tiles::kQueries * 128, p.query, arrival, col + part * 64, row, piece.sample);
      }
      load_bytes(rows_place, rows, Tiles::kRowBytes, arrival);
      for (int part = 0; part < kHead / 64; ++part) {
        load(dout + part * Tiles::kQueries * 128, p.dout, dout_arrival, col + part * 64, row, piece.sample);
      }
      ring.advance();
      // After the first queries, for which there may be room before the keys of an earlier piece are given
      // up.
      if (!keys_asked) {
        keys_asked = true;
        const std::uint32_t keys_arrival = at.keys_full(keys.place);
        wait(at.keys_empty(keys.place), keys.parity ^ 1);
        arrive_expecting(keys_arrival, 2 * Tiles::kKeyBytes);
        for (int part = 0; part < kHead / 64; ++part) {
          const int offset = part * kPieceKeys * 128, col = piece.kv_head * kHead + part * 64;
          load(at.key(keys.place) + offset, p.key, keys_arrival, col, piece.part * kPieceKeys, piece.sample);
          load(at.value(keys.place) + offset, p.value, keys_arrival, col, piece.part * kPieceKeys,
               piece.sample);
        }
        keys.advance();
      }
      // Not sooner: pieces that come after it wait for the next one.
      if (cursor.is_last()) ask();
    }
  }
}

/// One thread a place: adds the query gradients of this block to those of others, in turn; to those of a
/// tile's last part it gives the others' sum, and writes them. Threads take tiles by turns.
template <int kHead>
__device__ inline void add_query_gradients(const AttentionGradient& p, const GradientMemory<kHead>& at,
                                           int pieces, int place) {
  using Tiles = GradientTiles<kHead>;
  constexpr int kPlaces = Tiles::kSumPlaces, kBytes = Tiles::kSums * 4;
  const std::uint32_t sums = at.sums(place, 0), ready = at.sums_ready(place);
  Tickets tickets(at.tickets());
  int parity = 0, skipped = place;  // tiles until the next one of this thread
  for (int number; (number = tickets.next<false>()) < pieces;) {
    const Piece piece = Piece::at<Tiles::kQueries>(p, number);
    Cursor cursor(p, piece);
    const int tiles = cursor.left;
    // The place for the query gradients of a tile, after those before were copied from it.
    const auto give_place = [&] {
      const TilePart part = TilePart::at<Tiles::kQueries>(p, piece, cursor.tile);
      if (part.after == 0 && part.before > 0) {
        const QueryTile tile = QueryTile::at<Tiles::kQueries>(p, piece, cursor);
        wait_for_count(p.counters + tile.index, tile.turn);
        arrive_expecting(ready, kBytes);
        load_bytes(sums, p.sums + tile.index * Tiles::kSums, kBytes, ready);
      } else {
        arrive(ready);
      }
    };
    cursor.skip(p, skipped);
    if (cursor.left > 0) give_place();
    while (cursor.left > 0) {
      const QueryTile tile = QueryTile::at<Tiles::kQueries>(p, piece, cursor);
      unsigned* const counter = p.counters + tile.index;
      wait(at.sums_full(place), parity);
      parity ^= 1;
      if (tile.part.after == 0) {
        for (int half = 0; half < 2; ++half) {
          const int head = piece.kv_head * p.group + cursor.head;
          store(p.dquery, at.sums(place, half), head * kHead + (kHead == 64 ? 0 : half * 64),
                cursor.tile * Tiles::kQueries + (kHead == 64 ? half * 64 : 0), piece.sample);
        }
      } else {
        float* const to = p.sums + tile.index * Tiles::kSums;
        wait_for_count(counter, tile.turn);
        if (tile.part.before == 0) {
          store_floats_at(to, sums, kBytes);
        } else {
          add_floats_at(to, sums, kBytes);
        }
      }
      wait_for_reads<0>();
      cursor.skip(p, kPlaces);
      if (cursor.left > 0) give_place();
      if (tile.part.after > 0) wait_for_stores();
      count_on(counter);
    }
    skipped = (skipped + kPlaces * tiles - tiles) % kPlaces;
  }
}

/// Packs 64 rows of 64 sums into a box, of which thread t of a warpgroup holds what products left it.
__device__ inline void store_box(std::uint32_t box, const float* d, float scale) {
  const int thread = static_cast<int>(threadIdx.x) % kGroup;
  const int row = thread / 32 * 16 + thread % 16, chunk = thread % 32 / 16;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    std::uint32_t words[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      words[j] = packed(d[8 * i + 2 * j] * scale, d[8 * i + 2 * j + 1] * scale);
    }
    store_matrices(box + row * 128 + (((2 * i + chunk) ^ (row & 7)) << 4), words);
  }
}

/// A warpgroup: half of the keys of a piece, by all queries that see them; and of the queries' gradients half
/// of the rows (heads of 64) or columns.
template <int kHead>
__device__ inline void compute_gradients(const AttentionGradient& p, const GradientMemory<kHead>& at,
                                         int pieces, int half) {
  using Tiles = GradientTiles<kHead>;
  constexpr bool kAhead = kHead == 64;
  // Whether it is found out beside products which part of a tile comes next, where registers allow it.
  constexpr bool kPartAhead = kHead == 128;
  constexpr int kQueries = Tiles::kQueries, kBoxes = Tiles::kScoreBytes / (2 * kBoxBytes);
  const int thread = static_cast<int>(threadIdx.x) % kGroup, lane = thread % 32;
  const int key_row = half * 64 + thread / 32 * 16 + lane / 4;  // and 8 rows below
  const float scale = p.scale * kLog2E;
  const int own_barrier = 2 + half, common_barrier = 1;
  Tickets tickets(at.tickets());
  RingPlace<Tiles::kStages> ring;
  RingPlace<Tiles::kKeyStages> keys;
  RingPlace<Tiles::kSumPlaces> sums;
  int turn = 0;
  for (int number; (number = tickets.next<true>()) < pieces;) {
    const Piece piece = Piece::at<kQueries>(p, number);
    float dkey[kHead / 2], dvalue[kHead / 2], s[kQueries / 2];
    std::uint32_t gradients[kQueries / 16][4];
    const std::uint32_t key = at.key(keys.place), value = at.value(keys.place);
    // 16 elements of all queries' heads, and of this half's keys'
    const auto query_part = [&](std::uint32_t tile, int i) {
      return operand_at(tile + i / 4 * kQueries * 128) + i % 4 * kAcross;
    };
    const auto key_part = [&](std::uint32_t tile, int i) {
      return operand_at(tile + (i / 4 * kPieceKeys + half * 64) * 128) + i % 4 * kAcross;
    };
    const auto begin_scores = [&] {
      wait(at.full(ring.place), ring.parity);
      products_begin();
#pragma unroll
      for (int i = 0; i < kHead / 16; ++i) {
        warpgroup_product<false, false>(s, key_part(key, i), query_part(at.query(ring.place), i), i > 0);
      }
      products_commit();
    };
    wait(at.keys_full(keys.place), keys.parity);
    begin_scores();
    products_wait<0>();
    settled(s);
    int more = 0;
    Cursor cursor(p, piece);
    const auto step = [&](auto is_last) {
      const std::uint32_t query = at.query(ring.place), dout = at.dout(ring.place);
      const std::uint32_t rows = at.rows(ring.place) + lane % 4 * 8;
      float ds[kQueries / 2];
      if constexpr (Tiles::kDoutApart) wait(at.dout_full(ring.place), ring.parity);
      products_begin();
#pragma unroll
      for (int i = 0; i < kHead / 16; ++i) {
        warpgroup_product<false, false>(ds, key_part(value, i), query_part(dout, i), i > 0);
      }
      products_commit();
      // The first query that sees the key of row 0, as a column of the tile.
      const int sees = piece.part * kPieceKeys - (p.keys - p.sequence) - cursor.tile * kQueries;
      const bool hidden = sees + kPieceKeys > 1;
      TilePart part;
      if constexpr (kPartAhead) part = TilePart::at<kQueries>(p, piece, cursor.tile);
#pragma unroll
      for (int i = 0; i < kQueries / 2; i += 4) {
        const float2 two = load_two_floats(rows + i * 8);
#pragma unroll
        for (int h = 0; h < 4; h += 2) {
          s[i + h] = approximate_exp2(s[i + h] * scale - two.x);
          s[i + h + 1] = approximate_exp2(s[i + h + 1] * scale - two.y);
        }
      }
      // Behind a branch, since ptxas would wait for score gradients before it is done with the powers.
      if (hidden) {
#pragma unroll
        for (int i = 0; i < kQueries / 2; ++i) {
          const int first = sees + key_row + i % 4 / 2 * 8, col = i / 4 * 8 + lane % 4 * 2 + i % 2;
          if (col < first) s[i] = 0.0f;
        }
      }
      products_wait<0>();
      settled(ds);
      // By halves, so that few registers hold the same in two forms.
      std::uint32_t probabilities[kQueries / 16][4];
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        constexpr int kSteps = kQueries / 32;
#pragma unroll
        for (int i = 8 * part * kSteps; i < 8 * (part + 1) * kSteps; i += 2) {
          probabilities[i / 8][i % 8 / 2] = packed(s[i], s[i + 1]);
        }
        products_begin();
#pragma unroll
        for (int i = part * kSteps; i < (part + 1) * kSteps; ++i) {
          warpgroup_product<true>(dvalue, probabilities[i], operand_at(dout) + i * kDown, more | (i > 0));
        }
        products_commit();
#pragma unroll
        for (int i = 8 * part * kSteps; i < 8 * (part + 1) * kSteps; i += 4) {
          const float2 two = load_two_floats(rows + kQueries * 4 + i * 8);
#pragma unroll
          for (int h = 0; h < 4; h += 2) {
            gradients[i / 8][i % 8 / 2 + h / 2] =
                packed(s[i + h] * (ds[i + h] - two.x), s[i + h + 1] * (ds[i + h + 1] - two.y));
          }
        }
      }
      if (more == 0) {
        // Boxes of the last piece may still be on their way from here.
        if (thread == 0) wait_for_reads<0>();
        named_barrier(own_barrier, kGroup);
      }
      // Both warpgroups are done with the products that read this place two tiles ago: they met since.
      const int row = thread / 32 * 16 + thread % 16, chunk = lane / 16;
#pragma unroll
      for (int i = 0; i < kQueries / 16; ++i) {
        store_matrices(at.box(turn, half, i / 4) + row * 128 + (((i % 4 * 2 + chunk) ^ (row & 7)) << 4),
                       gradients[i]);
      }
      stores_before_copies();
      products_wait<0>();
      settled(dvalue);
      named_barrier(common_barrier, 2 * kGroup);
      float dquery[32];
      products_begin();
#pragma unroll
      for (int i = 0; i < kPieceKeys / 16; ++i) {
        const std::uint32_t left = at.scores(turn) + (kHead == 64 ? half * kPieceKeys * 128 : 0);
        const std::uint32_t right = key + (kHead == 64 ? 0 : half * kPieceKeys * 128);
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
      const int used = ring.place;
      ring.advance();
      // The next scores are computed while query gradients are handed on.
      if constexpr (is_last.value || !kAhead) {
        products_wait<1>();
      } else {
        begin_scores();
        products_wait<2>();
      }
      settled(dquery);
      wait(at.sums_ready(sums.place), sums.parity);
      const std::uint32_t own = at.sums(sums.place, half) + thread * 16;
      if constexpr (!kPartAhead) part = TilePart::at<kQueries>(p, piece, cursor.tile);
      if (part.after == 0) {
        if (part.before > 0) {
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            const float4 others = load_floats(own + i * kGroup * 16);
            dquery[4 * i] += others.x, dquery[4 * i + 1] += others.y;
            dquery[4 * i + 2] += others.z, dquery[4 * i + 3] += others.w;
          }
          named_barrier(own_barrier, kGroup);  // all have read before one writes
        }
        store_box(at.sums(sums.place, half), dquery, p.scale);
      } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          store_floats(own + i * kGroup * 16, dquery[4 * i], dquery[4 * i + 1], dquery[4 * i + 2],
                       dquery[4 * i + 3]);
        }
      }
      stores_before_copies();
      __syncwarp();
      if (lane == 0) arrive(at.sums_full(sums.place));
      sums.advance();
      products_wait<0>();
      settled(dkey);
      if constexpr (!is_last.value) {
        if constexpr (!kAhead) {
          begin_scores();
          products_wait<0>();
        }
        settled(s);
      }
      if (thread == 0) arrive(at.empty(used));
      turn ^= 1;
      more = 1;
      cursor.advance(p);
    };
    while (!cursor.is_last()) step(std::false_type{});
    step(std::true_type{});
    if (thread == 0) arrive(at.keys_empty(keys.place));
    keys.advance();
    // Where score gradients of this warpgroup come next.
#pragma unroll
    for (int i = 0; i < kHead / 32; ++i) {
      const bool is_key = i < kHead / 64;
      const int part = i % (kHead / 64);
      if (i >= kBoxes) {
        if (thread == 0) wait_for_reads<0>();
        named_barrier(own_barrier, kGroup);
      }
      const std::uint32_t box = at.box(turn, half, i % kBoxes);
      store_box(box, (is_key ? dkey : dvalue) + part * 32, is_key ? p.scale : 1.0f);
      stores_before_copies();
      named_barrier(own_barrier, kGroup);
      if (thread == 0) {
        store(is_key ? p.dkey : p.dvalue, box, piece.kv_head * kHead + part * 64,
              piece.part * kPieceKeys + half * 64, piece.sample);
      }
    }
  }
  if (thread == 0) wait_for_stores();
}

template <int kHead>
__global__ void __launch_bounds__(kGradientThreads, 1)
    attention_gradient_kernel(const __grid_constant__ AttentionGradient p) {
  extern __shared__ unsigned char memory[];
  const GradientMemory<kHead> at(memory);
  const int group = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kGroup, 0);
  const int pieces = p.batch * p.kv_heads * p.pieces;
  if (threadIdx.x == 0) at.init();
  __syncthreads();
  if (group > 0) {
    raise_registers_to<240>();
    compute_gradients<kHead>(p, at, pieces, group - 1);
    return;
  }
  lower_registers_to<24>();
  if (threadIdx.x == 0) {
    load_operands<kHead>(p, at, pieces);
  } else if (threadIdx.x % 32 == 0 && threadIdx.x / 32 <= GradientTiles<kHead>::kSumPlaces) {
    add_query_gradients<kHead>(p, at, pieces, static_cast<int>(threadIdx.x) / 32 - 1);
  }
}

}  // namespace octet::hopper
