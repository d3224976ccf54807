#include "octet/data/sample_order.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <set>
#include <vector>

#include "octet/data/batch_loader.h"
#include "support/seed.h"

namespace octet {
namespace {

std::vector<std::int64_t> epoch_of(const SampleOrder& order, std::int64_t epoch) {
  std::vector<std::int64_t> samples;
  for (std::int64_t i = 0; i < order.samples(); ++i)
    samples.push_back(order.sample(epoch * order.samples() + i));
  return samples;
}

TEST(SampleOrder, EveryEpochVisitsEverySampleOnce) {
  std::mt19937_64 random(test::test_seed());
  std::vector<std::int64_t> sizes = {1, 2, 3, 4, 5, 10, 16, 17, 63, 64, 65, 1000, 4096, 4097};
  sizes.push_back(static_cast<std::int64_t>(random() % 100'000) + 1);
  for (const std::int64_t size : sizes) {
    const SampleOrder order(size, random());
    for (const std::int64_t epoch : {std::int64_t{0}, std::int64_t{1}, std::int64_t{1'000'000}}) {
      auto samples = epoch_of(order, epoch);
      std::sort(samples.begin(), samples.end());
      for (std::int64_t i = 0; i < size; ++i) ASSERT_EQ(samples[static_cast<std::size_t>(i)], i) << size;
    }
  }
}

TEST(SampleOrder, SeedAndEpochGiveOtherOrdersAndTheSameSeedTheSame) {
  const SampleOrder a(10'000, 1), b(10'000, 2);
  EXPECT_EQ(epoch_of(a, 3), epoch_of(SampleOrder(10'000, 1), 3));
  EXPECT_NE(epoch_of(a, 0), epoch_of(b, 0));
  EXPECT_NE(epoch_of(a, 0), epoch_of(a, 1));
}

TEST(SampleOrder, OrderIsUncorrelatedWithTheFile) {
  constexpr std::int64_t kSamples = 20'000;
  std::mt19937_64 random(test::test_seed());
  const SampleOrder order(kSamples, random());
  double sum = 0.0;
  std::int64_t neighbours = 0;
  for (std::int64_t i = 0; i < kSamples; ++i) {
    const double x = 2.0 * static_cast<double>(i) / kSamples - 1.0;
    const double y = 2.0 * static_cast<double>(order.sample(i)) / kSamples - 1.0;
    sum += x * y;
    neighbours += order.sample(i + kSamples) == order.sample(i);
  }
  const double correlation = 3.0 * sum / kSamples;
  EXPECT_LT(std::abs(correlation), 6.0 / std::sqrt(double{kSamples}));
  EXPECT_LT(neighbours, 15) << "two epochs share places; one is expected by chance";
}

// Every one of the orders of five samples must come up, about equally often, over seeds.
TEST(SampleOrder, SmallOrdersAreSpreadEvenly) {
  constexpr int kTrials = 60'000;
  std::mt19937_64 random(test::test_seed());
  std::vector<int> place(25, 0);
  std::set<std::vector<std::int64_t>> seen;
  for (int t = 0; t < kTrials; ++t) {
    const auto samples = epoch_of(SampleOrder(5, random()), 0);
    for (std::size_t i = 0; i < 5; ++i) ++place[5 * i + static_cast<std::size_t>(samples[i])];
    seen.insert(samples);
  }
  EXPECT_EQ(seen.size(), 120u);
  for (const int count : place) EXPECT_NEAR(count, kTrials / 5, 0.05 * kTrials / 5);
}

TEST(SampleOrder, SeeksFarBeyondTwoToThe31) {
  const SampleOrder order(3'000'000'000, 7);
  std::set<std::int64_t> seen;
  for (std::int64_t i = 0; i < 1000; ++i) {
    const std::int64_t sample = order.sample((std::int64_t{1} << 45) + i);
    ASSERT_GE(sample, 0);
    ASSERT_LT(sample, 3'000'000'000);
    seen.insert(sample);
  }
  EXPECT_EQ(seen.size(), 1000u);
}

// Case D06: 10 samples, global batch 6, four steps: the same ids for 1, 2 and 3 data ranks and for a resumed
// run; the four samples left over by a step begin the next one, and none repeats within an epoch.
TEST(SampleOrder, StepsHoldTheSameSamplesForAnyDataSizeAndAfterResuming) {
  const SampleOrder order(10, 42);
  const auto step_ids = [&](int data_size, std::int64_t micro, std::int64_t consumed) {
    std::vector<std::int64_t> ids(6, -1);
    for (int rank = 0; rank < data_size; ++rank) {
      const BatchCut cut{
          .sequence = 8, .micro = micro, .global = 6, .data_rank = rank, .data_size = data_size};
      for (std::int64_t i = 0; i < cut.micro_batches(); ++i)
        for (std::int64_t j = 0; j < micro; ++j) {
          const std::int64_t at = cut.position(i, j);
          EXPECT_EQ(ids[static_cast<std::size_t>(at)], -1) << "position " << at << " is read twice";
          ids[static_cast<std::size_t>(at)] = order.sample(consumed + at);
        }
    }
    return ids;
  };
  std::vector<std::int64_t> stream;
  for (std::int64_t step = 0; step < 5; ++step) {
    const auto expected = step_ids(1, 6, 6 * step);
    for (const auto& [data_size, micro] :
         std::vector<std::pair<int, std::int64_t>>{{3, 2}, {3, 1}, {2, 3}, {2, 1}, {1, 2}})
      EXPECT_EQ(step_ids(data_size, micro, 6 * step), expected);
    stream.insert(stream.end(), expected.begin(), expected.end());
  }
  for (std::size_t epoch = 0; epoch < 3; ++epoch) {
    const auto begin = stream.begin() + static_cast<std::ptrdiff_t>(10 * epoch);
    EXPECT_EQ(std::set<std::int64_t>(begin, begin + 10).size(), 10u);
  }
}

}  // namespace
}  // namespace octet
