#pragma once

#include "attention_forward_layout.cuh"

/// The softmax of attention_forward_kernel.cuh, in the registers of a warp: scores of its 16 rows lie as
/// warpgroup_product leaves them.
namespace octet::hopper::forward {

/// Of a thread's powers of scores of a tile: what all later sums have room for.
constexpr float kLargestSum = 1099511627776.0f;  // 2^40

/// Of the four threads that share a row.
__device__ inline float row_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
__device__ inline float row_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

/// What a thread knows of its two rows, in the arrangement of warpgroup_product. What is subtracted from a
/// row's scores is the largest of its first tile's, as long as powers of later scores are not too large.
struct Softmax {
  float unit;     ///< of scores, in powers of two
  float base[2];  ///< what is subtracted, in powers of two
  float sum[2];   ///< of this thread's powers

  /// Of a row's first scores.
  template <int kScores>
  __device__ void start(const float (&s)[kScores]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      base[h] = largest(s, h);
      sum[h] = 0.0f;
    }
  }

  /// The powers of scores take their place. False, and no sum is changed, where they are too large.
  template <int kScores>
  __device__ bool add(float (&s)[kScores]) {
    float more[2];
    raise(s, more);
    if (__any_sync(0xffffffffu, !(more[0] < kLargestSum && more[1] < kLargestSum))) return false;
#pragma unroll
    for (int h = 0; h < 2; ++h) sum[h] += more[h];
    return true;
  }

  /// The same with another base. shrink: what becomes of earlier powers.
  template <int kScores>
  __device__ void rebase(float (&s)[kScores], float (&shrink)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float before = base[h];
      base[h] = fmaxf(before, largest(s, h));
      shrink[h] = approximate_exp2(before - base[h]);
    }
    float more[2];
    raise(s, more);
#pragma unroll
    for (int h = 0; h < 2; ++h) sum[h] = fmaf(sum[h], shrink[h], more[h]);
  }

 private:
  template <int kScores>
  __device__ void raise(float (&s)[kScores], float (&total)[2]) const {
    total[0] = total[1] = 0.0f;
#pragma unroll
    for (int j = 0; j < kScores / 4; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        s[4 * j + i] = approximate_exp2(fmaf(s[4 * j + i], unit, -base[i / 2]));
        total[i / 2] += s[4 * j + i];
      }
    }
  }

  template <int kScores>
  __device__ float largest(const float (&s)[kScores], int h) const {
    float a = s[2 * h], b = s[2 * h + 1];
#pragma unroll
    for (int j = 1; j < kScores / 4; ++j) {
      a = fmaxf(a, s[4 * j + 2 * h]);
      b = fmaxf(b, s[4 * j + 2 * h + 1]);
    }
    return row_max(fmaxf(a, b)) * unit;
  }
};

/// Scores of a warp's 16 queries by units that it has to itself.
template <int kHead, int kScores>
__device__ inline void score_again(float (&s)[kScores], std::uint32_t queries, std::uint32_t keys) {
  const int lane = thread_read_here() % 32;
#pragma unroll
  for (int i = 0; i < kScores; ++i) s[i] = 0.0f;
#pragma unroll 1
  for (int k = 0; k < kHead; k += 16) {
    // The two elements from k + 8·second + 2·(lane % 4) on of row 8·octet + lane / 4.
    const auto words = [&](std::uint32_t rows, int octet, int second) {
      const int chunk = k % 64 / 8 + second;
      return static_cast<std::uint32_t>(
          load_word(rows + (octet * 8 + lane / 4) * 128 + ((chunk ^ lane / 4) << 4) + lane % 4 * 4));
    };
    const std::uint32_t q = queries + k / 64 * kBoxBytes, key = keys + k / 64 * 2 * kBoxBytes;
    const std::uint32_t a[4] = {words(q, 0, 0), words(q, 1, 0), words(q, 0, 1), words(q, 1, 1)};
#pragma unroll
    for (int j = 0; j < kScores / 4; ++j) {
      float four[4] = {s[4 * j], s[4 * j + 1], s[4 * j + 2], s[4 * j + 3]};
      warp_product(four, a, words(key, j, 0), words(key, j, 1));
#pragma unroll
      for (int i = 0; i < 4; ++i) s[4 * j + i] = four[i];
    }
  }
}

/// Hides keys of which the thread's first row sees `seen` columns, and the second eight more.
template <int kScores>
__device__ inline void hide(float (&s)[kScores], int seen) {
#pragma unroll
  for (int j = 0; j < kScores / 4; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (8 * j + i % 2 >= seen + i / 2 * 8) s[4 * j + i] = -INFINITY;
    }
  }
}

/// Powers as operands of the products with values.
template <int kScores, int kSteps>
__device__ inline void narrow(const float (&s)[kScores], std::uint32_t (&powers)[kSteps][4]) {
#pragma unroll
  for (int i = 0; i < kScores / 8; ++i) {
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      powers[i][word] = packed(s[8 * i + 2 * word], s[8 * i + 2 * word + 1]);
    }
  }
}

}  // namespace octet::hopper::forward
