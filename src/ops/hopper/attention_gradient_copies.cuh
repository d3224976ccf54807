#pragma once

#include "attention_gradient_layout.cuh"
#include "instructions.cuh"
#include "tickets.cuh"
#include "warpgroup.cuh"

/// What single threads do for the computing warpgroups of attention_gradient_kernel.cuh: copies.
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

/// Of some threads that take tiles by turns, one: adds the query gradients of this block to those of others,
/// in turn; to those of a tile's last part it gives the others' sum, and writes them.
template <int kHead>
__device__ inline void add_query_gradients(const AttentionGradient& p, const GradientMemory<kHead>& at,
                                           int pieces, int adder) {
  using Tiles = GradientTiles<kHead>;
  constexpr int kAdders = Tiles::kAdders, kBytes = Tiles::kSums * 4;
  constexpr bool kShared = kAdders > Tiles::kSumPlaces;  // one place, by both
  static_assert(kAdders == 2 && Tiles::kSumPlaces <= 2);
  const int place = kShared ? 0 : adder;
  const std::uint32_t sums = at.sums(place, 0), ready = at.sums_ready(place);
  Tickets tickets(at.tickets());
  // Of the uses of a place that two share one has those of even numbers, the other one those of odd ones.
  int parity = kShared ? adder : 0;
  int skipped = adder;  // tiles until the next one of this thread
  for (int number; (number = tickets.next<false>()) < pieces;) {
    const Piece piece = Piece::at<Tiles::kQueries>(p, number);
    Cursor cursor(p, piece);
    const int tiles = cursor.left;
    for (cursor.skip(p, skipped); cursor.left > 0; cursor.skip(p, kAdders)) {
      const QueryTile tile = QueryTile::at<Tiles::kQueries>(p, piece, cursor);
      unsigned* const counter = p.counters + tile.index;
      float* const others = p.sums + tile.index * Tiles::kSums;
      const bool is_last = tile.part.after == 0;
      wait(at.sums_read(place), parity ^ 1);
      if (is_last && tile.part.before > 0) {
        wait_for_count(counter, tile.turn);
        arrive_expecting(ready, kBytes);
        load_bytes(sums, others, kBytes, ready);
      } else {
        arrive(ready);
      }
      // While query gradients are computed.
      if (!is_last) wait_for_count(counter, tile.turn);
      wait(at.sums_full(place), parity);
      if (is_last) {
        for (int half = 0; half < 2; ++half) {
          const int head = piece.kv_head * p.group + cursor.head;
          store(p.dquery, at.sums(place, half), head * kHead + (kHead == 64 ? 0 : half * 64),
                cursor.tile * Tiles::kQueries + (kHead == 64 ? half * 64 : 0), piece.sample);
        }
      } else if (tile.part.before == 0) {
        store_floats_at(others, sums, kBytes);
      } else {
        add_floats_at(others, sums, kBytes);
      }
      wait_for_reads<0>();
      arrive(at.sums_read(place));
      if constexpr (!kShared) parity ^= 1;
      if (!is_last) wait_for_stores();
      count_on(counter);
    }
    skipped = (skipped + kAdders * tiles - tiles) % kAdders;
  }
}

}  // namespace octet::hopper
