#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include <cstdint>

/// A product as its kernels are given it, and the order of its tiles.
namespace octet::hopper {

/// What becomes of the sums s. In bfloat16, s (with its bias) is rounded before an activation follows, as it
/// is where the activation is an operator of its own.
enum class Ending {
  kFloat32,           ///< y = s
  kAdd,               ///< y += s, float32
  kBfloat16,          ///< y = s + bias
  kGelu,              ///< inner = s + bias, y = gelu(inner)
  kGeluGradient,      ///< y = s · gelu'(inner)
  kGeluGradientSums,  ///< the same, and sums over the rows of y as it was rounded
  kSwiglu,            ///< b holds gates, then ups: inner = [gate, up] = s, y = silu(gate)·up
  kSwigluGradient,  ///< inner = [gate, up] becomes its gradient where that of silu(gate)·up, which goes to y,
                    ///< is s
  kSwigluGradientAlone  ///< the same, and y is left as it is
};

__host__ __device__ constexpr bool in_bfloat16(Ending ending) {
  return ending >= Ending::kBfloat16;
}
/// Whether inner is read.
__host__ __device__ constexpr bool is_gradient(Ending ending) {
  return ending >= Ending::kGeluGradient && ending != Ending::kSwiglu;
}
__host__ __device__ constexpr bool is_swiglu_gradient(Ending ending) {
  return ending == Ending::kSwigluGradient || ending == Ending::kSwigluGradientAlone;
}

struct Product {
  CUtensorMap a, b, y, inner;
  const __nv_bfloat16* bias;                   ///< null: none
  __nv_bfloat16 *y_elements, *inner_elements;  ///< where an activation follows
  float* sums;               ///< [ceil(rows / 256) · 2, cols], where they are wanted: over 128 rows each
  int rows, cols;            ///< of y
  int row_tiles, col_tiles;  ///< of 256 rows, and of 256 columns of s
  int steps;                 ///< along k
  unsigned* taken;           ///< tiles that were asked for, of this and all earlier products
  unsigned taken_before;     ///< of all earlier ones
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

}  // namespace octet::hopper
