#pragma once

#include <type_traits>

#include "attention_forward_layout.cuh"
#include "attention_forward_softmax.cuh"
#include "instructions.cuh"
#include "tickets.cuh"
#include "warpgroup_product.cuh"

/// Causal attention forward, bfloat16 with float32 sums: a persistent grid of one block a multiprocessor. One
/// warpgroup loads; each of the others has 64 query rows of a tile, and walks along the keys in tiles of 128,
/// with scores, their powers and outputs in registers. As in FlashAttention-3 (Shah et al. 2024) scores of a
/// tile are computed together with the outputs of the tile before, whose products run under the softmax. The
/// largest score is looked for in the first tile of keys alone.
namespace octet::hopper::forward {

/// One thread: loads what the computing warpgroups read.
template <int kHead>
__device__ inline void load_operands(const Problem& p, const Places<kHead>& at, int tiles) {
  using P = Plan<kHead>;
  Tickets tickets(at.tickets());
  RingPlace<2> queries;
  RingPlace<P::kStages> stage;
  for (int number = static_cast<int>(blockIdx.x); number < tiles;
       number = number_of(p, tickets.next<false>())) {
    const Tile tile = tile_of<kHead>(p, number);
    for (int group = 0; group < P::kGroups; ++group) {
      const std::uint32_t full = at.query_full(queries.place, group);
      wait(at.query_empty(queries.place, group), queries.parity ^ 1);
      arrive_expecting(full, P::kQueryBytes);
      for (int half = 0; half < P::kHalves; ++half) {
        load(at.query(queries.place, group) + half * kBoxBytes, p.query, full, tile.head * kHead + half * 64,
             tile.first + group * kRows, tile.sample);
      }
    }
    queries.advance();
    for (int round = 0; round < tile.rounds; ++round) {
      // Of keys, one half of all rows after the other; of values, all of 64 rows after the other 64's.
      const auto load_tile = [&](const CUtensorMap& map, std::uint32_t to, std::uint32_t full,
                                 std::uint32_t empty, int half_bytes, int rows_bytes) {
        wait(empty, stage.parity ^ 1);
        arrive_expecting(full, P::kTileBytes);
        for (int half = 0; half < P::kHalves; ++half) {
          for (int rows = 0; rows < 2; ++rows) {
            load(to + half * half_bytes + rows * rows_bytes, map, full, tile.kv_head * kHead + half * 64,
                 round * kKeys + rows * 64, tile.sample);
          }
        }
      };
      load_tile(p.key, at.key(stage.place), at.key_full(stage.place), at.key_empty(stage.place),
                2 * kBoxBytes, kBoxBytes);
      // Before the values, whose place may not be free before the number is known to those that have it.
      if (round == 0) tickets.ask(p.taken);
      load_tile(p.value, at.value(stage.place), at.value_full(stage.place), at.value_empty(stage.place),
                kBoxBytes, P::kHalves * kBoxBytes);
      stage.advance();
    }
  }
}

template <int kCount>
using Count = std::integral_constant<int, kCount>;

/// What a warpgroup does of a tile of queries.
struct Work {
  Tile tile;   ///< no rounds: there is none
  int first;   ///< row
  int rounds;  ///< tiles of keys that it sees some of; 0: its rows are before row 0
  int whole;   ///< of these; of the last one it may see no more than the first half
};

template <int kHead>
__device__ inline Work work_of(const Problem& p, int number, int tiles, int group) {
  Work work{};
  if (number >= tiles) return work;
  work.tile = tile_of<kHead>(p, number);
  work.first = work.tile.first + group * kRows;
  const int seen = work.first < 0 ? 0 : keys_seen(p, work.first + kRows);
  work.rounds = (seen + kKeys - 1) / kKeys;
  work.whole = (seen + kKeys / 2 - 1) / kKeys;
  return work;
}

/// Writes outputs and statistics of a warpgroup's rows: by way of the place where its queries were, and by
/// copies of each warp's own, which are not waited for.
template <int kHead>
__device__ inline void write_rows(const Problem& p, const Work& work, const Softmax& softmax,
                                  const float (&out)[kHead / 2], std::uint32_t place) {
  const int thread = thread_read_here(), warp = thread % kGroup / 32, lane = thread % 32;
  const Tile& tile = work.tile;
  float factor[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float sum = row_sum(softmax.sum[h]);
    const int row = work.first + warp * 16 + h * 8 + lane / 4;
    factor[h] = 1.0f / sum;
    if (lane % 4 == 0 && row < p.sequence) {
      const std::int64_t head = std::int64_t{tile.sample} * p.kv_heads * p.group + tile.head;
      p.statistics[head * p.sequence + row] = softmax.base[h] * kLn2 + logf(sum);
    }
  }
#pragma unroll
  for (int j = 0; j < kHead / 8; j += 2) {
    const int row = warp * 16 + lane % 16, chunk = (j + lane / 16) % 8;
    const auto words = [&](int octet, int h) {
      const float* const two = &out[4 * octet + 2 * h];
      return packed(two[0] * factor[h], two[1] * factor[h]);
    };
    const std::uint32_t four[4] = {words(j, 0), words(j, 1), words(j + 1, 0), words(j + 1, 1)};
    store_matrices(place + j / 8 * kBoxBytes + row * 128 + ((chunk ^ (row & 7)) << 4), four);
  }
  stores_before_copies();
  __syncwarp();
  if (lane == 0) {
    for (int half = 0; half < Plan<kHead>::kHalves; ++half) {
      store(p.out, place + half * kBoxBytes + warp * 16 * 128, tile.head * kHead + half * 64,
            work.first + warp * 16, tile.sample);
    }
  }
}

/// All work of a warpgroup.
template <int kHead>
__device__ inline void attend(const Problem& p, const Places<kHead>& at, int tiles, int group) {
  using P = Plan<kHead>;
  const int warp = static_cast<int>(threadIdx.x % kGroup / 32), lane = static_cast<int>(threadIdx.x % 32);
  Tickets tickets(at.tickets());
  RingPlace<P::kStages> key_stage, value_stage;
  RingPlace<2> place;        // of the queries
  std::uint32_t staged = 0;  // barrier of a place of queries from which outputs are copied
  Work work = work_of<kHead>(p, static_cast<int>(blockIdx.x), tiles, group), next{};
  int round = 0;
  float out[kHead / 2];
  std::uint32_t powers[kKeys / 16][4];
  Softmax softmax{p.scale * kLog2E};

  const auto wait_for_key = [&] { wait(at.key_full(key_stage.place), key_stage.parity); };
  const auto wait_for_value = [&] { wait(at.value_full(value_stage.place), value_stage.parity); };
  const auto release_key = [&] {
    if (lane == 0) arrive(at.key_empty(key_stage.place));
    key_stage.advance();
  };
  const auto release_value = [&] {
    if (lane == 0) arrive(at.value_empty(value_stage.place));
    value_stage.advance();
  };
  const auto release_staged = [&] {
    if (staged != 0 && lane == 0) {
      wait_for_reads<0>();
      arrive(staged);
    }
    staged = 0;
  };
  // While the last scores are computed.
  const auto look_ahead = [&] {
    if (round + 1 >= work.rounds) next = work_of<kHead>(p, number_of(p, tickets.next<true>()), tiles, group);
  };
  const auto query = [&] { return at.query(place.place, group); };
  const auto multiply_keys = [&](auto& scores) {
    const std::uint32_t key = at.key(key_stage.place);
    wait_for_key();
    products_begin();
#pragma unroll
    for (int i = 0; i < kHead / 16; ++i) {
      warpgroup_product<false, false>(scores, operand_at(query() + i / 4 * kBoxBytes) + i % 4 * kAcross,
                                      operand_at(key + i / 4 * 2 * kBoxBytes) + i % 4 * kAcross, i > 0);
    }
    products_commit();
  };
  // By so many powers of each thread.
  const auto multiply_values = [&](auto count, bool add) {
    const std::uint32_t value = at.value(value_stage.place);
    wait_for_value();
    products_begin();
#pragma unroll
    for (int i = 0; i < decltype(count)::value / 8; ++i) {
      warpgroup_product<true>(
          out, powers[i], operand_at(value + i / 4 * P::kHalves * kBoxBytes) + i % 4 * kDown, add || i > 0);
    }
    products_commit();
  };
  const auto hide_later_keys = [&](auto& scores) {
    const int last = p.keys - p.sequence + work.first;  // key of the first row
    if ((round + 1) * kKeys - 1 <= last) return;
    hide(scores, last + warp * 16 + lane / 4 - round * kKeys - lane % 4 * 2 + 1);
  };

  // The first tile of keys, alone.
  const auto begin = [&](auto count) {
    float scores[decltype(count)::value];
    multiply_keys(scores);
    look_ahead();
    products_wait<0>();
    settled(scores);
    release_key();
    hide_later_keys(scores);
    softmax.start(scores);
    softmax.add(scores);
    narrow(scores, powers);
  };
  // Another tile of keys, and the outputs of the whole one before.
  const auto go_on = [&](auto count_before, auto count) {
    const bool add = round > 0;
    ++round;
    float scores[decltype(count)::value];
    multiply_keys(scores);
    multiply_values(count_before, add);
    look_ahead();
    release_staged();
    products_wait<1>();
    settled(scores);
    hide_later_keys(scores);
    // ptxas would put the wait for all products before the softmax, but not before a branch.
    if (softmax.add(scores)) {
      products_wait<0>();
      settled(out);
    } else {
      products_wait<0>();
      settled(out);
      score_again<kHead>(scores, query() + warp * 16 * 128, at.key(key_stage.place));
      hide_later_keys(scores);
      float shrink[2];
      softmax.rebase(scores, shrink);
#pragma unroll
      for (int i = 0; i < kHead / 2; ++i) out[i] *= shrink[i / 2 % 2];
    }
    release_key();
    release_value();
    narrow(scores, powers);
  };
  // The outputs of the last tile of keys, alone.
  const auto finish = [&](auto count) {
    multiply_values(count, round > 0);
    products_wait<0>();
    settled(out);
    release_value();
  };

  const Count<kKeys / 2> whole;
  const Count<kKeys / 4> half;
  for (; work.tile.rounds > 0; work = next) {
    release_staged();
    wait(at.query_full(place.place, group), place.parity);
    round = 0;
    if (work.rounds == 0) {
      look_ahead();
      if (lane == 0) arrive(at.query_empty(place.place, group));
    } else {
      begin(whole);
      while (round + 1 < work.whole) go_on(whole, whole);
      if (round + 1 < work.rounds) {
        go_on(whole, half);
        finish(half);
      } else {
        finish(whole);
      }
      release_staged();
      write_rows<kHead>(p, work, softmax, out, query());
      staged = at.query_empty(place.place, group);
    }
    // Tiles of keys that only the block's other warpgroups see.
#pragma unroll 1
    for (int i = work.rounds; i < work.tile.rounds; ++i) {
      wait_for_key();
      release_key();
      wait_for_value();
      release_value();
    }
    place.advance();
  }
  if (thread_read_here() % 32 == 0) wait_for_stores();
}

template <int kHead>
__global__ void __launch_bounds__(Plan<kHead>::kThreads, 1)
    attention_forward_kernel(const __grid_constant__ Problem problem) {
  extern __shared__ unsigned char memory[];
  const Places<kHead> at{(shared_address(memory) + 1023) & ~1023u};
  if (threadIdx.x == 0) {
    at.init();
    barriers_ready();
  }
  __syncthreads();
  const int group = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kGroup, 0);
  const int tiles = problem.pairs * problem.group * problem.query_tiles;
  if (group == 0) {
    lower_registers_to<Plan<kHead>::kLoaderRegisters>();
    if (threadIdx.x == 0) load_operands(problem, at, tiles);
  } else {
    raise_registers_to<Plan<kHead>::kRegisters>();
    attend(problem, at, tiles, group - 1);
  }
}

}  // namespace octet::hopper::forward
