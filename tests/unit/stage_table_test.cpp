#include "octet/parallel/stage_table.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <random>

#include "octet/base/error.h"
#include "support/seed.h"

namespace octet {
namespace {

std::vector<int> counts(const std::vector<StageLayers>& table) {
  std::vector<int> result;
  for (const StageLayers& stage : table) result.push_back(stage.count);
  return result;
}

double largest_work(const std::vector<StageLayers>& table) {
  double largest = 0;
  for (const StageLayers& stage : table) largest = std::max(largest, stage.work);
  return largest;
}

/// Tries every cut.
double least_largest_work(int layers, int stages, double embedding, double head) {
  double best = 1e9;
  const std::function<void(int, int, double)> cut = [&](int stage, int left, double largest) {
    const double extra = (stage == 0 ? embedding : 0) + (stage == stages - 1 ? head : 0);
    if (stage == stages - 1) {
      best = std::min(best, std::max(largest, left + extra));
      return;
    }
    for (int count = 1; count <= left - (stages - 1 - stage); ++count) {
      cut(stage + 1, left - count, std::max(largest, count + extra));
    }
  };
  cut(0, layers, 0);
  return best;
}

std::string refusal(int layers, int stages, int chunks) {
  try {
    stage_table(layers, stages, chunks, 0, 0);
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kUsage);
    return error.what();
  }
  return "";
}

TEST(StageTable, L05UnevenSplitsKeepEveryLayer) {
  EXPECT_EQ(counts(stage_table(30, 4, 1, 0, 0)), (std::vector{7, 7, 8, 8}));
  EXPECT_EQ(counts(stage_table(7, 4, 1, 0, 0)), (std::vector{1, 2, 2, 2}));
  EXPECT_EQ(counts(stage_table(5, 2, 1, 0, 0)), (std::vector{2, 3}));
  EXPECT_EQ(counts(stage_table(10, 3, 1, 0, 0)), (std::vector{3, 3, 4}));
}

TEST(StageTable, EmbeddingAndHeadTakeThePlaceOfLayers) {
  EXPECT_EQ(counts(stage_table(30, 4, 1, 0.2, 2)), (std::vector{8, 8, 8, 6}));
  EXPECT_EQ(counts(stage_table(6, 3, 1, 0, 9)), (std::vector{2, 3, 1}));
}

TEST(StageTable, LargestWorkIsTheLeastOfAllCuts) {
  std::mt19937 random(test::test_seed());
  std::uniform_real_distribution<double> extra(0, 4);
  for (int stages = 1; stages <= 5; ++stages) {
    for (int layers = stages; layers <= 12; ++layers) {
      for (int repeat = 0; repeat < 10; ++repeat) {
        const double embedding = extra(random), head = extra(random);
        const std::vector<StageLayers> table = stage_table(layers, stages, 1, embedding, head);
        EXPECT_NEAR(largest_work(table), least_largest_work(layers, stages, embedding, head), 1e-9)
            << layers << " layers, " << stages << " stages, " << embedding << ", " << head;
      }
    }
  }
}

TEST(StageTable, EveryLayerIsInExactlyOneStage) {
  for (int chunks = 1; chunks <= 4; ++chunks) {
    for (int stages = 1; stages <= 8; ++stages) {
      const int layers = 2 * stages * chunks + 3;
      int next = 0;
      for (const StageLayers& stage : stage_table(layers, stages, chunks, 0.3, 1.7)) {
        EXPECT_EQ(stage.first, next);
        EXPECT_GE(stage.count, 1);
        next += stage.count;
      }
      EXPECT_EQ(next, layers);
    }
  }
}

TEST(StageTable, TooFewLayersAreRefusedWithTheNearestSizes) {
  EXPECT_EQ(refusal(3, 4, 1),
            "model.layers = 3 on parallel.pipeline 4 × parallel.chunks 1 = 4 virtual stages leaves some "
            "without a layer; allowed: model.layers = 4 or more, parallel.pipeline = 3 or less");
  EXPECT_EQ(refusal(7, 4, 2),
            "model.layers = 7 on parallel.pipeline 4 × parallel.chunks 2 = 8 virtual stages leaves some "
            "without a layer; allowed: model.layers = 8 or more, parallel.pipeline = 3 or less, "
            "parallel.chunks = 1 or less");
}

TEST(StageTable, ReportNamesEveryVirtualStageAndTheSum) {
  const std::string text = format_stage_table(stage_table(6, 2, 2, 0.5, 1), 2);
  EXPECT_EQ(text,
            "  stage  rank  chunk     layers  count   work\n"
            "      0     0      0          0      1   1.50  + embedding\n"
            "      1     1      0        1-2      2   2.00\n"
            "      2     0      1        3-4      2   2.00\n"
            "      3     1      1          5      1   2.00  + head\n"
            "  6 layers on 4 virtual stages; largest work 2.00 layers, mean 1.88\n");
}

}  // namespace
}  // namespace octet
