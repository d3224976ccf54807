// Takes the place of src/ops/cuda/matrix_units.cuh, which is assembly, under emulation.
#pragma once

#include "kernel_tools.cuh"

namespace octet::cuda {

namespace emulated {

inline float half_of(unsigned word, int half) {
  const unsigned bits = half == 0 ? word << 16 : word & 0xffff0000u;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

/// The operands that a lane holds.
struct Operands {
  unsigned a[4], b[2];
};
static_assert(sizeof(Operands) <= emulation::kShownBytes);

inline const Operands& of_lane(const void* shown, int lane) {
  return *reinterpret_cast<const Operands*>(static_cast<const char*>(shown) + emulation::kShownBytes * lane);
}

/// Element (row, col) of matrix `index`, whose row addresses the lanes showed.
inline std::uint16_t element(const void* shown, int index, int row, int col) {
  const std::uint16_t* address;
  memcpy(&address, static_cast<const char*>(shown) + emulation::kShownBytes * (8 * index + row),
         sizeof address);
  std::uint16_t value;
  memcpy(&value, address + col, sizeof value);
  return value;
}

inline void load(unsigned (&r)[4], const bf16* row, bool transposed) {
  const void* const shown = emulation::exchange(&row, sizeof row, 0);
  const int g = emulation::here.lane / 4, t = emulation::here.lane % 4;
  for (int i = 0; i < 4; ++i) {
    const unsigned low = transposed ? element(shown, i, 2 * t, g) : element(shown, i, g, 2 * t);
    const unsigned high = transposed ? element(shown, i, 2 * t + 1, g) : element(shown, i, g, 2 * t + 1);
    r[i] = high << 16 | low;
  }
}

}  // namespace emulated

inline void multiply_add(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  emulated::Operands own{};
  memcpy(own.a, a, sizeof own.a);
  own.b[0] = b0;
  own.b[1] = b1;
  const void* const shown = emulation::exchange(&own, sizeof own, 0);
  const int g = emulation::here.lane / 4, t = emulation::here.lane % 4;
  for (int i = 0; i < 4; ++i) {
    const int row = g + 8 * (i / 2), col = 2 * t + i % 2;
    for (int k = 0; k < 16; ++k) {
      const int lane = k % 8 / 2, half = k % 2;
      const unsigned left = emulated::of_lane(shown, 4 * (row % 8) + lane).a[row / 8 + 2 * (k / 8)];
      const unsigned right = emulated::of_lane(shown, 4 * col + lane).b[k / 8];
      d[i] += emulated::half_of(left, half) * emulated::half_of(right, half);
    }
  }
}

inline void load_matrices(unsigned (&r)[4], const bf16* row) {
  emulated::load(r, row, false);
}
inline void load_transposed(unsigned (&r)[4], const bf16* row) {
  emulated::load(r, row, true);
}

}  // namespace octet::cuda
