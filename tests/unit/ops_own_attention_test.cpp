// hopper::AttentionForward and AttentionGradients, the own kernels for attention on Hopper.
#include "../../src/ops/attention_heads.h"
#include "../../src/ops/hopper/attention_gradient_scratch.h"
#include "ops_attention_fixture.h"

namespace octet::test {
namespace {

class OwnAttentionTest : public AttentionFixture {
 protected:
  Workbench own_bench(const AttentionShape& shape) const {
    return bench(shape, false, {.own_attention = OwnKernels::kAlways});
  }
};

// Tiles are 128 keys by 192 or 128 queries forward, and backward by 128 or 64 of heads of 128: within one, at
// edges, and many; in the end with more heads than are at work at once, also on an H200, so that memory of
// query gradients is used again. The last three shapes have few key heads and many queries of each, whose
// parts are added in the order of rising keys.
TEST_P(OwnAttentionTest, MatchesTheDefinitionInFloat64) {
  const AttentionShape shapes[] = {
      shape_of({2, 2, 64, 1, 0}, 2, 128, 128),  shape_of({2, 1, 64, 2, 0}, 1, 300, 300),
      shape_of({4, 2, 64, 2, 0}, 2, 100, 477),  shape_of({6, 6, 64, 1, 0}, 3, 20, 20),
      shape_of({4, 2, 128, 2, 0}, 1, 200, 200), shape_of({3, 1, 128, 4, 1}, 2, 70, 330),
      shape_of({5, 5, 128, 1, 0}, 2, 65, 65),   shape_of({2, 2, 64, 1, 0}, 1, 1, 130),
      shape_of({2, 2, 64, 2, 2}, 3, 200, 210),  shape_of({1, 1, 64, 1, 0}, 1, 200, 1100),
      shape_of({2, 2, 128, 1, 0}, 3, 170, 170), shape_of({12, 12, 64, 1, 0}, 3, 20, 1100),
      shape_of({8, 1, 64, 8, 0}, 3, 300, 300),  shape_of({6, 1, 128, 6, 0}, 2, 150, 280),
      shape_of({4, 1, 64, 4, 0}, 1, 515, 515),
  };
  for (const AttentionShape& shape : shapes) {
    const AttentionInputs in = inputs(shape);
    Workbench bench = own_bench(shape);
    const Results results = run_attention(bench, in);
    expect_close(results, attention_reference(in), describe(in));
    const Results again = run_attention(bench, in);
    for (std::size_t i = 0; i < results.size(); ++i) {
      EXPECT_EQ(results[i].second.values, again[i].second.values) << describe(in) << ": " << results[i].first;
    }
  }
}

// What softmax subtracts, the largest score of the first keys, is by far too little for later ones.
TEST_P(OwnAttentionTest, LaterScoresMayBeMuchLarger) {
  for (const int head_size : {64, 128}) {
    const AttentionShape shape = shape_of({4, 2, head_size, 2, 0}, 1, 320, 330);
    AttentionInputs in = inputs(shape);
    for (std::int64_t row = 130; row < in.key.rows; ++row) {
      for (std::int64_t j = 0; j < in.key.cols; ++j) in.key(row, j) *= row < 260 ? 32.0f : 128.0f;
    }
    Workbench bench = own_bench(shape);
    const Results results = run_attention(bench, in), expected = attention_reference(in);
    expect_close({results[0], results[1]}, {expected[0], expected[1]}, describe(in));
  }
}

// Few keys are few pieces a head, of which more heads are at work at once than of many.
TEST_P(OwnAttentionTest, FewerKeysThanPreparedForTakeNoMoreMemory) {
  for (const int head_size : {64, 128}) {
    AttentionShape shape = shape_of({12, 12, head_size, 1, 0}, 1, 20, 660);
    Workbench bench = own_bench(shape);
    const std::int64_t prepared = bench.ops().workspace_bytes();
    for (const std::int64_t keys : {660, 130, 20}) {
      shape.keys = keys;
      const AttentionInputs in = inputs(shape);
      expect_close(run_attention(bench, in), attention_reference(in), describe(in));
      EXPECT_EQ(bench.ops().workspace_bytes(), prepared) << head_size << ", " << keys << " keys";
    }
  }
}

TEST(OwnAttentionScratch, ShapesOfNoMoreKeysTakeNoMoreThanTheMost) {
  for (const int head_size : {64, 128}) {
    for (const HeadLayout& layout : {HeadLayout{1, 1, head_size, 1, 0}, {32, 8, head_size, 4, 0}}) {
      for (const std::int64_t sequence : {1, 1000, 8192}) {
        AttentionShape shape{layout, 3, sequence, 1.0f, 16 * sequence};
        const std::int64_t most = hopper::most_gradient_scratch(shape, 132);
        std::int64_t largest = 0;
        for (; shape.keys >= sequence; shape.keys -= (sequence + 1) / 2)
          largest = std::max(largest, hopper::gradient_scratch(shape, 132).bytes());
        EXPECT_EQ(most, largest) << head_size << ", " << sequence << " queries";
      }
    }
  }
}

TEST(OwnAttentionScratch, KeysRiseWhereTheLongestPiecesTakeMuchOfTheTime) {
  const auto rising = [](const HeadLayout& layout, std::int64_t batch, std::int64_t sequence) {
    return hopper::gradient_scratch({layout, batch, sequence, 1.0f, sequence}, 132).rising;
  };
  EXPECT_TRUE(rising({24, 8, 128, 3, 0}, 2, 8192));
  EXPECT_TRUE(rising({32, 8, 64, 4, 0}, 4, 8192));
  EXPECT_TRUE(rising({28, 4, 128, 7, 0}, 16, 1024));
  EXPECT_FALSE(rising({12, 12, 64, 1, 0}, 64, 1024));  // pieces of few tiles, which would wait
  EXPECT_FALSE(rising({32, 32, 128, 1, 0}, 8, 8192));  // so many pieces that the last ones do not matter
}

TEST(OwnAttentionHeads, QueryHeadsShareTheirKeyHeadsEvenlyOrNot) {
  const auto expect = [](const HeadLayout& layout, int first, int count, int group) {
    const KeyHeads heads = key_heads_of(layout);
    EXPECT_EQ(heads.first, first);
    EXPECT_EQ(heads.count, count);
    EXPECT_EQ(heads.group, group);
  };
  expect({6, 3, 64, 2, 0}, 0, 3, 2);
  expect({2, 2, 64, 2, 2}, 1, 1, 2);  // the first key head is other ranks'
  expect({3, 1, 64, 4, 1}, 0, 1, 3);  // the first of four query heads is another rank's
  expect({3, 2, 64, 2, 1}, 0, 2, 0);
  expect({4, 2, 64, 3, 2}, 0, 2, 0);  // one and three, which two each would hide
}

INSTANTIATE_TEST_SUITE_P(Cuda, OwnAttentionTest, testing::Values(OpsCase{DeviceKind::kCuda, DType::kBF16}),
                         name_of_case);

}  // namespace
}  // namespace octet::test
