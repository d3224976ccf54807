#pragma once

#include <type_traits>

#include "attention_gradient_copies.cuh"
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

/// Row values of the queries of elements i to i + 7 of a thread's scores: of i and i + 1, which i + 2 and i +
/// 3 share, and of i + 4 and i + 5.
template <int kHead>
__device__ inline float4 load_rows(std::uint32_t rows, int i, int lane) {
  if constexpr (GradientTiles<kHead>::kWideRows) return load_floats(rows + i * 8 + lane % 4 * 16);
  const float2 low = load_two_floats(rows + i * 8 + lane % 4 * 8);
  const float2 high = load_two_floats(rows + i * 8 + 32 + lane % 4 * 8);
  return {low.x, low.y, high.x, high.y};
}

/// A warpgroup: half of the keys of a piece, by all queries that see them; and of the queries' gradients half
/// of the rows (heads of 64) or columns.
///
/// Score gradients of both warpgroups make a query gradient. Heads of 64 leave registers for its products,
/// and for those of the key gradient, beside the next tile's scores, so that no warpgroup waits for the other
/// one. With heads of 128 warpgroups meet once a tile.
template <int kHead>
__device__ inline void compute_gradients(const AttentionGradient& p, const GradientMemory<kHead>& at,
                                         int pieces, int half) {
  using Tiles = GradientTiles<kHead>;
  constexpr int kQueries = Tiles::kQueries, kBoxes = Tiles::kScoreBytes / (2 * kBoxBytes);
  // A thread's part of a tile, and some of it.
  using Scores = float[kQueries / 2];
  using Operands = std::uint32_t[kQueries / 16][4];
  using None = std::integral_constant<int, 0>;
  using Some = std::integral_constant<int, kQueries / 8>;
  using Most = std::integral_constant<int, kQueries * 3 / 8>;
  using All = std::integral_constant<int, kQueries / 2>;
  const int thread = static_cast<int>(threadIdx.x) % kGroup, lane = thread % 32;
  const int key_row = half * 64 + thread / 32 * 16 + lane / 4;  // and 8 rows below
  const float scale = p.scale * kLog2E;
  const int own_barrier = 2 + half, common_barrier = 1;
  Tickets tickets(at.tickets());
  RingPlace<Tiles::kStages> ring;
  RingPlace<Tiles::kKeyStages> keys;
  RingPlace<Tiles::kSumPlaces> sums;
  static_assert(Tiles::kStages == 2, "score gradients are in two places, by the same turns");
  for (int number; (number = tickets.next<true>()) < pieces;) {
    const Piece piece = Piece::at<kQueries>(p, number);
    float dkey[kHead / 2], dvalue[kHead / 2];
    Scores s;
    Operands gradients;
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
    const auto begin_probability_gradients = [&](Scores& ds) {
      if constexpr (Tiles::kDoutApart) wait(at.dout_full(ring.place), ring.parity);
      products_begin();
#pragma unroll
      for (int i = 0; i < kHead / 16; ++i) {
        warpgroup_product<false, false>(ds, key_part(value, i), query_part(at.dout(ring.place), i), i > 0);
      }
      products_commit();
    };
    const auto begin_query_gradients = [&](float(&dquery)[32], int turn) {
      products_begin();
#pragma unroll
      for (int i = 0; i < kPieceKeys / 16; ++i) {
        const std::uint32_t left = at.scores(turn) + (kHead == 64 ? half * kPieceKeys * 128 : 0);
        const std::uint32_t right = key + (kHead == 64 ? 0 : half * kPieceKeys * 128);
        warpgroup_product<true, true>(dquery, operand_at(left) + i * kDown, operand_at(right) + i * kDown,
                                      i > 0);
      }
      products_commit();
    };
    const auto begin_key_gradients = [&](int turn, int add) {
      products_begin();
#pragma unroll
      for (int i = 0; i < kQueries / 16; ++i) {
        warpgroup_product<true>(dkey, gradients[i], operand_at(at.query(turn)) + i * kDown, add | (i > 0));
      }
      products_commit();
    };
    // Scores kFrom to kTo of this thread become probabilities.
    const auto raise = [&](auto from, auto to) {
      constexpr int kFrom = decltype(from)::value, kTo = decltype(to)::value;
      const std::uint32_t rows = at.rows(ring.place);
#pragma unroll
      for (int i = kFrom; i < kTo; i += 8) {
        const float4 four = load_rows<kHead>(rows, i, lane);
#pragma unroll
        for (int h = 0; h < 4; h += 2) {
          s[i + h] = approximate_exp2(s[i + h] * scale - four.x);
          s[i + h + 1] = approximate_exp2(s[i + h + 1] * scale - four.y);
          s[i + h + 4] = approximate_exp2(s[i + h + 4] * scale - four.z);
          s[i + h + 5] = approximate_exp2(s[i + h + 5] * scale - four.w);
        }
      }
    };
    // Those of keys that queries of this tile do not see. Behind a branch, since ptxas would wait for score
    // gradients before it is done with the powers.
    const auto hide = [&](int tile) {
      // The first query that sees the key of row 0, as a column of the tile.
      const int sees = piece.part * kPieceKeys - (p.keys - p.sequence) - tile * kQueries;
      if (sees + kPieceKeys <= 1) return;
#pragma unroll
      for (int i = 0; i < kQueries / 2; ++i) {
        const int first = sees + key_row + i % 4 / 2 * 8, col = i / 4 * 8 + lane % 4 * 2 + i % 2;
        if (col < first) s[i] = 0.0f;
      }
    };
    // Begins value gradients, and leaves score gradients in registers and in shared memory.
    const auto finish_scores = [&](const Scores& ds, Operands& probabilities, int add) {
      const std::uint32_t dout = at.dout(ring.place), rows = at.rows(ring.place) + kQueries * 4;
      // By halves, so that few registers hold the same in two forms.
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
          warpgroup_product<true>(dvalue, probabilities[i], operand_at(dout) + i * kDown, add | (i > 0));
        }
        products_commit();
#pragma unroll
        for (int i = 8 * part * kSteps; i < 8 * (part + 1) * kSteps; i += 8) {
          const float4 four = load_rows<kHead>(rows, i, lane);
#pragma unroll
          for (int h = 0; h < 4; h += 2) {
            gradients[i / 8][h / 2] =
                packed(s[i + h] * (ds[i + h] - four.x), s[i + h + 1] * (ds[i + h + 1] - four.y));
            gradients[i / 8][2 + h / 2] =
                packed(s[i + h + 4] * (ds[i + h + 4] - four.z), s[i + h + 5] * (ds[i + h + 5] - four.w));
          }
        }
      }
      if (add == 0) {
        // Boxes of the last piece may still be on their way from here.
        if (thread == 0) wait_for_reads<0>();
        named_barrier(own_barrier, kGroup);
      }
      // Both warpgroups are done with the products that read this place two tiles ago: they met since.
      const int row = thread / 32 * 16 + thread % 16, chunk = lane / 16;
#pragma unroll
      for (int i = 0; i < kQueries / 16; ++i) {
        store_matrices(at.box(ring.place, half, i / 4) + row * 128 + (((i % 4 * 2 + chunk) ^ (row & 7)) << 4),
                       gradients[i]);
      }
      stores_before_copies();
    };
    const auto part_of = [&](int tile) { return TilePart::at<kQueries>(p, piece, tile); };
    const auto hand_on = [&](float(&dquery)[32], const TilePart& part) {
      wait(at.sums_ready(sums.place), sums.parity);
      const std::uint32_t own = at.sums(sums.place, half) + thread * 16;
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
    };
    wait(at.keys_full(keys.place), keys.parity);
    Cursor cursor(p, piece);
    if constexpr (Tiles::kLate) {
      int last_tile = 0;
#pragma unroll
      for (int i = 0; i < kHead / 2; ++i) dkey[i] = 0.0f;
      // Of the tile before, once both warpgroups have its score gradients.
      const auto begin_last_query_gradients = [&](float(&dquery)[32]) {
        const int turn = ring.place ^ 1;
        wait(at.scores_full(turn), ring.parity ^ turn);
        begin_query_gradients(dquery, turn);
      };
      const auto end_last = [&](float(&dquery)[32]) {
        products_wait<0>();
        settled(dkey);
        settled(dquery);
        if (thread == 0) arrive(at.empty(ring.place ^ 1));
        hand_on(dquery, part_of(last_tile));
      };
      const auto step = [&](auto is_first) {
        begin_scores();
        if constexpr (is_first.value) {
          products_wait<0>();
          settled(s);
          raise(None{}, Most{});
        } else {
          float dquery[32];
          begin_key_gradients(ring.place ^ 1, 1);
          products_wait<1>();
          settled(s);
          raise(None{}, Some{});
          begin_last_query_gradients(dquery);
          raise(Some{}, Most{});
          end_last(dquery);
        }
        Scores ds;
        Operands probabilities;
        begin_probability_gradients(ds);
        raise(Most{}, All{});
        hide(cursor.tile);
        products_wait<0>();
        settled(ds);
        finish_scores(ds, probabilities, !is_first.value);
        __syncwarp();
        if (lane == 0) arrive(at.scores_full(ring.place));
        products_wait<0>();
        settled(dvalue);
        ring.advance();
        last_tile = cursor.tile;
        cursor.advance(p);
      };
      step(std::true_type{});
      while (cursor.left > 0) step(std::false_type{});
      float dquery[32];
      begin_key_gradients(ring.place ^ 1, 1);
      begin_last_query_gradients(dquery);
      end_last(dquery);
    } else {
      int more = 0;
      begin_scores();
      products_wait<0>();
      settled(s);
      const auto step = [&](auto is_last) {
        Scores ds;
        Operands probabilities;
        begin_probability_gradients(ds);
        // Found out beside products.
        const TilePart part = part_of(cursor.tile);
        raise(None{}, All{});
        hide(cursor.tile);
        products_wait<0>();
        settled(ds);
        finish_scores(ds, probabilities, more);
        products_wait<0>();
        settled(dvalue);
        named_barrier(common_barrier, 2 * kGroup);
        float dquery[32];
        begin_query_gradients(dquery, ring.place);
        begin_key_gradients(ring.place, more);
        products_wait<1>();
        settled(dquery);
        hand_on(dquery, part);
        products_wait<0>();
        settled(dkey);
        const int used = ring.place;
        ring.advance();
        if constexpr (!is_last.value) {
          begin_scores();
          products_wait<0>();
          settled(s);
        }
        if (thread == 0) arrive(at.empty(used));
        more = 1;
        cursor.advance(p);
      };
      while (!cursor.is_last()) step(std::false_type{});
      step(std::true_type{});
    }
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
      const std::uint32_t box = at.box(ring.place, half, i % kBoxes);
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
  } else if (threadIdx.x % 32 == 0 && threadIdx.x / 32 <= GradientTiles<kHead>::kAdders) {
    add_query_gradients<kHead>(p, at, pieces, static_cast<int>(threadIdx.x) / 32 - 1);
  }
}

}  // namespace octet::hopper
