#include "ops_fixture.h"

// Attention on rows anywhere in memory, with more keys than queries, and with documents kept apart.
namespace octet::test {
namespace {

/// The inputs of an attention and the gradient of its output, samples end to end.
struct Inputs {
  AttentionShape shape;
  Matrix query, key, value, dout;
  std::vector<std::int32_t> starts = {};  ///< of documents, or none

  std::int64_t first_key(std::int64_t sample, std::int64_t query_row) const {
    return starts.empty() ? 0 : starts[static_cast<std::size_t>(sample * shape.sequence + query_row)];
  }
  std::int64_t end_key(std::int64_t query_row) const {
    return shape.key_rows() - shape.sequence + query_row + 1;
  }
};

std::string describe(const Inputs& in) {
  const AttentionShape& shape = in.shape;
  const HeadLayout& l = shape.layout;
  return fmt::format("batch {}, {} queries, {} keys, {} heads, {} key heads of {}, group {}, offset {}{}",
                     shape.batch, shape.sequence, shape.key_rows(), l.heads, l.kv_heads, l.head_size, l.group,
                     l.head_offset, in.starts.empty() ? "" : ", documents apart");
}

AttentionShape shape_of(HeadLayout layout, std::int64_t batch, std::int64_t sequence, std::int64_t keys) {
  return {layout, batch, sequence, 1.0f / std::sqrt(static_cast<float>(layout.head_size)), keys};
}

/// Sums in float64, rounded at the end.
class Sums {
 public:
  Sums(std::int64_t rows, std::int64_t cols)
      : rows_(rows), cols_(cols), values_(static_cast<std::size_t>(rows * cols)) {}
  double* row(std::int64_t index) { return values_.data() + index * cols_; }
  Matrix rounded() const {
    Matrix result(rows_, cols_);
    for (std::size_t i = 0; i < values_.size(); ++i) result.values[i] = static_cast<float>(values_[i]);
    return result;
  }

 private:
  std::int64_t rows_, cols_;
  std::vector<double> values_;
};

double dot(const float* a, const float* b, int size) {
  double sum = 0.0;
  for (int i = 0; i < size; ++i) sum += double{a[i]} * double{b[i]};
  return sum;
}

void add(double factor, const float* from, int size, double* to) {
  for (int i = 0; i < size; ++i) to[i] += factor * double{from[i]};
}

/// The definition, row by row in float64.
Results reference(const Inputs& in) {
  const AttentionShape& shape = in.shape;
  const HeadLayout& layout = shape.layout;
  const int size = layout.head_size;
  const std::int64_t length = shape.sequence, keys = shape.key_rows();
  Sums out(in.query.rows, in.query.cols), dq(in.query.rows, in.query.cols);
  Sums dk(in.key.rows, in.key.cols), dv(in.key.rows, in.key.cols);
  Sums statistics(shape.batch * layout.heads, length);
  std::vector<double> p(static_cast<std::size_t>(keys)), dp(static_cast<std::size_t>(keys));
  for (std::int64_t sample = 0; sample < shape.batch; ++sample) {
    for (int head = 0; head < layout.heads; ++head) {
      const int column = head * size, kv_column = (head + layout.head_offset) / layout.group * size;
      for (std::int64_t i = 0; i < length; ++i) {
        const std::int64_t row = sample * length + i, first = in.first_key(sample, i), end = in.end_key(i);
        const float* const q = &in.query.values[static_cast<std::size_t>(row * in.query.cols + column)];
        const float* const d = &in.dout.values[static_cast<std::size_t>(row * in.dout.cols + column)];
        const auto key = [&](const Matrix& matrix, std::int64_t j) {
          return &matrix.values[static_cast<std::size_t>((sample * keys + j) * matrix.cols + kv_column)];
        };
        double total = 0.0, along = 0.0;  // scores are small: no largest one to subtract
        for (std::int64_t j = first; j < end; ++j) {
          const auto at = static_cast<std::size_t>(j);
          p[at] = std::exp(double{shape.scale} * dot(q, key(in.key, j), size));
          total += p[at];
          dp[at] = dot(d, key(in.value, j), size);
        }
        statistics.row(sample * layout.heads + head)[i] = std::log(total);
        for (std::int64_t j = first; j < end; ++j) {
          const auto at = static_cast<std::size_t>(j);
          p[at] /= total;
          along += p[at] * dp[at];
        }
        for (std::int64_t j = first; j < end; ++j) {
          const auto at = static_cast<std::size_t>(j);
          const double dscore = double{shape.scale} * p[at] * (dp[at] - along);
          add(p[at], key(in.value, j), size, out.row(row) + column);
          add(dscore, key(in.key, j), size, dq.row(row) + column);
          add(dscore, q, size, dk.row(sample * keys + j) + kv_column);
          add(p[at], d, size, dv.row(sample * keys + j) + kv_column);
        }
      }
    }
  }
  return {{"out", out.rounded()},
          {"statistics", statistics.rounded()},
          {"dquery", dq.rounded()},
          {"dkey", dk.rounded()},
          {"dvalue", dv.rounded()}};
}

/// The rows of samples in the midst of a larger array whose other elements are NaN.
class Island {
 public:
  Island(Workbench& bench, const Matrix& content, std::int64_t batch) : Island(content, batch) {
    Matrix sea(batch * sea_rows(), sea_cols());
    std::fill(sea.values.begin(), sea.values.end(), std::nanf(""));
    visit([&](std::int64_t row, std::int64_t col, std::int64_t at, std::int64_t j) {
      sea(at, j) = content(row, col);
    });
    array_ = bench.put(sea);
  }
  /// For an output.
  static Island blank(Workbench& bench, std::int64_t batch, std::int64_t rows, std::int64_t cols) {
    Island island(Matrix(batch * rows, cols), batch);
    island.array_ = bench.blank(batch * island.sea_rows(), island.sea_cols());
    return island;
  }

  SampleRows rows() const {
    const std::int64_t first = kRowsBefore * array_.cols + kColsBefore;
    return {static_cast<std::byte*>(array_.data) + first * size_of(array_.dtype), array_.cols,
            sea_rows() * array_.cols};
  }
  /// What lies there now; nothing may have been written around it.
  Matrix get(Workbench& bench) const {
    const Matrix sea = bench.get(array_);
    Matrix content(batch_ * rows_, cols_);
    content.dtype = array_.dtype;
    std::size_t written = 0, finite = 0;
    for (const float value : sea.values) written += std::isnan(value) ? 0 : 1;
    visit([&](std::int64_t row, std::int64_t col, std::int64_t at, std::int64_t j) {
      content(row, col) = sea(at, j);
      finite += std::isnan(sea(at, j)) ? 0 : 1;
    });
    EXPECT_EQ(written, finite) << "elements were written outside of the rows";
    return content;
  }

 private:
  static constexpr std::int64_t kRowsBefore = 3, kRowsAfter = 2, kColsBefore = 16, kColsAfter = 24;

  Island(const Matrix& content, std::int64_t batch)
      : batch_(batch), rows_(content.rows / batch), cols_(content.cols) {}
  std::int64_t sea_rows() const { return kRowsBefore + rows_ + kRowsAfter; }
  /// A multiple of 8, as cuDNN wants it.
  std::int64_t sea_cols() const { return kColsBefore + (cols_ + 7) / 8 * 8 + kColsAfter; }
  template <typename F>
  void visit(F f) const {
    for (std::int64_t row = 0; row < batch_ * rows_; ++row) {
      const std::int64_t at = row / rows_ * sea_rows() + kRowsBefore + row % rows_;
      for (std::int64_t col = 0; col < cols_; ++col) f(row, col, at, kColsBefore + col);
    }
  }

  std::int64_t batch_, rows_, cols_;
  Tensor array_;
};

Results run(Workbench& bench, const Inputs& in) {
  const AttentionShape& shape = in.shape;
  const std::int64_t batch = shape.batch;
  const Island query(bench, in.query, batch), key(bench, in.key, batch), value(bench, in.value, batch);
  const Island dout(bench, in.dout, batch);
  AttentionOperands operands{bench.compute(), query.rows(), key.rows(), value.rows()};
  if (!in.starts.empty()) {
    operands.document_starts = bench.put(in.starts).reshape(batch, shape.sequence);
  }
  const Island out = Island::blank(bench, batch, shape.sequence, in.query.cols);
  const Island dquery = Island::blank(bench, batch, shape.sequence, in.query.cols);
  const Island dkey = Island::blank(bench, batch, shape.key_rows(), in.key.cols);
  const Island dvalue = Island::blank(bench, batch, shape.key_rows(), in.key.cols);
  const Tensor statistics = bench.blank_float(batch * shape.layout.heads, shape.sequence);
  bench.ops().attention_forward(bench.stream(), shape, operands, out.rows(), statistics);
  bench.ops().attention_backward(bench.stream(), shape, operands, out.rows(), statistics, dout.rows(),
                                 dquery.rows(), dkey.rows(), dvalue.rows());
  return {{"out", out.get(bench)},
          {"statistics", bench.get(statistics)},
          {"dquery", dquery.get(bench)},
          {"dkey", dkey.get(bench)},
          {"dvalue", dvalue.get(bench)}};
}

class AttentionRowsTest : public OpsTest {
 protected:
  Inputs inputs(const AttentionShape& shape) {
    const std::int64_t queries = shape.batch * shape.sequence, keys = shape.batch * shape.key_rows();
    const std::int64_t key_cols = std::int64_t{shape.layout.kv_heads} * shape.layout.head_size;
    return {shape, random(queries, shape.layout.query()), random(keys, key_cols), random(keys, key_cols),
            random(queries, shape.layout.query())};
  }

  /// Starts of random documents: about one key row in `length` begins one, and so may the first query's.
  std::vector<std::int32_t> random_starts(const AttentionShape& shape, int length) {
    std::vector<std::int32_t> starts;
    const std::int64_t before = shape.key_rows() - shape.sequence;
    for (std::int64_t sample = 0; sample < shape.batch; ++sample) {
      std::int32_t start = 0;
      for (std::int64_t key = 0; key < shape.key_rows(); ++key) {
        if (random_() % static_cast<unsigned>(length) == 0) start = static_cast<std::int32_t>(key);
        if (key >= before) starts.push_back(start);
      }
    }
    return starts;
  }

  Workbench bench(const AttentionShape& shape, const CudaOpsOptions& options = {}) const {
    Workload own = workload();
    own.attention = shape;
    own.documents_apart = true;
    return {GetParam(), own, options};
  }

  void expect_close(const Results& actual, const Results& expected, const std::string& label) {
    for (std::size_t i = 0; i < expected.size(); ++i) {
      const Matrix& result = actual[i].second;
      EXPECT_TRUE(close(result, expected[i].second, tolerance_of(result.dtype)))
          << label << ": " << expected[i].first;
    }
  }
};

TEST_P(AttentionRowsTest, MatchesTheDefinitionInFloat64) {
  const AttentionShape shapes[] = {
      shape_of({4, 2, 64, 2, 0}, 2, 128, 128), shape_of({4, 2, 64, 2, 0}, 2, 128, 256),
      shape_of({4, 2, 64, 2, 0}, 1, 128, 512), shape_of({8, 2, 128, 4, 0}, 1, 256, 512),
      shape_of({4, 4, 64, 1, 0}, 3, 100, 177), shape_of({3, 3, 32, 2, 1}, 2, 64, 160),
      shape_of({6, 1, 80, 6, 0}, 2, 33, 66),   shape_of({2, 2, 12, 1, 0}, 2, 40, 90),
      shape_of({2, 1, 64, 2, 0}, 2, 1, 40),    shape_of({2, 1, 16, 2, 0}, 1, 300, 300),
  };
  for (const AttentionShape& shape : shapes) {
    Inputs in = inputs(shape);
    Workbench bench = this->bench(shape);
    expect_close(run(bench, in), reference(in), describe(in));
    in.starts = random_starts(shape, 30);
    expect_close(run(bench, in), reference(in), describe(in));
  }
}

TEST_P(AttentionRowsTest, DocumentsOfOneTokenSeeThemselvesAlone) {
  const AttentionShape shape = shape_of({2, 2, 64, 1, 0}, 1, 192, 192);
  Inputs in = inputs(shape);
  for (std::int32_t i = 0; i < 192; ++i) in.starts.push_back(i);
  Workbench bench = this->bench(shape);
  const Results results = run(bench, in);
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
    Inputs whole = inputs(shape);
    if (documents) whole.starts = random_starts(shape, 60);
    Workbench bench = this->bench(shape);
    const Results expected = run(bench, whole);
    Matrix dkey(whole.key.rows, whole.key.cols), dvalue = dkey;
    for (int part = 0; part < 3; ++part) {
      const std::int64_t begin = cuts[part], end = cuts[part + 1];
      Inputs in{shape_of(shape.layout, shape.batch, end - begin, end), slice(whole.query, length, begin, end),
                slice(whole.key, length, 0, end), slice(whole.value, length, 0, end),
                slice(whole.dout, length, begin, end)};
      for (std::int64_t sample = 0; documents && sample < shape.batch; ++sample) {
        const auto first = whole.starts.begin() + sample * length;
        in.starts.insert(in.starts.end(), first + begin, first + end);
      }
      const Results results = run(bench, in);
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
  Inputs in = inputs(shape);
  for (std::int64_t row = 0; row < 2 * 192; ++row) {
    in.starts.push_back(row % 192 < 50 ? 0 : is_middle(row) ? 50 : 140);
    for (std::int64_t j = 0; j < in.dout.cols; ++j) {
      if (is_middle(row)) in.dout(row, j) = 0.0f;
    }
  }
  Inputs changed = in;
  for (Matrix* matrix : {&changed.query, &changed.key, &changed.value}) {
    for (std::int64_t row = 0; row < matrix->rows; ++row) {
      for (std::int64_t j = 0; j < matrix->cols; ++j) {
        if (is_middle(row)) (*matrix)(row, j) += 3.0f;
      }
    }
  }
  Workbench bench = this->bench(shape);
  const Results before = run(bench, in), after = run(bench, changed);
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

class OwnAttentionTest : public AttentionRowsTest {};

// Tiles are 128 keys by 192 or 128 queries forward, and backward by 128 or 64 of heads of 128: within one, at
// edges, and many; with more heads than are at work at once, so that memory of query gradients is used again.
TEST_P(OwnAttentionTest, MatchesTheDefinitionInFloat64) {
  const AttentionShape shapes[] = {
      shape_of({2, 2, 64, 1, 0}, 2, 128, 128),  shape_of({2, 1, 64, 2, 0}, 1, 300, 300),
      shape_of({4, 2, 64, 2, 0}, 2, 100, 477),  shape_of({6, 6, 64, 1, 0}, 3, 20, 20),
      shape_of({4, 2, 128, 2, 0}, 1, 200, 200), shape_of({3, 1, 128, 4, 1}, 2, 70, 330),
      shape_of({5, 5, 128, 1, 0}, 2, 65, 65),   shape_of({2, 2, 64, 1, 0}, 1, 1, 130),
      shape_of({2, 2, 64, 2, 2}, 3, 200, 210),  shape_of({1, 1, 64, 1, 0}, 1, 200, 1100),
      shape_of({2, 2, 128, 1, 0}, 3, 170, 170),
  };
  for (const AttentionShape& shape : shapes) {
    const Inputs in = inputs(shape);
    Workbench bench = this->bench(shape, {.own_attention = OwnKernels::kAlways});
    const Results results = run(bench, in);
    expect_close(results, reference(in), describe(in));
    const Results again = run(bench, in);
    for (std::size_t i = 0; i < results.size(); ++i) {
      EXPECT_EQ(results[i].second.values, again[i].second.values) << describe(in) << ": " << results[i].first;
    }
  }
}

// What softmax subtracts, the largest score of the first keys, is by far too little for later ones.
TEST_P(OwnAttentionTest, LaterScoresMayBeMuchLarger) {
  for (const int head_size : {64, 128}) {
    const AttentionShape shape = shape_of({4, 2, head_size, 2, 0}, 1, 320, 330);
    Inputs in = inputs(shape);
    for (std::int64_t row = 130; row < in.key.rows; ++row) {
      for (std::int64_t j = 0; j < in.key.cols; ++j) in.key(row, j) *= row < 260 ? 32.0f : 128.0f;
    }
    Workbench bench = this->bench(shape, {.own_attention = OwnKernels::kAlways});
    const Results results = run(bench, in), expected = reference(in);
    expect_close({results[0], results[1]}, {expected[0], expected[1]}, describe(in));
  }
}

OCTET_TEST_BACKENDS_AND_TYPES(AttentionRowsTest);
INSTANTIATE_TEST_SUITE_P(Cuda, OwnAttentionTest, testing::Values(OpsCase{DeviceKind::kCuda, DType::kBF16}),
                         name_of_case);

}  // namespace
}  // namespace octet::test
