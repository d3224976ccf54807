#include "ops_fixture.h"

namespace octet::test {
namespace {

class AttentionTest : public OpsTest {
 protected:
  Workload workload_for(const AttentionShape& shape) const {
    Workload result = workload();
    result.tokens = shape.batch * shape.sequence;
    result.attention = shape;
    return result;
  }
};
class AttentionReferenceTest : public AttentionTest {};
class AttentionPrecisionTest : public AttentionTest {};

std::string describe(const AttentionShape& shape) {
  const HeadLayout& l = shape.layout;
  return fmt::format(
      "attention: batch {}, sequence {}, {} heads, {} key heads of {}, group {}, head offset {}", shape.batch,
      shape.sequence, l.heads, l.kv_heads, l.head_size, l.group, l.head_offset);
}

AttentionShape shape_of(HeadLayout layout, std::int64_t batch, std::int64_t sequence) {
  return {layout, batch, sequence, 1.0f / std::sqrt(static_cast<float>(layout.head_size))};
}

struct Forward {
  Tensor qkv, out, statistics;
};

Forward run_forward(Workbench& bench, const AttentionShape& shape, const Matrix& x) {
  const Forward result{bench.put(x), bench.blank(x.rows, shape.layout.query()),
                       bench.blank_float(shape.batch * shape.layout.heads, shape.sequence)};
  bench.ops().attention_forward(bench.stream(), shape, result.qkv, result.out, result.statistics);
  return result;
}

Matrix run_backward(Workbench& bench, const AttentionShape& shape, const Forward& forward, const Matrix& dy) {
  const Tensor dqkv = bench.blank(forward.qkv.rows, forward.qkv.cols);
  bench.ops().attention_backward(bench.stream(), shape, forward.qkv, forward.out, forward.statistics,
                                 bench.put(dy), dqkv);
  return bench.get(dqkv);
}

TEST_P(AttentionReferenceTest, MatchesPyTorch) {
  const ReferenceFile file("ops.ref");
  const AttentionShape shape = shape_of({4, 2, 8, 2, 0}, 2, 12);
  Workbench bench = this->bench(shape);
  const Forward forward = run_forward(bench, shape, file["attention/x"]);
  EXPECT_TRUE(close(bench.get(forward.out), file["attention/y"], 3e-6));
  EXPECT_TRUE(close(run_backward(bench, shape, forward, file["attention/dy"]), file["attention/dx"], 3e-6));
}

TEST_P(AttentionReferenceTest, GradientsMatchCentralDifferences) {
  const AttentionShape shape = shape_of({4, 2, 16, 2, 0}, 2, 64);
  Workbench bench = this->bench(shape);
  const Matrix x = random(128, shape.layout.packed()), direction = random(128, shape.layout.packed());
  const Matrix dy = random(128, shape.layout.query());
  const Matrix dx = run_backward(bench, shape, run_forward(bench, shape, x), dy);
  const auto loss = [&](double step) {
    return dot(bench.get(run_forward(bench, shape, moved(x, step, direction)).out), dy);
  };
  expect_slope(describe(shape), loss, dot(dx, direction), norm_of(dx), 5e-3);
}

TEST_P(AttentionPrecisionTest, AgreesWithReference) {
  const AttentionShape shapes[] = {
      shape_of({2, 2, 64, 1, 0}, 3, 64),    shape_of({4, 1, 16, 4, 0}, 2, 128),
      shape_of({8, 1, 80, 8, 0}, 1, 128),   shape_of({8, 2, 128, 4, 0}, 1, 256),
      shape_of({3, 3, 80, 1, 0}, 2, 256),   shape_of({16, 2, 16, 8, 0}, 2, 256),
      shape_of({8, 1, 128, 8, 0}, 1, 1024), shape_of({4, 4, 64, 1, 0}, 1, 1024),
  };
  for (const AttentionShape& shape : shapes) {
    const std::int64_t tokens = shape.batch * shape.sequence;
    const Matrix x = random(tokens, shape.layout.packed()), dy = random(tokens, shape.layout.query());
    expect_like_reference(describe(shape), workload_for(shape), [&](Workbench& bench) {
      const Forward forward = run_forward(bench, shape, x);
      return Results{{"out", bench.get(forward.out)},
                     {"statistics", bench.get(forward.statistics)},
                     {"dqkv", run_backward(bench, shape, forward, dy)}};
    });
  }
}

/// Copies the heads [first, first + count) of `from` to head `to_head` on of `to`.
void copy_heads(const Matrix& from, int first, int count, int size, Matrix& to, int to_head) {
  for (std::int64_t row = 0; row < from.rows; ++row) {
    for (int i = 0; i < count * size; ++i) to(row, to_head * size + i) = from(row, first * size + i);
  }
}

TEST_P(AttentionTest, HeadOffsetPicksTheKeyHeadOfTheGlobalQueryHead) {
  // Query heads 3, 4, 5 of a model with two queries a key, where a rank holds copies of key heads 0, 1 and 2:
  // they attend with key heads 1, 2, 2, as three heads with key heads of their own would.
  const int size = 64;
  const AttentionShape shape = shape_of({3, 3, size, 2, 3}, 2, 128),
                       plain = shape_of({3, 3, size, 1, 0}, 2, 128);
  constexpr int kKeyHeads[] = {1, 2, 2};
  const Matrix x = random(256, shape.layout.packed()), dy = random(256, shape.layout.query());
  Matrix unfolded = x;
  for (int head = 0; head < 3; ++head) {
    copy_heads(x, 3 + kKeyHeads[head], 1, size, unfolded, 3 + head);
    copy_heads(x, 6 + kKeyHeads[head], 1, size, unfolded, 6 + head);
  }
  Workbench bench = this->bench(shape), plain_bench = this->bench(plain);
  const Forward forward = run_forward(bench, shape, x), expected = run_forward(plain_bench, plain, unfolded);
  EXPECT_TRUE(close(bench.get(forward.out), plain_bench.get(expected.out), tolerance()));

  const Matrix dqkv = run_backward(bench, shape, forward, dy);
  const Matrix plain_dqkv = run_backward(plain_bench, plain, expected, dy);
  Matrix folded(dqkv.rows, dqkv.cols);  // gradients of key head 0, which no query uses, are zero
  copy_heads(plain_dqkv, 0, 3, size, folded, 0);
  for (const int first : {3, 6}) {
    for (std::int64_t row = 0; row < folded.rows; ++row) {
      for (int head = 0; head < 3; ++head) {
        for (int i = 0; i < size; ++i) {
          folded(row, (first + kKeyHeads[head]) * size + i) += plain_dqkv(row, (first + head) * size + i);
        }
      }
    }
  }
  EXPECT_TRUE(close(dqkv, folded, tolerance()));
  for (std::int64_t row = 0; row < dqkv.rows; ++row) {
    for (int i = 0; i < size; ++i) {
      ASSERT_EQ(dqkv(row, 3 * size + i), 0.0f) << "key head 0, row " << row;
      ASSERT_EQ(dqkv(row, 6 * size + i), 0.0f) << "value head 0, row " << row;
    }
  }
}

TEST_P(AttentionTest, ATokenSeesNothingOfLaterTokensOrOtherSequences) {
  const AttentionShape shape = shape_of({2, 1, 64, 2, 0}, 2, 128);
  Workbench bench = this->bench(shape);
  const Matrix x = random(256, shape.layout.packed());
  const Matrix before = bench.get(run_forward(bench, shape, x).out);
  Matrix changed = x;
  for (std::int64_t row = 77; row < 128; ++row) {
    for (std::int64_t j = 0; j < x.cols; ++j) changed(row, j) += 3.0f;
  }
  const Matrix after = bench.get(run_forward(bench, shape, changed).out);
  for (std::int64_t row = 0; row < 256; ++row) {
    bool same = true;
    for (std::int64_t j = 0; j < before.cols; ++j) same = same && before(row, j) == after(row, j);
    EXPECT_EQ(same, row < 77 || row >= 128) << "row " << row;
  }
}

OCTET_TEST_BACKENDS(AttentionReferenceTest);
OCTET_TEST_BACKENDS_AND_TYPES(AttentionTest);
OCTET_TEST_AGAINST_REFERENCE(AttentionPrecisionTest);

}  // namespace
}  // namespace octet::test
