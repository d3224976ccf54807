#include <algorithm>
#include <numeric>

#include "ops_fixture.h"

namespace octet::test {
namespace {

class EmbeddingReferenceTest : public OpsTest {};
class EmbeddingTest : public OpsTest {};

using Ids = std::vector<std::int32_t>;

/// Token numbers sorted by id, equal ids in rising order.
Ids sorted_order(const Ids& ids) {
  Ids order(ids.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return ids[a] < ids[b]; });
  return order;
}

Matrix run_backward(Workbench& bench, const Ids& ids, const Matrix& dout, std::int64_t first_id,
                    const Matrix& start) {
  const Tensor dtable = bench.put_float(start);
  bench.ops().embedding_backward(bench.stream(), bench.put(ids), bench.put(sorted_order(ids)),
                                 bench.put(dout), first_id, dtable);
  return bench.get(dtable);
}

TEST_P(EmbeddingReferenceTest, MatchesPyTorch) {
  const ReferenceFile file("ops.ref");
  Workbench bench = this->bench();
  const Ids ids = file["embedding/ids"].integers(), positions = file["embedding/positions"].integers();
  ASSERT_EQ(sorted_order(ids), file["embedding/order"].integers());
  const Tensor out = bench.blank(8, 21);
  bench.ops().embedding_forward(bench.stream(), bench.put(ids), bench.put(file["embedding/table"]), 0,
                                bench.put(positions), bench.put(file["embedding/position_table"]), out);
  EXPECT_TRUE(close(bench.get(out), file["embedding/y"], 1e-7));
  EXPECT_TRUE(close(run_backward(bench, ids, file["embedding/dy"], 0, Matrix(10, 21)),
                    file["embedding/dtable"], 1e-6));
  EXPECT_TRUE(close(run_backward(bench, positions, file["embedding/dy"], 0, Matrix(6, 21)),
                    file["embedding/dposition_table"], 1e-6));
}

struct Sizes {
  std::int64_t tokens, rows, cols, first_id;
};
/// Tables of a vocabulary split over ranks hold the ids first_id … first_id + rows - 1 of 0 … 299.
constexpr Sizes kSizes[] = {
    {1, 300, 1, 0}, {77, 100, 3, 100}, {513, 150, 257, 150}, {256, 300, 1600, 0}, {2048, 5, 64, 0}};

std::string describe(const Sizes& s) {
  return fmt::format("embedding: {} tokens, table [{}, {}] from id {}", s.tokens, s.rows, s.cols, s.first_id);
}

TEST_P(EmbeddingTest, RowsOutsideTheTableAreZeroBeforePositionsAreAdded) {
  Workbench bench = this->bench();
  for (const Sizes& s : kSizes) {
    const Ids ids = random_ids(s.tokens, 0, 299), positions = random_ids(s.tokens, 0, 63);
    const Matrix table = random(s.rows, s.cols), position_table = random(64, s.cols);
    for (const bool with_positions : {false, true}) {
      Matrix expected(s.tokens, s.cols);
      for (std::int64_t token = 0; token < s.tokens; ++token) {
        const std::int64_t row = ids[token] - s.first_id;
        for (std::int64_t j = 0; j < s.cols; ++j) {
          if (row >= 0 && row < s.rows) expected(token, j) = table(row, j);
          if (with_positions) expected(token, j) += position_table(positions[token], j);
          if (compute() == DType::kBF16) expected(token, j) = static_cast<float>(BF16(expected(token, j)));
        }
      }
      const Tensor out = bench.blank(s.tokens, s.cols);
      bench.ops().embedding_forward(bench.stream(), bench.put(ids), bench.put(table), s.first_id,
                                    with_positions ? bench.put(positions) : Tensor{},
                                    with_positions ? bench.put(position_table) : Tensor{}, out);
      EXPECT_EQ(bench.get(out).values, expected.values)
          << describe(s) << (with_positions ? ", positions" : "");
    }
  }
}

TEST_P(EmbeddingTest, GradientsOfEqualIdsAddUp) {
  Workbench bench = this->bench();
  for (const Sizes& s : kSizes) {
    const Ids ids = random_ids(s.tokens, 0, 299);
    const Matrix dout = random(s.tokens, s.cols), start = random(s.rows, s.cols);
    std::vector<double> sums(start.values.begin(), start.values.end());
    for (std::int64_t token = 0; token < s.tokens; ++token) {
      const std::int64_t row = ids[token] - s.first_id;
      if (row < 0 || row >= s.rows) continue;
      for (std::int64_t j = 0; j < s.cols; ++j) sums[row * s.cols + j] += dout(token, j);
    }
    Matrix expected(s.rows, s.cols);
    std::copy(sums.begin(), sums.end(), expected.values.begin());
    EXPECT_TRUE(close(run_backward(bench, ids, dout, s.first_id, start), expected, 2e-6)) << describe(s);
  }
}

TEST_P(EmbeddingTest, GradientIsBitwiseRepeatable) {
  Workbench bench = this->bench();
  const Ids ids = random_ids(2048, 0, 3);
  const Matrix dout = random(2048, 96);
  const Matrix once = run_backward(bench, ids, dout, 0, Matrix(4, 96));
  for (int run = 0; run < 3; ++run)
    EXPECT_EQ(run_backward(bench, ids, dout, 0, Matrix(4, 96)).values, once.values);
}

OCTET_TEST_BACKENDS(EmbeddingReferenceTest);
OCTET_TEST_BACKENDS_AND_TYPES(EmbeddingTest);

}  // namespace
}  // namespace octet::test
