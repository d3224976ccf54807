#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <string_view>

#include "octet/base/host_device.h"

namespace octet {

/// Four random 32-bit words from a 128-bit counter and a 64-bit key: Philox-4x32-10 (Salmon et al., "Parallel
/// random numbers: as easy as 1, 2, 3", SC11). Stateless, so any element's number can be had by itself.
struct PhiloxWords {
  std::uint32_t word[4];
};

OCTET_HOST_DEVICE inline PhiloxWords philox(std::uint64_t key, std::uint64_t counter_low,
                                            std::uint64_t counter_high) {
  std::uint32_t c0 = static_cast<std::uint32_t>(counter_low),
                c1 = static_cast<std::uint32_t>(counter_low >> 32);
  std::uint32_t c2 = static_cast<std::uint32_t>(counter_high),
                c3 = static_cast<std::uint32_t>(counter_high >> 32);
  std::uint32_t k0 = static_cast<std::uint32_t>(key), k1 = static_cast<std::uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t p0 = std::uint64_t{0xD2511F53u} * c0, p1 = std::uint64_t{0xCD9E8D57u} * c2;
    const std::uint32_t n0 = static_cast<std::uint32_t>(p1 >> 32) ^ c1 ^ k0;
    const std::uint32_t n2 = static_cast<std::uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c1 = static_cast<std::uint32_t>(p1);
    c3 = static_cast<std::uint32_t>(p0);
    c0 = n0;
    c2 = n2;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

/// The standard normal number that belongs to element `index` of the stream `key`: Box-Muller on two Philox
/// words. Equal for every layout, since it depends on the global index alone.
OCTET_HOST_DEVICE inline float normal_at(std::uint64_t key, std::uint64_t index) {
  const PhiloxWords words = philox(key, index >> 1, 0);
  const int half = static_cast<int>(index & 1) * 2;
  const float u = (static_cast<float>(words.word[half] >> 8) + 0.5f) * (1.0f / 16777216.0f);
  const float v = static_cast<float>(words.word[half + 1] >> 8) * (1.0f / 16777216.0f);
  return sqrtf(-2.0f * logf(u)) * cosf(6.283185307179586f * v);
}

/// A 64-bit mix of two words (the finaliser of SplitMix64), for deriving keys.
OCTET_HOST_DEVICE inline std::uint64_t mix(std::uint64_t a, std::uint64_t b) {
  std::uint64_t x = a * 0x9E3779B97F4A7C15ull + b;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

/// A key for a named stream, such as one parameter's initial values.
inline std::uint64_t key_of(std::uint64_t seed, std::string_view name) {
  std::uint64_t hash = mix(seed, 0x6f63746574ull);
  for (const char c : name) hash = mix(hash, static_cast<unsigned char>(c));
  return hash;
}

}  // namespace octet
