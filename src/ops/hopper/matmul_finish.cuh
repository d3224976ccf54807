#pragma once

#include "matmul_handover.cuh"

/// How three warps make results of sums in bfloat16: copies and elementwise work from shared memory to
/// matrices, while the next tile is computed.
namespace octet::hopper {

// By one instruction of the special function units. Its tangent is off by at most 2^-11, so the result by
// 2^-12: an eighth of what rounding to bfloat16 may change below 1. Where the result is small that bound
// stays absolute, unlike in activation_math.cuh.
__device__ inline float logistic(float x) {
  return 0.5f + 0.5f * approximate_tanh(0.5f * x);
}

// gelu(v) = v·(1 + tanh(u))/2 with u = kGeluScale·(v + kGeluCubic·v³); as few instructions as the forms below
// have.
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

/// Eight adjacent bfloat16 elements.
struct Eight {
  std::uint32_t words[4];

  __device__ static Eight of(const uint4& four) { return {{four.x, four.y, four.z, four.w}}; }
  __device__ static Eight load(const __nv_bfloat16* from) { return of(load_global(from)); }
  __device__ void store(__nv_bfloat16* to) const {
    store_global(to, make_uint4(words[0], words[1], words[2], words[3]));
  }
};

struct SwigluGradients {
  float dgate, dup, y;
};
__device__ inline SwigluGradients swiglu_gradients(float gate, float up, float s) {
  const float sigmoid = logistic(gate), silu = gate * sigmoid;
  return {s * up * fmaf(silu, 1.0f - sigmoid, sigmoid), s * silu, silu * up};
}

/// The work of the finishing warps of block `rank` of a cluster. A warp takes every third batch of rows;
/// a lane has eight columns of a row, or of a forward SwiGLU, whose tiles have 128 gates and the 128 ups that
/// belong to them, of every other row.
template <Ending kEnding>
class Finish {
 public:
  __device__ Finish(const Product& product, Handover& handover, int rank, int warp)
      : product_(product), handover_(handover), rank_(rank), warp_(warp), lane_(threadIdx.x % 32) {}

  /// From the first wait for the tile's sums on, the next one is computed.
  __device__ void run(const Tile& tile) {
    tile_ = tile;
    first_row_ = tile.row * 2 * kRows + rank_ * kRows;
    if constexpr (kEnding == Ending::kBfloat16) {
      for (int half = 0; half < 2; ++half) {
        take(half);
        release();
      }
    } else {
      finish_tile();
    }
  }
  /// Once all tiles are done.
  __device__ void end() const {
    if (lane_ == 0) wait_for_stores();
  }

 private:
  static constexpr bool kGeluBackward =
      kEnding == Ending::kGeluGradient || kEnding == Ending::kGeluGradientSums;
  static constexpr bool kSwigluBackward = is_swiglu_gradient(kEnding);
  static constexpr bool kWritesY = kEnding != Ending::kSwigluGradientAlone;
  static constexpr bool kSwiglu = kEnding == Ending::kSwiglu, kSums = kEnding == Ending::kGeluGradientSums;
  static constexpr int kReads = kSwigluBackward ? 2 : 1;  // of inner, an element of y, where it is read
  static constexpr int kBatchRows = 4, kBatches = kRows / kBatchRows;
  static constexpr int kRounds = (kBatches + kFinishingWarps - 1) / kFinishingWarps;
  static constexpr int kLaneRows = kSwiglu ? 2 : 1;       // from one row of a lane to the next
  static constexpr int kAtOnce = kBatchRows / kLaneRows;  // a lane's rows in a batch
  // Rows whose instructions run interleaved, and batches of inner at work and on their way, as far as
  // registers go.
  static constexpr int kTogether = kSwigluBackward ? 2 : kAtOnce;
  static constexpr int kRing = kSwigluBackward ? 2 : is_gradient(kEnding) ? 4 : 1;
  using Batch = Eight[kAtOnce][kReads];

  __device__ int place() const { return kSwiglu ? lane_ % 16 : lane_; }
  __device__ int inner_cols() const { return (kSwigluBackward ? 2 : 1) * product_.cols; }
  // By one instruction.
  __device__ static __nv_bfloat16* down(__nv_bfloat16* from, int rows, int cols) {
    return reinterpret_cast<__nv_bfloat16*>(reinterpret_cast<char*>(from) +
                                            std::uint64_t{static_cast<unsigned>(rows)} *
                                                (2 * static_cast<unsigned>(cols)));
  }
  __device__ int batch_of(int round) const { return round * kFinishingWarps + warp_; }
  __device__ int row_of(int round, int i) const {
    return batch_of(round) * kBatchRows + i * kLaneRows + (kSwiglu ? lane_ / 16 : 0);
  }

  __device__ void fetch(int round, Batch& batch) const {
    if constexpr (is_gradient(kEnding)) {
      if (batch_of(round) >= kBatches) return;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int row = row_of(round, i);
        if (row >= rows_inside_) continue;
#pragma unroll
        for (int n = 0; n < kReads; ++n)
          batch[i][n] = Eight::load(down(inner_ + n * product_.cols, row, inner_cols()));
      }
    }
  }

  // Waits for a half. One thread of the half's own warp has s copied as it is, to y or inner.
  __device__ void take(int half) {
    half_ = half;
    handover_.take(half);
    if constexpr (!is_gradient(kEnding)) {
      if (warp_ != half || lane_ != 0) return;
#pragma unroll
      for (int part = 0; part < 4; ++part) {
        const int x = kSwiglu ? part / 2 * product_.cols + tile_.col * (kCols / 2) + part % 2 * 64
                              : tile_.col * kCols + part * 64;
        handover_.copy(half, part, kEnding == Ending::kBfloat16 ? product_.y : product_.inner, x,
                       first_row_ + half * 64);
      }
    }
  }
  __device__ void release() {
    if (!is_gradient(kEnding) && lane_ == 0) wait_for_reads<0>();
    handover_.release(half_);
  }

  __device__ void finish_tile() {
    const int col = tile_.col * (kSwiglu ? kCols / 2 : kCols) + place() * 8;
    rows_inside_ = col < product_.cols ? product_.rows - first_row_ : 0;
    y_ = product_.y_elements + std::int64_t{first_row_} * product_.cols + col;
    inner_ = product_.inner_elements + std::int64_t{first_row_} * inner_cols() + col;
    Batch batches[kRing];
#pragma unroll
    for (int i = 0; i < kRing - 1; ++i) fetch(i, batches[i]);
    take(0);
    float sums[8] = {};
#pragma unroll 1
    for (int round = 0; round < kRounds; round += kRing) {
#pragma unroll
      for (int i = 0; i < kRing; ++i) {
        fetch(round + i + kRing - 1, batches[(i + kRing - 1) % kRing]);
        finish(round + i, batches[i], sums);
      }
    }
    release();
    if constexpr (kSums) write_column_sums(sums);
  }

  __device__ void finish(int round, const Batch& batch, float (&sums)[8]) {
    if (batch_of(round) >= kBatches) return;
    if (batch_of(round) >= kBatches / 2 && half_ == 0) {
      release();
      take(1);
    }
    const std::uint32_t first_s = handover_.eight_at(half_, row_of(round, 0) % (kRows / 2), place());
#pragma unroll
    for (int begin = 0; begin < kAtOnce; begin += kTogether) {
      Eight s[kTogether], first[kTogether], second[kTogether], y[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const std::uint32_t from = Handover::below(first_s, (begin + i) * kLaneRows);
        s[i] = Eight::of(load_words(from));
        if constexpr (kSwiglu) second[i] = Eight::of(load_words(from + 2 * kBoxBytes));
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const Eight(&value)[kReads] = batch[begin + i];
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          const float2 two = unpacked(s[i].words[w]);
          if constexpr (kEnding == Ending::kGelu) {
            y[i].words[w] = packed(gelu(two.x), gelu(two.y));
          } else if constexpr (kGeluBackward) {
            const float2 v = unpacked(value[0].words[w]);
            y[i].words[w] = packed(two.x * gelu_derivative(v.x), two.y * gelu_derivative(v.y));
          } else if constexpr (kSwiglu) {
            const float2 up = unpacked(second[i].words[w]);
            y[i].words[w] = packed(two.x * logistic(two.x) * up.x, two.y * logistic(two.y) * up.y);
          } else {
            const float2 gate = unpacked(value[0].words[w]), up = unpacked(value[kReads - 1].words[w]);
            const SwigluGradients a = swiglu_gradients(gate.x, up.x, two.x);
            const SwigluGradients b = swiglu_gradients(gate.y, up.y, two.y);
            first[i].words[w] = packed(a.dgate, b.dgate);
            second[i].words[w] = packed(a.dup, b.dup);
            if constexpr (kWritesY) y[i].words[w] = packed(a.y, b.y);
          }
        }
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int row = row_of(round, begin + i);
        if (row >= rows_inside_) continue;
        if constexpr (kSwigluBackward) {
          __nv_bfloat16* const inner = down(inner_, row, inner_cols());
          first[i].store(inner);
          second[i].store(inner + product_.cols);
        }
        if constexpr (kWritesY) y[i].store(down(y_, row, product_.cols));
        if constexpr (kSums) {
#pragma unroll
          for (int w = 0; w < 4; ++w) {
            const float2 rounded = unpacked(y[i].words[w]);
            sums[2 * w] += rounded.x;
            sums[2 * w + 1] += rounded.y;
          }
        }
      }
    }
  }

  __device__ void write_column_sums(const float (&sums)[8]) {
    const std::uint32_t stage = handover_.next_column_sums(), own = stage + (warp_ * kCols + lane_ * 8) * 4;
    store_floats(own, sums[0], sums[1], sums[2], sums[3]);
    store_floats(own + 16, sums[4], sums[5], sums[6], sums[7]);
    named_barrier(3, kFinishingWarps * 32);  // the other place is read before it is written again
    for (int c = warp_ * 32 + lane_; c < kCols; c += kFinishingWarps * 32) {
      const int col = tile_.col * kCols + c;
      float sum = 0.0f;
#pragma unroll
      for (int w = 0; w < kFinishingWarps; ++w) sum += __int_as_float(load_word(stage + (w * kCols + c) * 4));
      if (col < product_.cols) product_.sums[std::int64_t{first_row_ / kRows} * product_.cols + col] = sum;
    }
  }

  const Product& product_;
  Handover& handover_;
  const int rank_, warp_, lane_;
  Tile tile_{};
  int first_row_ = 0, rows_inside_ = 0, half_ = 0;
  __nv_bfloat16 *y_ = nullptr, *inner_ = nullptr;  // this lane's columns in the tile's first row
};

}  // namespace octet::hopper
