#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <set>

#include "octet/base/box.h"
#include "octet/base/dtype.h"
#include "octet/base/error.h"
#include "octet/base/rng.h"
#include "support/seed.h"

namespace octet {
namespace {

std::int64_t pick(std::mt19937& random, std::int64_t low, std::int64_t high) {
  return std::uniform_int_distribution<std::int64_t>(low, high)(random);
}

bool holds(const Box& box, std::int64_t row, std::int64_t col) {
  return row >= box.row && row < box.row + box.rows && col >= box.col && col < box.col + box.cols;
}

TEST(Box, IntersectionHoldsWhatBothHold) {
  std::mt19937 random(test::test_seed());
  for (int round = 0; round < 500; ++round) {
    const auto make = [&] {
      return Box{pick(random, 0, 5), pick(random, 0, 5), pick(random, 1, 5), pick(random, 1, 5)};
    };
    const Box a = make(), b = make();
    const std::optional<Box> common = intersect(a, b);
    std::int64_t shared = 0;
    for (std::int64_t row = 0; row < 12; ++row) {
      for (std::int64_t col = 0; col < 12; ++col) {
        const bool both = holds(a, row, col) && holds(b, row, col);
        shared += both;
        ASSERT_EQ(both, common && holds(*common, row, col));
      }
    }
    ASSERT_EQ(shared, common ? common->size() : 0);
    ASSERT_EQ(common, intersect(b, a));
  }
}

TEST(Box, RangeIsAtMostThreeBoxesThatCoverItInOrder) {
  std::mt19937 random(test::test_seed());
  for (int round = 0; round < 2000; ++round) {
    const Box outer{pick(random, 0, 9), pick(random, 0, 9), pick(random, 1, 6), pick(random, 1, 6)};
    const std::int64_t begin = pick(random, 0, outer.size()), end = pick(random, begin, outer.size());
    const std::vector<FlatBox> parts = boxes_of_range(outer, begin, end);
    ASSERT_LE(parts.size(), 3u);
    std::int64_t at = begin;
    for (const FlatBox& part : parts) {
      ASSERT_EQ(part.begin, at);
      for (std::int64_t i = 0; i < part.box.size(); ++i, ++at) {
        ASSERT_EQ(part.box.row + i / part.box.cols, outer.row + at / outer.cols);
        ASSERT_EQ(part.box.col + i % part.box.cols, outer.col + at % outer.cols);
      }
    }
    ASSERT_EQ(at, end);
  }
}

TEST(Box, RangeOutsideTheBoxIsAnInternalError) {
  EXPECT_THROW(boxes_of_range({0, 0, 2, 3}, 0, 7), Error);
  EXPECT_THROW(boxes_of_range({0, 0, 2, 3}, 4, 3), Error);
}

TEST(BF16, EveryValueSurvivesTheWayThroughFloat) {
  for (std::uint32_t bits = 0; bits < 65536; ++bits) {
    BF16 value;
    value.bits = static_cast<std::uint16_t>(bits);
    const float wide = static_cast<float>(value);
    if (std::isnan(wide)) {
      ASSERT_TRUE(std::isnan(static_cast<float>(BF16(wide))));
    } else {
      ASSERT_EQ(BF16(wide).bits, bits);
    }
  }
}

TEST(BF16, RoundsToTheNearestAndTiesToEven) {
  const auto from_bits = [](std::uint32_t bits) {
    BF16 value;
    value.bits = static_cast<std::uint16_t>(bits);
    return static_cast<float>(value);
  };
  std::mt19937 random(test::test_seed());
  for (int round = 0; round < 20000; ++round) {
    // Positive neighbours below the largest finite number, and a point between them.
    const auto low_bits = static_cast<std::uint32_t>(pick(random, 0, 0x7f7e));
    const double low = from_bits(low_bits), high = from_bits(low_bits + 1);
    const double part = static_cast<double>(pick(random, 0, 16)) / 16.0;
    const float value = static_cast<float>(low + part * (high - low));
    const bool up = part > 0.5 || (part == 0.5 && low_bits % 2 == 1);
    if (low_bits < 0x80) continue;  // in subnormals the point between is not exact
    ASSERT_EQ(static_cast<float>(BF16(value)), static_cast<float>(up ? high : low)) << value;
    ASSERT_EQ(static_cast<float>(BF16(-value)), static_cast<float>(up ? -high : -low)) << -value;
  }
  EXPECT_TRUE(std::isinf(static_cast<float>(BF16(std::numeric_limits<float>::max()))));
}

TEST(Rng, PhiloxGivesThePublishedWords) {
  // Known answers of Random123 for philox4x32 with 10 rounds.
  const auto expect = [](const PhiloxWords& words, std::array<std::uint32_t, 4> published) {
    for (int i = 0; i < 4; ++i) EXPECT_EQ(words.word[i], published[i]);
  };
  expect(philox(0, 0, 0), {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8});
  expect(philox(~0ull, ~0ull, ~0ull), {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd});
  expect(philox(0x299f31d0a4093822, 0x85a308d3243f6a88, 0x0370734413198a2e),
         {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1});
}

TEST(Rng, NormalNumbersHaveTheMomentsOfANormalDistribution) {
  const std::uint64_t key = key_of(test::test_seed(), "moments");
  const int count = 200000;
  double first = 0.0, second = 0.0, fourth = 0.0, product = 0.0, last = 0.0;
  for (int i = 0; i < count; ++i) {
    const double x = normal_at(key, static_cast<std::uint64_t>(i));
    ASSERT_TRUE(std::isfinite(x));
    first += x;
    second += x * x;
    fourth += x * x * x * x;
    product += x * last;
    last = x;
  }
  // Six standard deviations of each estimate.
  const double unit = 6.0 / std::sqrt(static_cast<double>(count));
  EXPECT_NEAR(first / count, 0.0, unit);
  EXPECT_NEAR(second / count, 1.0, unit * std::sqrt(2.0));
  EXPECT_NEAR(fourth / count, 3.0, unit * std::sqrt(96.0));
  EXPECT_NEAR(product / count, 0.0, unit);
}

TEST(Rng, KeysOfDifferentNamesAndSeedsDiffer) {
  std::set<std::uint64_t> keys;
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    for (const char* name : {"", "a", "b", "ab", "ba", "layers.0.mlp.up.weight", "layers.1.mlp.up.weight"}) {
      keys.insert(key_of(seed, name));
    }
  }
  EXPECT_EQ(keys.size(), 50u * 7u);
}

}  // namespace
}  // namespace octet
