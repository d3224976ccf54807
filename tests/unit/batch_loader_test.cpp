#include "octet/data/batch_loader.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <numeric>
#include <thread>

#include "support/data_support.h"
#include "support/seed.h"

namespace octet {
namespace {

using data_test::contains;
using data_test::error_of;
using data_test::overwrite_token;
using data_test::random_tokens;
using data_test::write_tokens;

class BatchLoaderTest : public ::testing::Test {
 protected:
  data_test::TemporaryDirectory directory_;
  std::mt19937_64 random_{test::test_seed()};
  std::unique_ptr<Device> device_ = make_cpu_device();

  std::string path() const { return directory_ / "tokens.h5"; }
};

std::vector<std::int32_t> copy(const MicroBatch& batch) {
  return {batch.packed, batch.packed + MicroBatch::kArrays * batch.tokens};
}

TEST_F(BatchLoaderTest, SampleCountLeavesOneTokenForTheLastTarget) {
  for (const auto& [tokens, samples] : std::vector<std::pair<std::size_t, std::int64_t>>{
           {0, 0}, {1, 0}, {8, 0}, {9, 1}, {16, 1}, {17, 2}, {1000, 124}}) {
    write_tokens(path(), random_tokens(random_, tokens, 50), 50);
    EXPECT_EQ(samples_in(TokenFile(path()), 8), samples) << tokens;
  }
}

TEST_F(BatchLoaderTest, TargetsAreTheNextTokensAndPositionsRestartAtEachSample) {
  constexpr std::int64_t kSequence = 16;
  const auto tokens = random_tokens(random_, 1000, 70'000);
  write_tokens(path(), tokens, 70'000);
  const TokenFile file(path());
  const std::vector<std::int64_t> samples = {61, 0, -1, 17};
  std::vector<std::int32_t> packed(MicroBatch::kArrays * 4 * kSequence, -7);
  fill_micro_batch(file, {.sequence = kSequence, .micro = 4}, samples, packed.data());
  const MicroBatch batch{packed.data(), 4 * kSequence};
  for (std::size_t s = 0; s < samples.size(); ++s)
    for (std::int64_t i = 0; i < kSequence; ++i) {
      const std::int64_t t = static_cast<std::int64_t>(s) * kSequence + i;
      const auto at = static_cast<std::size_t>(samples[s] * kSequence + i);
      ASSERT_EQ(batch.ids()[t], samples[s] < 0 ? 0 : tokens[at]);
      ASSERT_EQ(batch.targets()[t], samples[s] < 0 ? -1 : tokens[at + 1]);
      ASSERT_EQ(batch.positions()[t], i);
    }
}

TEST_F(BatchLoaderTest, OrderIsAStableSortById) {
  write_tokens(path(), random_tokens(random_, 600, 20), 20);
  const TokenFile file(path());
  std::vector<std::int32_t> packed(MicroBatch::kArrays * 512);
  fill_micro_batch(file, {.sequence = 128, .micro = 4}, {3, 0, 1, 3}, packed.data());
  const MicroBatch batch{packed.data(), 512};
  std::vector<std::int32_t> expected(512);
  std::iota(expected.begin(), expected.end(), 0);
  std::stable_sort(expected.begin(), expected.end(),
                   [&](std::int32_t a, std::int32_t b) { return batch.ids()[a] < batch.ids()[b]; });
  EXPECT_TRUE(std::equal(expected.begin(), expected.end(), batch.order()));
}

// Case N03: a micro-batch without any valid target is still a full batch of ids, with every target -1.
TEST_F(BatchLoaderTest, MaskedTokensAreNoTargetsAndAFullyMaskedBatchHasNone) {
  TokenFileInfo info;
  info.vocabulary = 300;
  info.has_mask = true;
  const auto tokens = random_tokens(random_, 65, 300);
  std::vector<std::uint8_t> mask(65);
  for (std::size_t i = 0; i < 33; ++i) mask[i] = static_cast<std::uint8_t>(random_() % 2);
  TokenFileWriter writer(path(), info);
  writer.add_document(tokens, mask);
  writer.finish();
  const TokenFile file(path());

  std::vector<std::int32_t> packed(MicroBatch::kArrays * 32);
  fill_micro_batch(file, {.sequence = 32, .micro = 1}, {0}, packed.data());
  for (std::size_t i = 0; i < 32; ++i) ASSERT_EQ(packed[32 + i], mask[i + 1] != 0 ? tokens[i + 1] : -1);
  fill_micro_batch(file, {.sequence = 32, .micro = 1}, {1}, packed.data());
  for (std::size_t i = 0; i < 32; ++i) {
    ASSERT_EQ(packed[i], tokens[32 + i]);
    ASSERT_EQ(packed[32 + i], -1);
  }
}

// Case D06, through the loader: the steps of all ranks together are the stream, whatever the cut, also when
// resumed.
TEST_F(BatchLoaderTest, RanksTogetherReadTheSameStepForAnyCutAndStart) {
  constexpr std::int64_t kSequence = 8, kGlobal = 6;
  std::vector<std::int32_t> tokens(81);
  std::iota(tokens.begin(), tokens.end(), 0);  // the first id of a sample tells which one it is
  write_tokens(path(), tokens, 100);
  const TokenFile file(path());
  const SampleOrder order(samples_in(file, kSequence), random_());
  ASSERT_EQ(order.samples(), 10);

  for (const auto& [data_size, micro] :
       std::vector<std::pair<int, std::int64_t>>{{1, 6}, {1, 1}, {2, 3}, {2, 1}, {3, 2}, {3, 1}, {6, 1}})
    for (const std::int64_t first_step : {0, 1, 5})
      for (int rank = 0; rank < data_size; ++rank) {
        const BatchCut cut{.sequence = kSequence,
                           .micro = micro,
                           .global = kGlobal,
                           .data_rank = rank,
                           .data_size = data_size};
        BatchLoader loader(file, order, cut, first_step * kGlobal, 2, *device_);
        for (std::int64_t step = first_step; step < first_step + 4; ++step) {
          const auto& batches = loader.next();
          ASSERT_EQ(static_cast<std::int64_t>(batches.size()), kGlobal / (micro * data_size));
          for (std::size_t i = 0; i < batches.size(); ++i)
            for (std::int64_t j = 0; j < micro; ++j) {
              const std::int64_t sample = order.sample(
                  step * kGlobal + (static_cast<std::int64_t>(i) * data_size + rank) * micro + j);
              ASSERT_EQ(batches[i].ids()[j * kSequence], sample * kSequence);
            }
        }
      }
}

TEST_F(BatchLoaderTest, AStepStaysValidUntilTheSecondNextAfterIt) {
  write_tokens(path(), random_tokens(random_, 3000, 1000), 1000);
  const TokenFile file(path());
  const SampleOrder order(samples_in(file, 16), random_());
  const BatchCut cut{.sequence = 16, .micro = 2, .global = 8};
  for (const int ahead : {2, 3, 8}) {
    BatchLoader loader(file, order, cut, 0, ahead, *device_);
    const std::vector<MicroBatch>* held = &loader.next();
    for (int step = 1; step < 60; ++step) {
      std::vector<std::vector<std::int32_t>> before;
      for (const auto& batch : *held) before.push_back(copy(batch));
      const auto& batches = loader.next();
      if (step % 8 == 0)
        std::this_thread::sleep_for(std::chrono::milliseconds(1));  // lets the reader run ahead
      for (std::size_t i = 0; i < held->size(); ++i) {
        ASSERT_EQ(copy((*held)[i]), before[i]);
        std::vector<std::int32_t> expected(MicroBatch::kArrays * 32);
        std::vector<std::int64_t> samples;
        for (std::int64_t j = 0; j < 2; ++j)
          samples.push_back(order.sample(8 * step + cut.position(static_cast<std::int64_t>(i), j)));
        fill_micro_batch(file, {.sequence = 16, .micro = 2}, samples, expected.data());
        ASSERT_EQ(copy(batches[i]), expected);
      }
      held = &batches;
      ASSERT_GE(loader.waited_ms(), 0.0);
    }
  }
}

// Case D02: the thread that reads finds the id; next() of the step that holds it throws, earlier steps are
// served.
TEST_F(BatchLoaderTest, IdOutsideTheVocabularyStopsTheStepThatHoldsIt) {
  const std::string good = directory_ / "good.h5";
  write_tokens(good, random_tokens(random_, 801, 256), 256, 4);
  overwrite_token(good, 400, 256);
  const TokenFile file(good);
  const SampleOrder order(100, random_());
  const BatchCut cut{.sequence = 8, .micro = 1, .global = 10};
  std::int64_t bad_step = 0;  // sample 50 begins with the token, and sample 49 ends with it as a target
  while (true) {
    bool holds = false;
    for (std::int64_t p = 0; p < 10; ++p) {
      const std::int64_t sample = order.sample(10 * bad_step + p);
      holds |= sample == 49 || sample == 50;
    }
    if (holds) break;
    ++bad_step;
  }
  BatchLoader loader(file, order, cut, 0, 2, *device_);
  for (std::int64_t step = 0; step < bad_step; ++step) ASSERT_NO_THROW(loader.next()) << step;
  for (int again = 0; again < 2; ++again)
    EXPECT_TRUE(contains(error_of(ErrorKind::kData, [&] { loader.next(); }),
                         {good, "document 0, offset 400", "id 256", "256 ids"}));
}

// Case D03: consumed samples times the sequence length pass 2^31 and 2^63 stays far away.
TEST_F(BatchLoaderTest, StreamPositionsBeyondTwoToThe31SamplesKeepTheirLength) {
  const auto tokens = random_tokens(random_, 1000, 256);
  write_tokens(path(), tokens, 256);
  const TokenFile file(path());
  const SampleOrder order(samples_in(file, 64), 3);
  const BatchCut cut{.sequence = 64, .micro = 5, .global = 5};
  const std::int64_t consumed = std::int64_t{5} << 33;
  BatchLoader loader(file, order, cut, consumed, 2, *device_);
  for (std::int64_t step = 0; step < 10; ++step) {
    const auto& batch = loader.next().front();
    for (std::int64_t j = 0; j < 5; ++j) {
      const std::int64_t begin = 64 * order.sample(consumed + 5 * step + j);
      ASSERT_TRUE(std::equal(batch.ids() + 64 * j, batch.ids() + 64 * (j + 1), tokens.begin() + begin));
    }
  }
}

// Case D04: too few samples end in a message with both numbers, never in a wait.
TEST_F(BatchLoaderTest, FewerSamplesThanAGlobalBatchAreRefusedWithBothNumbers) {
  const auto refusal = [&](std::size_t tokens) {
    write_tokens(path(), random_tokens(random_, tokens, 256), 256);
    const TokenFile file(path());
    const SampleOrder order(samples_in(file, 16), 1);
    return error_of(ErrorKind::kData, [&] {
      BatchLoader(file, order, {.sequence = 16, .micro = 2, .global = 8}, 0, 2, *device_);
    });
  };
  EXPECT_TRUE(contains(refusal(5 * 16 + 1), {path(), "5 samples", "batch of 8 samples"}));
  EXPECT_TRUE(contains(refusal(16), {"16 tokens", "0 samples", "16 + 1 tokens"}));
  EXPECT_TRUE(contains(refusal(0), {"0 tokens", "0 samples"}));
  EXPECT_EQ(refusal(8 * 16 + 1), "nothing was thrown");
}

// Case D07: a file that shrinks under a running job is an error, not a signal.
TEST_F(BatchLoaderTest, FileThatShrinksWhileReadIsAnError) {
  write_tokens(path(), random_tokens(random_, 400'001, 256), 256);
  const TokenFile file(path());
  std::filesystem::resize_file(path(), 70'000);
  const SampleOrder order(samples_in(file, 100), 1);
  BatchLoader loader(file, order, {.sequence = 100, .micro = 4, .global = 4000}, 0, 2, *device_);
  EXPECT_TRUE(contains(error_of(ErrorKind::kData, [&] { loader.next(); }), {path(), "shorter"}));
}

}  // namespace
}  // namespace octet
