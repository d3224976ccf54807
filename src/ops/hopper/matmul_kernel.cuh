#pragma once

#include <type_traits>

#include "instructions.cuh"
#include "parts.cuh"
#include "tiling.h"
#include "warpgroup_product.cuh"

/// Matrix products of bfloat16 with float32 sums: a persistent grid of clusters of two blocks, each block a
/// tile of 128 x 256. A warpgroup of each block loads, the tiles of b for both blocks at once; two compute 64
/// rows each (warp specialisation as in CUTLASS's cooperative kernels, Thakkar et al. 2023). What the sums
/// become is written by the copy engine while the next tile's operands already arrive.
namespace octet::hopper {

constexpr int kStages = 4;
constexpr int kBytesA = kRows * kDepth * 2, kBytesB = kCols * kDepth * 2, kStageBytes = kBytesA + kBytesB;
constexpr int kThreads = 3 * kGroup;
constexpr int kTurnsBytes = 2 * (8 + 8 + 4);
/// With room to align to the 1024 bytes of a swizzle.
constexpr int kSharedBytes = kStages * kStageBytes + 2 * kPartsBytes + 2 * kStages * 8 + kTurnsBytes + 1024;

/// What becomes of the sums s.
enum class Ending {
  kBfloat16,          ///< y = s + bias
  kFloat32,           ///< y = s
  kAdd,               ///< y += s, float32
  kGelu,              ///< inner = s + bias, y = gelu(inner)
  kGeluGradient,      ///< y = s · gelu'(inner)
  kGeluGradientSums,  ///< the same, and sums over the rows of y as it was rounded
  kSwiglu,            ///< b holds gates, then ups: inner = [gate, up] = s, y = silu(gate)·up
  kSwigluGradient  ///< inner = [gate, up] becomes its gradient where that of silu(gate)·up, which goes to y,
                   ///< is s
};

struct Product {
  CUtensorMap a, b, y, inner;
  const __nv_bfloat16* bias;    ///< null: none
  const __nv_bfloat16* values;  ///< inner, where it is read
  float* sums;                  ///< [ceil(rows / 256) · 4, cols], where they are wanted: over 64 rows each
  int rows, cols;               ///< of y
  int row_tiles, col_tiles;     ///< of 256 rows, and of 256 columns of s
  int steps;                    ///< along k
  unsigned* taken;              ///< tiles that were asked for, of this and all earlier products
  unsigned taken_before;        ///< of all earlier ones
};

/// Rows of tiles that are walked together, so that what they read of b is still in the cache.
constexpr int kRowsTogether = 8;

struct Tile {
  int row, col;
};

__device__ inline Tile tile_of(const Product& product, int number) {
  const int a_band = kRowsTogether * product.col_tiles, band = number / a_band, first = band * kRowsTogether;
  const int rows = min(kRowsTogether, product.row_tiles - first), within = number - band * a_band;
  return {first + within % rows, within / rows};
}

// By one instruction of the special function units, which bound the epilogues. Its tangent is off by at most
// 2^-11, so the result by 2^-12: an eighth of what rounding to bfloat16 may change below 1. Where the result
// is small that bound stays absolute, unlike in activation_math.cuh.
__device__ inline float logistic(float x) {
  return 0.5f + 0.5f * approximate_tanh(0.5f * x);
}

// gelu(v) = v·(1 + tanh(u))/2 with u = kGeluScale·(v + kGeluCubic·v³); as few instructions as the forms below
// have, since epilogues are bound by these too.
constexpr float kGeluScale = 0.7978845608028654f;  // sqrt(2/pi)
constexpr float kGeluCubic = 0.044715f;

__device__ inline float gelu(float v) {
  const float u = v * fmaf(kGeluScale * kGeluCubic, v * v, kGeluScale), half = 0.5f * v;
  return fmaf(half, approximate_tanh(u), half);
}

// (1 + tanh(u) + v·u'·(1 - tanh²(u)))/2
__device__ inline float gelu_derivative(float v) {
  const float square = v * v, u = v * fmaf(kGeluScale * kGeluCubic, square, kGeluScale);
  const float slope = v * fmaf(3.0f * kGeluScale * kGeluCubic, square, kGeluScale);
  const float tangent = approximate_tanh(u);
  return fmaf(0.5f, fmaf(fmaf(-tangent, tangent, 1.0f), slope, tangent), 0.5f);
}

/// Which tile comes next: clusters take them in rising order, so that those that start late, since a kernel
/// of another stream holds their multiprocessors, do less. A cluster's first tile has its own number; block 0
/// asks for the next one while a tile is at work and tells both blocks, in two places by turns.
class Turns {
 public:
  __device__ explicit Turns(std::uint32_t at) : known_(at), read_(at + 16), numbers_(at + 32) {}

  __device__ static void init(std::uint32_t at) {
    constexpr int kReaders =
        2 * (1 + 2 * kGroup / 32);  // of both blocks: who loads, and every computing warp
    for (int turn = 0; turn < 2; ++turn) {
      barrier_init(at + 8 * turn, 1);
      barrier_init(at + 16 + 8 * turn, kReaders);
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

  /// The tile that was asked for. Of the loading thread; and of whole computing warps, whose threads must all
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

/// Pairs of 64 columns of a matrix, in the places of words(j, h) above; zeros beyond the matrix.
struct Pairs {
  std::uint32_t words[8][2];

  /// `at`: element (row, col) of the matrix.
  __device__ void read(const __nv_bfloat16* at, std::int64_t stride, int row, int rows, int col, int cols) {
    const __nv_bfloat16* const rows_at[2] = {at, at + 8 * stride};
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const bool inside = row + 8 * h < rows && col + 8 * j < cols;
        words[j][h] = inside ? *reinterpret_cast<const std::uint32_t*>(rows_at[h] + 8 * j) : 0;
      }
    }
  }
};

/// Writes what becomes of the sums of a warpgroup.
template <Ending kEnding>
__device__ inline void finish(const Product& product, Parts& parts, float (&d)[128], int row, int col,
                              int thread) {
  const int lane = thread % 32, pair = lane % 4 * 2;
  const int lane_row = row + thread / 32 * 16 + lane / 4;
  const auto bias = [&](int j) {
    const int at = col + 8 * j + pair;
    return product.bias == nullptr || at >= product.cols
               ? float2{}
               : unpacked(*reinterpret_cast<const std::uint32_t*>(product.bias + at));
  };
  if constexpr (kEnding == Ending::kBfloat16 || kEnding == Ending::kGelu) {
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      const int x = col + part * 64;
      if (product.bias != nullptr) {
#pragma unroll
        for (int j = part * 8; j < part * 8 + 8; ++j) {
          const float2 two = bias(j);
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            d[4 * j + 2 * h] += two.x;
            d[4 * j + 2 * h + 1] += two.y;
          }
        }
      }
      const auto sums = [&](int j, int h) { return &d[(part * 8 + j) * 4 + 2 * h]; };
      const auto plain = [&](int j, int h) { return packed(sums(j, h)[0], sums(j, h)[1]); };
      if constexpr (kEnding == Ending::kGelu) {
        parts.write(product.inner, x, plain);
        parts.write(product.y, x,
                    [&](int j, int h) { return packed(gelu(sums(j, h)[0]), gelu(sums(j, h)[1])); });
      } else {
        parts.write(product.y, x, plain);
      }
    }
  } else if constexpr (kEnding == Ending::kFloat32 || kEnding == Ending::kAdd) {
#pragma unroll
    for (int part = 0; part < 8; ++part) {
      parts.template write_floats<kEnding == Ending::kAdd>(
          product.y, col + part * 32, [&](int j, int h, int i) { return d[(part * 4 + j) * 4 + 2 * h + i]; });
    }
  } else if constexpr (kEnding == Ending::kGeluGradient || kEnding == Ending::kGeluGradientSums) {
    constexpr bool kSums = kEnding == Ending::kGeluGradientSums;
    ColumnSums sums(thread);
    Pairs inner;
    const __nv_bfloat16* const values = product.values + std::int64_t{lane_row} * product.cols + col + pair;
    inner.read(values, product.cols, lane_row, product.rows, col + pair, product.cols);
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      const int x = col + part * 64;
      const auto at = [&](int j, int h, int i) -> float& { return d[(part * 8 + j) * 4 + 2 * h + i]; };
#pragma unroll
      for (int j = 0; j < 8; ++j) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float2 v = unpacked(inner.words[j][h]);
          at(j, h, 0) *= gelu_derivative(v.x);
          at(j, h, 1) *= gelu_derivative(v.y);
        }
      }
      if (part < 3) {
        inner.read(values + (part + 1) * 64, product.cols, lane_row, product.rows, x + 64 + pair,
                   product.cols);
      }
      parts.write(product.y, x, [&](int j, int h) { return packed(at(j, h, 0), at(j, h, 1)); });
      if constexpr (kSums) sums.take(part, parts.last());
    }
    if constexpr (kSums) {
      sums.write(product.sums + std::int64_t{row / 64} * product.cols + col, product.cols - col);
    }
  } else if constexpr (kEnding == Ending::kSwiglu) {
    // Tiles have 128 gates and the 128 ups that belong to them.
    const int first = col / 2;
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      const int x = first + part * 64;
      const auto gate = [&](int j, int h) { return &d[(part * 8 + j) * 4 + 2 * h]; };
      const auto up = [&](int j, int h) { return &d[(16 + part * 8 + j) * 4 + 2 * h]; };
      parts.write(product.inner, x, [&](int j, int h) { return packed(gate(j, h)[0], gate(j, h)[1]); });
      parts.write(product.inner, product.cols + x,
                  [&](int j, int h) { return packed(up(j, h)[0], up(j, h)[1]); });
      parts.write(product.y, x, [&](int j, int h) {
        const float *g = gate(j, h), *u = up(j, h);
        return packed(g[0] * logistic(g[0]) * u[0], g[1] * logistic(g[1]) * u[1]);
      });
    }
  } else {
    static_assert(kEnding == Ending::kSwigluGradient);
    const std::int64_t stride = 2 * std::int64_t{product.cols};
    Pairs gate, up;
    const __nv_bfloat16* const values = product.values + lane_row * stride + col + pair;
    const auto read = [&](int x) {
      const __nv_bfloat16* const at = values + (x - col);
      gate.read(at, stride, lane_row, product.rows, x + pair, product.cols);
      up.read(at + product.cols, stride, lane_row, product.rows, x + pair, product.cols);
    };
    read(col);
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      const int x = col + part * 64;
      if (x >= product.cols) break;  // where the ups begin
      std::uint32_t dgate[8][2], dup[8][2], y[8][2];
#pragma unroll
      for (int j = 0; j < 8; ++j) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float2 g = unpacked(gate.words[j][h]), u = unpacked(up.words[j][h]);
          const float* const s = &d[(part * 8 + j) * 4 + 2 * h];
          const float s0 = logistic(g.x), s1 = logistic(g.y), silu0 = g.x * s0, silu1 = g.y * s1;
          dgate[j][h] =
              packed(s[0] * u.x * (s0 + silu0 * (1.0f - s0)), s[1] * u.y * (s1 + silu1 * (1.0f - s1)));
          dup[j][h] = packed(s[0] * silu0, s[1] * silu1);
          y[j][h] = packed(silu0 * u.x, silu1 * u.y);
        }
      }
      if (part < 3) read(x + 64);
      parts.write(product.inner, x, [&](int j, int h) { return dgate[j][h]; });
      parts.write(product.inner, product.cols + x, [&](int j, int h) { return dup[j][h]; });
      parts.write(product.y, x, [&](int j, int h) { return y[j][h]; });
    }
  }
}

/// kTurnA: a is stored [k, m] instead of [m, k]; kTurnB: b is stored [k, n] instead of [n, k].
template <bool kTurnA, bool kTurnB, Ending kEnding>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kThreads, 1)
    product_kernel(const __grid_constant__ Product product) {
  extern __shared__ unsigned char memory[];
  const std::uint32_t stages = (shared_address(memory) + 1023) & ~1023u;
  const std::uint32_t parts_at = stages + kStages * kStageBytes, barriers = parts_at + 2 * kPartsBytes;
  const std::uint32_t turns_at = barriers + 2 * kStages * 8;
  const auto full = [&](int stage) { return barriers + 8 * stage; };
  const auto empty = [&](int stage) { return barriers + 8 * (kStages + stage); };
  const int group = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kGroup, 0);
  const int rank = static_cast<int>(rank_in_cluster());
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      barrier_init(full(stage), 1);
      barrier_init(empty(stage), 4);  // the computing warpgroups of both blocks
    }
    Turns::init(turns_at);
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
    lower_registers_to<24>();
    for (int number = threadIdx.x == 0 ? cluster : tiles; number < tiles; number = turns.next<false>()) {
      const Tile tile = tile_of(product, number);
      const int row = tile.row * 2 * kRows + rank * kRows;
      // Half of the tile of b from each block; with SwiGLU one half is of gates and one of ups.
      const int col = kEnding == Ending::kSwiglu ? tile.col * (kCols / 2) + rank * product.cols
                                                 : tile.col * kCols + rank * (kCols / 2);
      for (int step = 0; step < product.steps; ++step) {
        wait(empty(stage), parity ^ 1);
        arrive_expecting(full(stage), kStageBytes);
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
        next_stage();
        // The stages are full: there is time.
        if (step == min(kStages, product.steps) - 1) turns.ask(product, rank, clusters);
      }
    }
  } else {
    raise_registers_to<240>();
    const int half = group - 1, thread = static_cast<int>(threadIdx.x) % kGroup;
    constexpr int kStepA = kTurnA ? kDown : kAcross, kStepB = kTurnB ? kDown : kAcross;
    Parts parts(parts_at + half * kPartsBytes, group, thread, 0);
    float d[128];
    for (int number = cluster; number < tiles; number = turns.next<true>()) {
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
      const int row = tile.row * 2 * kRows + rank * kRows + half * 64;
      parts.move_to(row);
      finish<kEnding>(product, parts, d, row, tile.col * kCols, thread);
    }
    if (thread == 0) wait_for_stores();
  }
  // No block may leave while the other one's loads and arrivals can reach it.
  cluster_synchronize();
}

}  // namespace octet::hopper
