// Takes the place of src/ops/hopper/warpgroup_product.cuh, which is assembly, under emulation.
#pragma once

#include "../warpgroup_products.h"

namespace octet::hopper {

template <int kSums>
void settled(float (&)[kSums]) {}

template <bool kTurnA, bool kTurnB, int kSums>
void warpgroup_product(float (&d)[kSums], std::uint64_t a, std::uint64_t b, int add) {
  static_assert(kSums == 32 || kSums == 64 || kSums == 128);
  emulation::issue(d, nullptr, {2 * kSums, false, a, b, kTurnA, kTurnB, add != 0});
}
template <bool kTurnB, int kSums>
void warpgroup_product(float (&d)[kSums], const std::uint32_t (&a)[4], std::uint64_t b, int add) {
  static_assert(kSums == 32 || kSums == 64);
  emulation::issue(d, a, {2 * kSums, true, 0, b, false, kTurnB, add != 0});
}

}  // namespace octet::hopper
