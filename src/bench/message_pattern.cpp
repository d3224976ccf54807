#include "message_pattern.h"

#include <algorithm>
#include <cmath>

#include "octet/base/rng.h"
#include "octet/bench/operands.h"

namespace octet {

namespace {

constexpr std::int64_t kPeriod = 8191;
constexpr std::int64_t kPiece = 1 << 22;  ///< elements looked at at once
constexpr std::size_t kMostExactRanks = 128;

}  // namespace

MessagePattern::MessagePattern(Device& device, Stream& stream, int ranks, DType type)
    : device_(device), stream_(stream), type_(type), sum_(kPeriod) {
  for (int rank = 0; rank < ranks; ++rank) {
    std::vector<float>& values = ranks_.emplace_back(kPeriod);
    for (std::size_t i = 0; i < values.size(); ++i) {
      values[i] = static_cast<float>(mix(static_cast<std::uint64_t>(rank), i) % 5) - 2.0f;
      sum_[i] += values[i];
    }
  }
}

void MessagePattern::fill(const Tensor& to, int rank, std::int64_t first) {
  const std::vector<float>& values = ranks_[static_cast<std::size_t>(rank)];
  std::vector<float> period(values.size());
  std::vector<BF16> narrow(values.size());
  for (std::size_t i = 0; i < values.size(); ++i) {
    period[i] = values[(i + static_cast<std::size_t>(first)) % values.size()];
    narrow[i] = BF16(period[i]);
  }
  const void* const from = type_ == DType::kBF16 ? static_cast<const void*>(narrow.data()) : period.data();
  fill_periodic(device_, stream_, to, from, kPeriod);
}

bool MessagePattern::is(const Tensor& values, int rank, std::int64_t first) {
  return compare(values, ranks_[static_cast<std::size_t>(rank)], first, 0.0f);
}

bool MessagePattern::is_sum(const Tensor& values, std::int64_t first) {
  const auto ranks = static_cast<float>(ranks_.size());
  const bool exact = type_ != DType::kBF16 || ranks_.size() <= kMostExactRanks;
  return compare(values, sum_, first, exact ? 0.0f : ranks / 64);
}

bool MessagePattern::compare(const Tensor& values, const std::vector<float>& expected, std::int64_t first,
                             float tolerance) {
  const Tensor flat = values.reshape(1, values.size());
  std::size_t at = static_cast<std::size_t>(first) % expected.size();
  for (std::int64_t begin = 0; begin < flat.cols; begin += kPiece) {
    const Tensor piece = flat.range(begin, std::min(kPiece, flat.cols - begin));
    for (const float value : to_host(device_, stream_, piece)) {
      if (!(std::abs(value - expected[at]) <= tolerance)) return false;
      if (++at == expected.size()) at = 0;
    }
  }
  return true;
}

}  // namespace octet
