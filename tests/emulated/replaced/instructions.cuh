// Takes the place of src/ops/hopper/instructions.cuh, which is assembly, under emulation.
#pragma once

#include <cuda_bf16.h>

#include "../hopper_units.h"
#include "../warpgroup_products.h"

namespace octet::hopper {

inline std::uint32_t shared_address(const void* pointer) {
  const auto* const begin = static_cast<const std::byte*>(emulation::dynamic_shared());
  return static_cast<std::uint32_t>(static_cast<const std::byte*>(pointer) - begin) + emulation::kSharedBegin;
}
inline int thread_read_here() {
  return static_cast<int>(threadIdx.x);
}
inline std::uint32_t rank_in_cluster() {
  return static_cast<std::uint32_t>(emulation::rank_in_cluster());
}
inline void cluster_synchronize() {
  emulation::cluster_barrier();
}

template <int kRegisters>
void lower_registers_to() {}
template <int kRegisters>
void raise_registers_to() {}

/// As the GPU's, to 2^-11: results that need more than that do not pass.
inline float approximate_tanh(float x) {
  return std::tanh(x) * (1.0f - 0x1p-12f);
}

inline float approximate_exp2(float x) {
  return x < -126.0f ? 0.0f : std::exp2(x);
}

inline void named_barrier(int barrier, int threads) {
  emulation::named_barrier(barrier, threads);
}
inline void barrier_init(std::uint32_t barrier, int arrivals) {
  if (barrier % 8 != 0) emulation::stop("a barrier at an address that is not a multiple of 8");
  emulation::make_barrier(emulation::this_block(), barrier, arrivals);
}
inline void barriers_ready() {}

inline void arrive_expecting(std::uint32_t barrier, int bytes) {
  emulation::TransactionBarrier& arrival = emulation::barrier_at(emulation::this_block(), barrier);
  arrival.bytes += bytes;
  arrival.arrive();
}
inline void arrive(std::uint32_t barrier) {
  emulation::barrier_at(emulation::this_block(), barrier).arrive();
}
inline void arrive_in_cluster(std::uint32_t barrier, int rank) {
  emulation::barrier_at(emulation::block_of_cluster(rank), barrier).arrive();
}
inline void send(std::uint32_t to, std::uint32_t barrier, int rank, int value) {
  const int block = emulation::block_of_cluster(rank);
  std::byte* const place = emulation::shared_at(block, to, sizeof value);
  memset(place, 0xff, sizeof value);
  emulation::copy_at_last(block, barrier, sizeof value, [=] { memcpy(place, &value, sizeof value); });
}
inline void store_word(std::uint32_t to, int value) {
  memcpy(emulation::shared_at(emulation::this_block(), to, sizeof value), &value, sizeof value);
}
inline int load_word(std::uint32_t from) {
  int value;
  memcpy(&value, emulation::shared_at(emulation::this_block(), from, sizeof value), sizeof value);
  return value;
}
inline uint4 load_words(std::uint32_t from) {
  uint4 four;
  if (from % 16 != 0) emulation::stop("four words at an address that is not a multiple of 16");
  memcpy(&four, emulation::shared_at(emulation::this_block(), from, sizeof four), sizeof four);
  return four;
}
inline void wait(std::uint32_t barrier, int parity) {
  const emulation::TransactionBarrier& arrival = emulation::barrier_at(emulation::this_block(), barrier);
  while (static_cast<int>(arrival.phases % 2) == parity) {
    emulation::wait_for_change(arrival.phases, arrival.phases);
  }
}

inline void load(std::uint32_t to, const CUtensorMap& map, std::uint32_t barrier, int x, int y, int z = 0) {
  emulation::load_box(emulation::this_block(), to, map, barrier, x, y, z);
}
inline void load_bytes(std::uint32_t to, const void* from, int bytes, std::uint32_t barrier) {
  emulation::load_span(to, from, bytes, barrier);
}
inline void load_for_both(std::uint32_t to, const CUtensorMap& map, std::uint32_t barrier, int x, int y,
                          int z = 0) {
  for (int rank = 0; rank < 2; ++rank) {
    emulation::load_box(emulation::block_of_cluster(rank), to, map, barrier, x, y, z);
  }
}

inline void prefetch(const CUtensorMap&, int, int) {}
inline void stores_before_copies() {
  emulation::this_thread().unfenced.clear();
}
inline void store(const CUtensorMap& map, std::uint32_t from, int x, int y, int z = 0) {
  emulation::store_box(map, from, x, y, z, false);
}
inline void add(const CUtensorMap& map, std::uint32_t from, int x, int y) {
  emulation::store_box(map, from, x, y, 0, true);
}
inline void store_floats_at(float* to, std::uint32_t from, int bytes) {
  emulation::store_span(to, from, bytes, false);
}
inline void add_floats_at(float* to, std::uint32_t from, int bytes) {
  emulation::store_span(to, from, bytes, true);
}
template <int kGroups>
void wait_for_reads() {
  emulation::wait_for_boxes(kGroups);
}
inline void wait_for_stores() {
  emulation::wait_for_boxes(0);
}

inline void store_shared(std::uint32_t to, const void* value, std::size_t bytes) {
  memcpy(emulation::shared_at(emulation::this_block(), to, bytes), value, bytes);
  emulation::this_thread().unfenced.push_back(to);
}
inline void store_matrices(std::uint32_t row, const std::uint32_t (&parts)[4]) {
  const auto* const rows = static_cast<const std::byte*>(emulation::exchange(&row, sizeof row, 0));
  const int lane = emulation::here.lane;
  for (int i = 0; i < 4; ++i) {
    std::uint32_t at;
    memcpy(&at, rows + emulation::kShownBytes * (8 * i + lane / 4), sizeof at);
    if (at % 16 != 0) emulation::stop("a row of a matrix at an address that is not a multiple of 16");
    store_shared(at + lane % 4 * 4, &parts[i], sizeof parts[i]);
  }
}
inline void store_floats(std::uint32_t to, float a, float b) {
  const float both[2] = {a, b};
  store_shared(to, both, sizeof both);
}

inline void store_floats(std::uint32_t to, float a, float b, float c, float d) {
  const float all[4] = {a, b, c, d};
  if (to % 16 != 0) emulation::stop("four numbers at an address that is not a multiple of 16");
  store_shared(to, all, sizeof all);
}
inline float2 load_two_floats(std::uint32_t from) {
  float2 two;
  if (from % 8 != 0) emulation::stop("two numbers at an address that is not a multiple of 8");
  memcpy(&two, emulation::shared_at(emulation::this_block(), from, sizeof two), sizeof two);
  return two;
}
inline float4 load_floats(std::uint32_t from) {
  float4 four;
  if (from % 16 != 0) emulation::stop("four numbers at an address that is not a multiple of 16");
  memcpy(&four, emulation::shared_at(emulation::this_block(), from, sizeof four), sizeof four);
  return four;
}

inline uint4 load_global(const void* from) {
  if (reinterpret_cast<std::uintptr_t>(from) % 16 != 0)
    emulation::stop("16 bytes at an address that is not a multiple of them");
  uint4 four;
  memcpy(&four, from, sizeof four);
  return four;
}
inline void store_global(void* to, const uint4& four) {
  if (reinterpret_cast<std::uintptr_t>(to) % 16 != 0)
    emulation::stop("16 bytes at an address that is not a multiple of them");
  memcpy(to, &four, sizeof four);
}
inline void wait_for_count(const unsigned* counter, unsigned value) {
  while (static_cast<int>(*counter - value) < 0) {
    emulation::wait_for_change(emulation::counts(), emulation::counts());
  }
}
/// As on the GPU, copies that this thread has not waited for are not there yet.
inline void count_on(unsigned* counter) {
  ++*counter;
  ++emulation::counts();
}

inline void warp_product(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
  const std::uint32_t own[6] = {a[0], a[1], a[2], a[3], b0, b1};
  static_assert(sizeof own <= emulation::kShownBytes);
  const auto* const shown = static_cast<const std::byte*>(emulation::exchange(own, sizeof own, 0));
  const auto element = [&](int lane, int word, int half) {
    std::uint32_t two;
    memcpy(&two, shown + emulation::kShownBytes * lane + 4 * word, sizeof two);
    return emulation::upper_half(half == 0 ? two & 0xffff : two >> 16);
  };
  const int g = emulation::here.lane / 4, t = emulation::here.lane % 4;
  for (int i = 0; i < 4; ++i) {
    for (int k = 0; k < 16; ++k) {
      const int pair = k % 8 / 2;
      d[i] += element(4 * g + pair, i / 2 + k / 8 * 2, k % 2) *
              element(4 * (2 * t + i % 2) + pair, 4 + k / 8, k % 2);
    }
  }
}

inline std::uint64_t operand_at(std::uint32_t address) {
  return static_cast<std::uint64_t>((address & 0x3ffff) >> 4) | std::uint64_t{8192 >> 4} << 16 |
         std::uint64_t{1024 >> 4} << 32 | std::uint64_t{1} << 62;
}
constexpr int kAcross = 32 / 16, kDown = 16 * 128 / 16;

inline void products_begin() {
  emulation::this_thread().begun = true;
}
inline void products_commit() {
  emulation::end_series();
}
template <int kSeries>
void products_wait() {
  emulation::wait_for_series(kSeries);
}

}  // namespace octet::hopper
