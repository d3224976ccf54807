#include "octet/data/sample_order.h"

#include "octet/base/error.h"
#include "octet/base/rng.h"

namespace octet {
namespace {

constexpr int kRounds = 8;

/// One keyed bijection of 0 ... 2^(2·half_bits) - 1: a balanced Feistel network (Luby and Rackoff, 1988).
std::uint64_t feistel(std::uint64_t value, std::uint64_t key, int half_bits) {
  const std::uint64_t half_mask = (std::uint64_t{1} << half_bits) - 1;
  std::uint64_t left = value >> half_bits, right = value & half_mask;
  for (int round = 0; round < kRounds; ++round) {
    const std::uint64_t next = left ^ (mix(key + static_cast<std::uint64_t>(round), right) & half_mask);
    left = right;
    right = next;
  }
  return left << half_bits | right;
}

}  // namespace

SampleOrder::SampleOrder(std::int64_t samples, std::uint64_t seed)
    : samples_(samples), seed_(seed), half_bits_(1) {
  OCTET_ASSERT(samples >= 0);
  while ((std::int64_t{1} << half_bits_) < (samples >> half_bits_) + 1) ++half_bits_;
}

std::int64_t SampleOrder::sample(std::int64_t position) const {
  OCTET_ASSERT(samples_ > 0 && position >= 0);
  const std::uint64_t key = mix(seed_, static_cast<std::uint64_t>(position / samples_));
  std::uint64_t value = static_cast<std::uint64_t>(position % samples_);
  // The network's domain is the next power of four; walking its cycle until we are back inside keeps a
  // bijection.
  do value = feistel(value, key, half_bits_);
  while (value >= static_cast<std::uint64_t>(samples_));
  return static_cast<std::int64_t>(value);
}

}  // namespace octet
