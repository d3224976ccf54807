#include "octet/parallel/bucket.h"

#include <algorithm>

#include "octet/base/error.h"

namespace octet {

namespace {

/// Elements to which parameters and slices are aligned: 128 bytes of bfloat16.
constexpr std::int64_t kAlignment = 64;

std::int64_t align(std::int64_t value, std::int64_t to) {
  return (value + to - 1) / to * to;
}

}  // namespace

BucketLayout::BucketLayout(const ParameterTable& table, const ModelShape& shape, int tensor_rank,
                           int tensor_size, bool sequence_parallel, const std::vector<int>& slices)
    : table_(table), buckets_(static_cast<std::size_t>(table.buckets())) {
  OCTET_ASSERT(slices.size() == buckets_.size());
  for (int row = 0; row < static_cast<int>(table.rows().size()); ++row) {
    const ParameterRow& parameter = table.rows()[static_cast<std::size_t>(row)];
    const auto number = static_cast<std::size_t>(parameter.bucket);
    Bucket& bucket = buckets_[number];
    place_.emplace_back(parameter.bucket, static_cast<int>(bucket.entries.size()));
    if (slices[number] == 0) continue;
    const LocalParameter local = local_part(parameter, shape, tensor_rank, tensor_size, sequence_parallel);
    const std::int64_t offset = parameter.follows ? bucket.size : align(bucket.size, kAlignment);
    bucket.entries.push_back({row, local, offset});
    bucket.size = offset + local.rows * local.cols;
  }
  for (std::size_t number = 0; number < buckets_.size(); ++number) {
    Bucket& bucket = buckets_[number];
    bucket.slices = std::max(slices[number], 1);
    bucket.size = align(bucket.size, kAlignment * bucket.slices);
  }
}

const BucketEntry& BucketLayout::entry(int row) const {
  const auto [bucket, index] = place_.at(static_cast<std::size_t>(row));
  return buckets_[static_cast<std::size_t>(bucket)].entries[static_cast<std::size_t>(index)];
}

std::vector<Region> BucketLayout::regions(int number, std::int64_t begin, std::int64_t end) const {
  const Bucket& bucket = this->bucket(number);
  std::vector<Region> result;
  for (std::size_t i = 0; i < bucket.entries.size(); ++i) {
    const BucketEntry& entry = bucket.entries[i];
    // Alignment gaps, which hold zeros, go with the entry before them.
    const std::int64_t next = i + 1 < bucket.entries.size() ? bucket.entries[i + 1].offset : bucket.size;
    const Region region{std::max(begin, entry.offset), std::min(end, next),
                        table_.rows()[static_cast<std::size_t>(entry.row)].decay, entry.local.replicated,
                        entry.local.partial};
    if (region.begin >= region.end) continue;
    const bool joins = !result.empty() && result.back().decay == region.decay &&
                       result.back().replicated == region.replicated &&
                       result.back().partial == region.partial;
    if (joins) {
      result.back().end = region.end;
    } else {
      result.push_back(region);
    }
  }
  return result;
}

std::vector<PlacedMatrix> BucketLayout::matrices(int number) const {
  std::vector<PlacedMatrix> result;
  for (const BucketEntry& entry : bucket(number).entries) {
    const ParameterRow& row = table_.rows()[static_cast<std::size_t>(entry.row)];
    if (row.rows == 1) continue;
    if (!row.follows) result.push_back({entry.row, entry.offset, 0});
    result.back().size += entry.local.rows * entry.local.cols;
  }
  return result;
}

std::vector<std::pair<std::int64_t, std::int64_t>> BucketLayout::gaps(int number) const {
  const Bucket& bucket = this->bucket(number);
  std::vector<std::pair<std::int64_t, std::int64_t>> result;
  for (std::size_t i = 0; i < bucket.entries.size(); ++i) {
    const BucketEntry& entry = bucket.entries[i];
    const std::int64_t end = entry.offset + entry.local.rows * entry.local.cols;
    const std::int64_t next = i + 1 < bucket.entries.size() ? bucket.entries[i + 1].offset : bucket.size;
    if (end < next) result.push_back({end, next});
  }
  return result;
}

std::vector<PlacedRun> BucketLayout::runs(int number, std::int64_t begin, std::int64_t end) const {
  std::vector<PlacedRun> result;
  for (const BucketEntry& entry : bucket(number).entries) {
    const std::int64_t valid_end = entry.offset + entry.local.box.size();
    const std::int64_t from = std::max(begin, entry.offset), to = std::min(end, valid_end);
    if (from < to) result.push_back({entry.row, entry.local, from, from - entry.offset, to - from});
  }
  return result;
}

std::vector<PlacedBox> BucketLayout::boxes(int number, std::int64_t begin, std::int64_t end) const {
  std::vector<PlacedBox> result;
  for (const PlacedRun& run : runs(number, begin, end)) {
    for (const FlatBox& part : boxes_of_range(run.local.box, run.begin, run.begin + run.size)) {
      result.push_back({run.row, part.box, run.offset - run.begin + part.begin, run.local.replicated});
    }
  }
  return result;
}

}  // namespace octet
