#pragma once

#include <type_traits>

#include "instructions.cuh"
#include "matmul_finish.cuh"
#include "parts.cuh"
#include "warpgroup_product.cuh"

/// Matrix products of bfloat16 with float32 sums: a persistent grid of clusters of two blocks, each block a
/// tile of 128 x 256. A thread of each block loads, the tiles of b for both blocks at once; two compute 64
/// rows each (warp specialisation as in CUTLASS's cooperative kernels, Thakkar et al. 2023). Sums in float32
/// are written by the copy engine while the next tile's operands already arrive; those in bfloat16 go to the
/// idle warps of the loading warpgroup, which finish them while the next tile is computed.
namespace octet::hopper {

constexpr int kBytesA = kRows * kDepth * 2, kBytesB = kCols * kDepth * 2, kStageBytes = kBytesA + kBytesB;
constexpr int kThreads = 3 * kGroup;
constexpr int kTurnsBytes = 2 * (8 + 8 + 4);

/// What a kernel with this ending takes of a multiprocessor.
template <Ending kEnding>
struct Resources {
  static constexpr bool kFinished = in_bfloat16(kEnding);
  static constexpr int kStages = kFinished ? 3 : 4;
  static constexpr int kResultBytes = kFinished ? Handover::kBytes : 2 * kPartsBytes;
  /// With room to align to the 1024 bytes of a swizzle.
  static constexpr int kSharedBytes =
      kStages * kStageBytes + kResultBytes + 2 * kStages * 8 + kTurnsBytes + 1024;
};

/// Which tile comes next: clusters take them in rising order, so that those that start late, since a kernel
/// of another stream holds their multiprocessors, do less. A cluster's first tile has its own number; block 0
/// asks for the next one while a tile is at work and tells both blocks, in two places by turns.
class Turns {
 public:
  __device__ explicit Turns(std::uint32_t at) : known_(at), read_(at + 16), numbers_(at + 32) {}

  /// `warps`: of a block, that compute or finish.
  __device__ static void init(std::uint32_t at, int warps) {
    const int readers = 2 * (1 + warps);  // of both blocks, with who loads
    for (int turn = 0; turn < 2; ++turn) {
      barrier_init(at + 8 * turn, 1);
      barrier_init(at + 16 + 8 * turn, readers);
    }
  }

  /// Of the loading thread of each block, once a tile.
  __device__ void ask(const Product& product, int rank, int clusters) {
    arrive_expecting(known_ + 8 * turn_, 4);
    if (rank != 0) return;
    wait(read_ + 8 * turn_, parity_ ^ 1);
    const int number = clusters + static_cast<int>(atomicAdd(product.taken, 1u) - product.taken_before);
    for (int block = 0; block < 2; ++block) {
      send(numbers_ + 4 * turn_, known_ + 8 * turn_, block, number);
    }
  }

  /// The tile that was asked for. Of the loading thread; and of whole warps, whose threads must all
  /// have read it before one says so.
  template <bool kWarp>
  __device__ int next() {
    wait(known_ + 8 * turn_, parity_);
    const int number = load_word(numbers_ + 4 * turn_);
    if constexpr (kWarp) __syncwarp();
    if (threadIdx.x % 32 == 0) arrive_in_cluster(read_ + 8 * turn_, 0);
    turn_ ^= 1;
    if (turn_ == 0) parity_ ^= 1;
    return number;
  }

 private:
  std::uint32_t known_, read_, numbers_;
  int turn_ = 0, parity_ = 0;
};

/// Writes or adds float32 sums of a warpgroup.
template <bool kAdd>
__device__ inline void write(const Product& product, Parts& parts, float (&d)[128], int col) {
#pragma unroll
  for (int part = 0; part < 8; ++part) {
    parts.write_floats<kAdd>(product.y, col + part * 32,
                             [&](int j, int h, int i) { return d[(part * 4 + j) * 4 + 2 * h + i]; });
  }
}

/// Has the part-th 64 x 64 elements of inner of a block's tile brought to the cache, if there are so many.
template <Ending kEnding>
__device__ inline void prefetch_inner(const Product& product, const Tile& tile, int rank, int part) {
  constexpr int kHalves = kRows / 64, kAcross = kCols / 64, kParts = kHalves * kAcross;
  constexpr int kMatrices = is_swiglu_gradient(kEnding) ? 2 : 1;
  if (part >= kMatrices * kParts) return;
  const int col = tile.col * kCols + part % kAcross * 64,
            row = (tile.row * 2 + rank) * kRows + part / kAcross % kHalves * 64;
  if (col < product.cols) prefetch(product.inner, part / kParts * product.cols + col, row);
}

/// kTurnA: a is stored [k, m] instead of [m, k]; kTurnB: b is stored [k, n] instead of [n, k].
template <bool kTurnA, bool kTurnB, Ending kEnding>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kThreads, 1)
    product_kernel(const __grid_constant__ Product product) {
  using Mine = Resources<kEnding>;
  constexpr int kStages = Mine::kStages;
  constexpr bool kHasBias = kEnding == Ending::kBfloat16 || kEnding == Ending::kGelu;
  extern __shared__ unsigned char memory[];
  const std::uint32_t stages = (shared_address(memory) + 1023) & ~1023u;
  const std::uint32_t results = stages + kStages * kStageBytes, barriers = results + Mine::kResultBytes;
  const std::uint32_t turns_at = barriers + 2 * kStages * 8;
  Handover handover(results);
  const auto full = [&](int stage) { return barriers + 8 * stage; };
  const auto empty = [&](int stage) { return barriers + 8 * (kStages + stage); };
  const int group = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kGroup, 0);
  const int rank = static_cast<int>(rank_in_cluster());
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      barrier_init(full(stage), 1);
      barrier_init(empty(stage), 4);  // the computing warpgroups of both blocks
    }
    Turns::init(turns_at, 2 * kGroup / 32 + (Mine::kFinished ? kFinishingWarps : 0));
    if constexpr (Mine::kFinished) handover.init();
    barriers_ready();
  }
  cluster_synchronize();
  const int tiles = product.row_tiles * product.col_tiles;
  const int clusters = static_cast<int>(gridDim.x) / 2, cluster = static_cast<int>(blockIdx.x) / 2;
  Turns turns(turns_at);
  int stage = 0, parity = 0;
  const auto next_stage = [&] {
    if (++stage == kStages) stage = 0, parity ^= 1;
  };

  if (group == 0) {
    if constexpr (Mine::kFinished) {
      const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
      Finish<kEnding> finish(product, handover, rank, warp - 1);
      for (int number = warp > 0 ? cluster : tiles; number < tiles; number = turns.template next<true>())
        finish.run(tile_of(product, number));
      if (warp > 0) finish.end();
    } else {
      lower_registers_to<24>();
    }
    for (int number = threadIdx.x == 0 ? cluster : tiles; number < tiles; number = turns.next<false>()) {
      const Tile tile = tile_of(product, number);
      const int row = tile.row * 2 * kRows + rank * kRows;
      // Half of the tile of b from each block; with SwiGLU one half is of gates and one of ups.
      const int col = kEnding == Ending::kSwiglu ? tile.col * (kCols / 2) + rank * product.cols
                                                 : tile.col * kCols + rank * (kCols / 2);
      for (int step = 0; step < product.steps; ++step) {
        wait(empty(stage), parity ^ 1);
        const int bias_bytes = kHasBias && step == 0 ? handover.bias_bytes(product, tile) : 0;
        arrive_expecting(full(stage), kStageBytes + bias_bytes);
        if (bias_bytes > 0) handover.load_bias(product, tile, bias_bytes, full(stage));
        const int k = step * kDepth;
        const std::uint32_t a = stages + stage * kStageBytes, b = a + kBytesA + rank * (kBytesB / 2);
        if constexpr (kTurnA) {
          load(a, product.a, full(stage), 0, k, row / 64);
        } else {
          load(a, product.a, full(stage), k, row);
        }
        if constexpr (kTurnB) {
          load_for_both(b, product.b, full(stage), 0, k, col / 64);
        } else {
          load_for_both(b, product.b, full(stage), k, col);
        }
        if constexpr (is_gradient(kEnding)) prefetch_inner<kEnding>(product, tile, rank, step);
        next_stage();
        // The stages are full: there is time.
        if (step == min(kStages, product.steps) - 1) turns.ask(product, rank, clusters);
      }
    }
  } else {
    if constexpr (!Mine::kFinished) raise_registers_to<240>();
    const int half = group - 1, thread = static_cast<int>(threadIdx.x) % kGroup;
    constexpr int kStepA = kTurnA ? kDown : kAcross, kStepB = kTurnB ? kDown : kAcross;
    Parts parts(results + half * kPartsBytes, group, thread, 0);
    float d[128];
    for (int number = cluster; number < tiles; number = turns.template next<true>()) {
      const Tile tile = tile_of(product, number);
      int used = -1;  // the stage before
      const auto release = [&] {
        if (used >= 0 && thread < 2) arrive_in_cluster(empty(used), thread);
      };
      for (int step = 0; step < product.steps; ++step) {
        wait(full(stage), parity);
        const std::uint64_t a = operand_at(stages + stage * kStageBytes + half * 8192);
        const std::uint64_t b = operand_at(stages + stage * kStageBytes + kBytesA);
        products_begin();
#pragma unroll
        for (int i = 0; i < kDepth / 16; ++i) {
          warpgroup_product<kTurnA, kTurnB>(d, a + i * kStepA, b + i * kStepB, step > 0 || i > 0);
        }
        products_commit();
        products_wait<1>();
        release();
        used = stage;
        next_stage();
      }
      products_wait<0>();
      release();
      if constexpr (Mine::kFinished) {
        if (kHasBias && product.bias != nullptr) handover.add_bias(d, thread);
        handover.give(half, d, thread);
      } else {
        parts.move_to(tile.row * 2 * kRows + rank * kRows + half * 64);
        write<kEnding == Ending::kAdd>(product, parts, d, tile.col * kCols);
      }
    }
    if (!Mine::kFinished && thread == 0) wait_for_stores();
  }
  // No block may leave while the other one's loads and arrivals can reach it.
  cluster_synchronize();
}

}  // namespace octet::hopper
