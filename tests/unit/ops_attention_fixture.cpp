#include "ops_attention_fixture.h"

namespace octet::test {
namespace {

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
}  // namespace

std::string describe(const AttentionInputs& in) {
  const AttentionShape& shape = in.shape;
  const HeadLayout& l = shape.layout;
  return fmt::format("batch {}, {} queries, {} keys, {} heads, {} key heads of {}, group {}, offset {}{}",
                     shape.batch, shape.sequence, shape.key_rows(), l.heads, l.kv_heads, l.head_size, l.group,
                     l.head_offset, in.starts.empty() ? "" : ", documents apart");
}
Results attention_reference(const AttentionInputs& in) {
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
Results run_attention(Workbench& bench, const AttentionInputs& in) {
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
}  // namespace octet::test
