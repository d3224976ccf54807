#pragma once

#include <cstdint>

namespace octet {

/// The order in which samples are visited: an endless stream in which epoch e is a keyed bijection of 0 …
/// samples-1 (Feistel rounds with cycle walking). No index files, O(1) seek, equal for any number of ranks;
/// the whole position is one integer, the samples consumed.
class SampleOrder {
 public:
  SampleOrder(std::int64_t samples, std::uint64_t seed);
  /// Sample number of stream position `position` >= 0; epoch = position / samples.
  std::int64_t sample(std::int64_t position) const;
  std::int64_t samples() const { return samples_; }

 private:
  std::int64_t samples_;
  std::uint64_t seed_;
  int half_bits_;
};

}  // namespace octet
