// Cross-entropy over a vocabulary that may be split over ranks.
#include "ops_fixture.h"

namespace octet::test {
namespace {

class LossReferenceTest : public OpsTest {};
class LossTest : public OpsTest {};
class LossPrecisionTest : public OpsTest {};

using Ids = std::vector<std::int32_t>;

struct Loss {
  double loss = 0.0, tokens = 0.0;
  Matrix dlogits;
};

/// One rank that holds the ids [0, valid) in the first columns of `logits`.
Loss run_loss(Workbench& bench, const Matrix& logits, std::int64_t valid, const Ids& targets) {
  const Tensor values = bench.put(logits), ids = bench.put(targets),
               partial = bench.blank_float(logits.rows, 3);
  StepScalars* const scalars = bench.put_scalars({});
  bench.ops().cross_entropy_partial(bench.stream(), values, 0, valid, ids, partial);
  bench.ops().cross_entropy_finish(bench.stream(), values, 0, valid, ids, partial, 1.0, true, scalars);
  const StepScalars result = bench.get_scalars(scalars);
  return {result.loss, result.tokens, bench.get(values)};
}

TEST_P(LossReferenceTest, MatchesPyTorch) {
  const ReferenceFile file("ops.ref");
  Workbench bench = this->bench();
  const Loss result =
      run_loss(bench, file["cross_entropy/logits"], 53, file["cross_entropy/targets"].integers());
  EXPECT_NEAR(result.loss, file["cross_entropy/loss"].values[0], 1e-6 * result.loss);
  EXPECT_EQ(result.tokens, 7.0);
  EXPECT_TRUE(close(result.dlogits, file["cross_entropy/dlogits"], 2e-6));
}

TEST_P(LossReferenceTest, GradientMatchesCentralDifferences) {
  Workbench bench = this->bench();
  const Matrix logits = random(11, 97, 2.0), direction = random(11, 97);
  const Ids targets = random_ids(11, -1, 96);
  const Matrix gradient = run_loss(bench, logits, 97, targets).dlogits;
  const auto loss = [&](double step) {
    return run_loss(bench, moved(logits, step, direction), 97, targets).loss;
  };
  expect_slope("cross_entropy", loss, dot(gradient, direction), norm_of(gradient));
}

TEST_P(LossTest, LossOfZeroLogitsIsTheLogarithmOfTheVocabulary) {
  Workbench bench = this->bench();
  for (const std::int64_t vocabulary : {101, 256, 50257}) {
    for (const std::int64_t padding : {0, 47}) {
      Matrix logits(4, vocabulary + padding);
      for (std::int64_t row = 0; row < 4; ++row) {
        for (std::int64_t j = vocabulary; j < logits.cols; ++j)
          logits(row, j) = 30.0f;  // padding counts for nothing
      }
      const Loss result =
          run_loss(bench, logits, vocabulary, random_ids(4, 0, static_cast<std::int32_t>(vocabulary) - 1));
      EXPECT_NEAR(result.loss / 4.0, std::log(static_cast<double>(vocabulary)), 1e-6)
          << "vocabulary " << vocabulary;
      EXPECT_EQ(result.tokens, 4.0);
    }
  }
}

TEST_P(LossTest, SplitVocabularyGivesTheLossOfTheWhole) {
  // 100 ids on three ranks of 48 columns each: 48, 48 and 4 valid ones, and a fourth rank with padding alone.
  const std::int64_t rows = 37, vocabulary = 100, cols = 48, ranks = 4;
  const Matrix logits = random(rows, vocabulary, 3.0);
  const Ids targets = random_ids(rows, -1, vocabulary - 1);
  Workbench bench = this->bench();
  const Loss whole = run_loss(bench, logits, vocabulary, targets);
  const auto valid_of = [&](std::int64_t rank) {
    return std::clamp<std::int64_t>(vocabulary - rank * cols, 0, cols);
  };

  const Tensor ids = bench.put(targets), partials = bench.blank_float(ranks * rows, 3);
  std::vector<Tensor> parts;
  for (std::int64_t rank = 0; rank < ranks; ++rank) {
    Matrix part(rows, cols);
    for (std::int64_t row = 0; row < rows; ++row) {
      for (std::int64_t j = 0; j < cols; ++j) {
        part(row, j) = j < valid_of(rank) ? logits(row, rank * cols + j) : 1000.0f;
      }
    }
    parts.push_back(bench.put(part));
    bench.ops().cross_entropy_partial(bench.stream(), parts.back(), rank * cols, valid_of(rank), ids,
                                      partials.row_range(rank * rows, rows));
  }
  for (std::int64_t rank = 0; rank < ranks; ++rank) {
    StepScalars* const scalars = bench.put_scalars({});
    bench.ops().cross_entropy_finish(bench.stream(), parts[rank], rank * cols, valid_of(rank), ids, partials,
                                     1.0, true, scalars);
    const StepScalars result = bench.get_scalars(scalars);
    EXPECT_NEAR(result.loss, whole.loss, 2e-6 * whole.loss) << "rank " << rank;
    EXPECT_EQ(result.tokens, whole.tokens);
    const Matrix gradient = bench.get(parts[rank]);
    Matrix expected(rows, cols);
    for (std::int64_t row = 0; row < rows; ++row) {
      for (std::int64_t j = 0; j < valid_of(rank); ++j)
        expected(row, j) = whole.dlogits(row, rank * cols + j);
    }
    EXPECT_TRUE(close(gradient, expected, tolerance())) << "rank " << rank;
  }
}

TEST_P(LossTest, OnePassGivesTheBitsOfTheTwoHalves) {
  // Rows that shared memory holds whole, with registers and not even with those, more rows than a GPU works
  // on at a time, elements that fill no 16 bytes.
  constexpr std::int64_t kShapes[][3] = {{17, 2, 2},        {9, 64, 50},          {130, 257, 257},
                                         {700, 1000, 999},  {64, 4096, 1},        {19, 50304, 50257},
                                         {5, 65600, 65536}, {11, 128256, 128256}, {9, 152072, 152065}};
  for (const auto& [rows, cols, valid] : kShapes) {
    SCOPED_TRACE(fmt::format("[{}, {}], {} valid", rows, cols, valid));
    const Matrix logits = random(rows, cols, 2.0);
    Ids targets = random_ids(rows, 0, static_cast<std::int32_t>(valid) - 1);
    for (std::int64_t row = 1; row < rows; row += 1 + row % 4) targets[static_cast<std::size_t>(row)] = -1;
    Workbench bench = this->bench();
    const Loss halves = run_loss(bench, logits, valid, targets);
    const Tensor values = bench.put(logits), ids = bench.put(targets), partial = bench.blank_float(rows, 3);
    for (const bool gradient : {false, true}) {
      StepScalars* const scalars = bench.put_scalars({.loss = 0.0, .tokens = 2.0});
      bench.ops().cross_entropy(bench.stream(), values, valid, ids, partial, gradient, scalars);
      EXPECT_EQ(bench.get_scalars(scalars).loss, halves.loss);
      EXPECT_EQ(bench.get_scalars(scalars).tokens, halves.tokens + 2.0);
      EXPECT_TRUE(bench.get(values).values == (gradient ? halves.dlogits : logits).values) << gradient;
    }
  }
}

TEST_P(LossTest, OnePassOverRowsWithoutTargetsGivesNothing) {
  Workbench bench = this->bench();
  const Tensor values = bench.put(random(40, 96)), ids = bench.put(Ids(40, -1)),
               partial = bench.blank_float(40, 3);
  StepScalars* const scalars = bench.put_scalars({.loss = 3.0, .tokens = 2.0});
  bench.ops().cross_entropy(bench.stream(), values, 90, ids, partial, true, scalars);
  EXPECT_EQ(bench.get_scalars(scalars).loss, 3.0);
  EXPECT_EQ(bench.get_scalars(scalars).tokens, 2.0);
  EXPECT_TRUE(bench.get(values).values == Matrix(40, 96).values);
}

TEST_P(LossTest, RowsWithoutTargetAndPaddingColumnsGetNoGradient) {
  Workbench bench = this->bench();
  const Loss result = run_loss(bench, random(3, 64), 50, {-1, 7, -1});
  for (std::int64_t j = 0; j < 64; ++j) {
    EXPECT_EQ(result.dlogits(0, j), 0.0f);
    EXPECT_EQ(result.dlogits(2, j), 0.0f);
    EXPECT_EQ(result.dlogits(1, j) == 0.0f, j >= 50) << "column " << j;
  }
  EXPECT_EQ(result.tokens, 1.0);
}

TEST_P(LossTest, WeightZeroAddsNothingYetGivesTheGradient) {
  Workbench bench = this->bench();
  const Matrix logits = random(5, 33);
  const Ids targets{1, 2, -1, 32, 0};
  StepScalars* const scalars = bench.put_scalars({.loss = 3.0, .tokens = 2.0});
  const Tensor values = bench.put(logits), ids = bench.put(targets), partial = bench.blank_float(5, 3);
  const auto finish = [&](double weight, bool gradient) {
    bench.ops().cross_entropy_finish(bench.stream(), values, 0, 33, ids, partial, weight, gradient, scalars);
  };
  bench.ops().cross_entropy_partial(bench.stream(), values, 0, 33, ids, partial);
  finish(1.0, false);
  EXPECT_EQ(bench.get(values).values, logits.values) << "logits changed without a gradient being asked for";
  const StepScalars counted = bench.get_scalars(scalars);
  EXPECT_NEAR(counted.loss - 3.0, run_loss(bench, logits, 33, targets).loss, 1e-6);
  EXPECT_EQ(counted.tokens, 6.0);
  finish(0.0, true);
  EXPECT_EQ(bench.get_scalars(scalars).loss, counted.loss);
  EXPECT_EQ(bench.get_scalars(scalars).tokens, counted.tokens);
  EXPECT_TRUE(close(bench.get(values), run_loss(bench, logits, 33, targets).dlogits, tolerance()));
}

TEST_P(LossTest, LossIsNotFiniteWhereALogitIsNotANumber) {
  Workbench bench = this->bench();
  Matrix logits = random(2, 40);
  logits(1, 20) = std::nanf("");
  EXPECT_FALSE(std::isfinite(run_loss(bench, logits, 40, {3, 4}).loss));
}

TEST_P(LossPrecisionTest, AgreesWithReference) {
  constexpr std::int64_t kShapes[][3] = {{17, 2, 2},       {33, 100, 97},      {130, 257, 257},
                                         {64, 4096, 4096}, {19, 50304, 50257}, {7, 128256, 128256}};
  for (const auto& [rows, cols, valid] : kShapes) {
    const Matrix logits = random(rows, cols, 2.0);
    const Ids targets = random_ids(rows, -1, static_cast<std::int32_t>(valid) - 1);
    expect_like_reference(
        fmt::format("cross_entropy [{}, {}], {} valid", rows, cols, valid), [&](Workbench& bench) {
          const Loss result = run_loss(bench, logits, valid, targets);
          Matrix sums(1, 2);
          sums.values = {static_cast<float>(result.loss), static_cast<float>(result.tokens)};
          return Results{{"loss and tokens", sums}, {"dlogits", result.dlogits}};
        });
  }
}

OCTET_TEST_BACKENDS(LossReferenceTest);
OCTET_TEST_BACKENDS_AND_TYPES(LossTest);
OCTET_TEST_AGAINST_REFERENCE(LossPrecisionTest);

}  // namespace
}  // namespace octet::test
