// Attention on rows anywhere in memory, with more keys than queries, and with documents kept apart.
#include "ops_attention_fixture.h"

namespace octet::test {
namespace {

class AttentionRowsTest : public AttentionFixture {};

TEST_P(AttentionRowsTest, MatchesTheDefinitionInFloat64) {
  const AttentionShape shapes[] = {
      shape_of({4, 2, 64, 2, 0}, 2, 128, 128), shape_of({4, 2, 64, 2, 0}, 2, 128, 256),
      shape_of({4, 2, 64, 2, 0}, 1, 128, 512), shape_of({8, 2, 128, 4, 0}, 1, 256, 512),
      shape_of({4, 4, 64, 1, 0}, 3, 100, 177), shape_of({3, 3, 32, 2, 1}, 2, 64, 160),
      shape_of({6, 1, 80, 6, 0}, 2, 33, 66),   shape_of({2, 2, 12, 1, 0}, 2, 40, 90),
      shape_of({2, 1, 64, 2, 0}, 2, 1, 40),    shape_of({2, 1, 16, 2, 0}, 1, 300, 300),
  };
  for (const AttentionShape& shape : shapes) {
    AttentionInputs in = inputs(shape);
    Workbench bench = this->bench(shape, true);
    expect_close(run_attention(bench, in), attention_reference(in), describe(in));
    in.starts = random_starts(shape, 30);
    expect_close(run_attention(bench, in), attention_reference(in), describe(in));
  }
}

TEST_P(AttentionRowsTest, DocumentsOfOneTokenSeeThemselvesAlone) {
  const AttentionShape shape = shape_of({2, 2, 64, 1, 0}, 1, 192, 192);
  AttentionInputs in = inputs(shape);
  for (std::int32_t i = 0; i < 192; ++i) in.starts.push_back(i);
  Workbench bench = this->bench(shape, true);
  const Results results = run_attention(bench, in);
  EXPECT_EQ(results[0].second.values, in.value.values) << "out";
  expect_close({results[4]}, {{"dvalue", in.dout}}, describe(in));
}

/// Rows [begin, end) of every sample of `length` rows.
Matrix slice(const Matrix& from, std::int64_t length, std::int64_t begin, std::int64_t end) {
  const std::int64_t batch = from.rows / length, count = end - begin;
  Matrix result(batch * count, from.cols);
  for (std::int64_t row = 0; row < result.rows; ++row) {
    for (std::int64_t j = 0; j < from.cols; ++j) {
      result(row, j) = from(row / count * length + begin + row % count, j);
    }
  }
  return result;
}

/// Adds the rows of `part` to the first ones of every sample of `length` rows.
void add_to_first_rows(const Matrix& part, std::int64_t batch, std::int64_t length, Matrix& whole) {
  const std::int64_t count = part.rows / batch;
  for (std::int64_t row = 0; row < part.rows; ++row) {
    for (std::int64_t j = 0; j < part.cols; ++j) {
      whole(row / count * length + row % count, j) += part(row, j);
    }
  }
}

// What ranks of context parallelism do: each has some of the queries, and all keys up to the last of these.
TEST_P(AttentionRowsTest, PartsOfTheQueriesMakeUpTheWhole) {
  const std::int64_t length = 256, cuts[] = {0, 64, 192, 256};
  const AttentionShape shape = shape_of({4, 2, 64, 2, 0}, 2, length, length);
  for (const bool documents : {false, true}) {
    AttentionInputs whole = inputs(shape);
    if (documents) whole.starts = random_starts(shape, 60);
    Workbench bench = this->bench(shape, true);
    const Results expected = run_attention(bench, whole);
    Matrix dkey(whole.key.rows, whole.key.cols), dvalue = dkey;
    for (int part = 0; part < 3; ++part) {
      const std::int64_t begin = cuts[part], end = cuts[part + 1];
      AttentionInputs in{shape_of(shape.layout, shape.batch, end - begin, end),
                         slice(whole.query, length, begin, end), slice(whole.key, length, 0, end),
                         slice(whole.value, length, 0, end), slice(whole.dout, length, begin, end)};
      for (std::int64_t sample = 0; documents && sample < shape.batch; ++sample) {
        const auto first = whole.starts.begin() + sample * length;
        in.starts.insert(in.starts.end(), first + begin, first + end);
      }
      const Results results = run_attention(bench, in);
      expect_close({results[0], results[2]},
                   {{"out", slice(expected[0].second, length, begin, end)},
                    {"dquery", slice(expected[2].second, length, begin, end)}},
                   describe(in));
      add_to_first_rows(results[3].second, shape.batch, length, dkey);
      add_to_first_rows(results[4].second, shape.batch, length, dvalue);
    }
    dkey.dtype = dvalue.dtype = compute();
    expect_close({{"dkey", dkey}, {"dvalue", dvalue}}, {expected[3], expected[4]}, describe(whole));
  }
}

TEST_P(AttentionRowsTest, ADocumentSeesNothingOfOthers) {
  // Documents of 50, 90 and 52 tokens; all of the middle one's change.
  const AttentionShape shape = shape_of({4, 2, 64, 2, 0}, 2, 192, 192);
  const auto is_middle = [](std::int64_t row) { return row % 192 >= 50 && row % 192 < 140; };
  AttentionInputs in = inputs(shape);
  for (std::int64_t row = 0; row < 2 * 192; ++row) {
    in.starts.push_back(row % 192 < 50 ? 0 : is_middle(row) ? 50 : 140);
    for (std::int64_t j = 0; j < in.dout.cols; ++j) {
      if (is_middle(row)) in.dout(row, j) = 0.0f;
    }
  }
  AttentionInputs changed = in;
  for (Matrix* matrix : {&changed.query, &changed.key, &changed.value}) {
    for (std::int64_t row = 0; row < matrix->rows; ++row) {
      for (std::int64_t j = 0; j < matrix->cols; ++j) {
        if (is_middle(row)) (*matrix)(row, j) += 3.0f;
      }
    }
  }
  Workbench bench = this->bench(shape, true);
  const Results before = run_attention(bench, in), after = run_attention(bench, changed);
  for (std::int64_t row = 0; row < 2 * 192; ++row) {
    bool same = true;
    for (std::int64_t j = 0; j < before[0].second.cols; ++j) {
      same = same && before[0].second(row, j) == after[0].second(row, j);
    }
    EXPECT_EQ(same, !is_middle(row)) << "out, row " << row;
    if (!is_middle(row)) continue;
    for (const std::size_t gradient : {2, 3, 4}) {
      const Matrix& matrix = before[gradient].second;
      for (std::int64_t j = 0; j < matrix.cols; ++j) {
        ASSERT_EQ(matrix(row, j), 0.0f) << before[gradient].first << ", row " << row;
      }
    }
  }
}
OCTET_TEST_BACKENDS_AND_TYPES(AttentionRowsTest);

}  // namespace
}  // namespace octet::test
