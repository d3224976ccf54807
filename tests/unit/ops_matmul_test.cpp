#include "ops_fixture.h"

namespace octet::test {
namespace {

class MatmulTest : public OpsTest {};

struct Sizes {
  std::int64_t m, n, k;
};
constexpr Sizes kSizes[] = {{1, 1, 1},      {3, 5, 7},      {1, 100, 64},   {64, 64, 64},
                            {33, 257, 100}, {300, 24, 520}, {40, 520, 1600}};

/// op(a) · op(b) + bias + start, in float64.
Matrix expected_product(const Matrix& a, bool transpose_a, const Matrix& b, bool transpose_b,
                        const Matrix* bias, const Matrix* start, Sizes s) {
  Matrix y(s.m, s.n);
  for (std::int64_t i = 0; i < s.m; ++i) {
    for (std::int64_t j = 0; j < s.n; ++j) {
      double total = start == nullptr ? 0.0 : (*start)(i, j);
      if (bias != nullptr) total += (*bias)(0, j);
      for (std::int64_t p = 0; p < s.k; ++p) {
        total += double{transpose_a ? a(p, i) : a(i, p)} * double{transpose_b ? b(j, p) : b(p, j)};
      }
      y(i, j) = static_cast<float>(total);
    }
  }
  return y;
}

TEST_P(MatmulTest, EveryFormEqualsTheSumOfProducts) {
  Workbench bench = this->bench();
  for (const Sizes s : kSizes) {
    for (int form = 0; form < 32; ++form) {
      const bool transpose_a = form & 1, transpose_b = form & 2, accumulate = form & 4, with_bias = form & 8;
      const bool float_output = form & 16;
      const Matrix a = transpose_a ? random(s.k, s.m) : random(s.m, s.k);
      const Matrix b = transpose_b ? random(s.n, s.k) : random(s.k, s.n);
      const Matrix bias = random(1, s.n), start = random(s.m, s.n);
      const auto output = [&] {
        if (accumulate) return float_output ? bench.put_float(start) : bench.put(start);
        return float_output ? bench.blank_float(s.m, s.n) : bench.blank(s.m, s.n);
      };
      Matmul args{bench.put(a), bench.put(b), transpose_a, transpose_b, output(), accumulate, {}};
      if (with_bias) args.bias = bench.put(bias);
      bench.ops().matmul(bench.stream(), args);
      const Matrix expected = expected_product(a, transpose_a, b, transpose_b, with_bias ? &bias : nullptr,
                                               accumulate ? &start : nullptr, s);
      // float32 outputs of bfloat16 operands are exact but for the order of the sum.
      const double rms = std::sqrt(static_cast<double>(s.k));
      EXPECT_TRUE(close(bench.get(args.y), expected, float_output ? 1e-5 : tolerance(), rms)) << fmt::format(
          "matmul m {} n {} k {} transpose_a {} transpose_b {} accumulate {} bias {} output {}", s.m, s.n,
          s.k, transpose_a, transpose_b, accumulate, with_bias, name_of(args.y.dtype));
    }
  }
}

OCTET_TEST_BACKENDS_AND_TYPES(MatmulTest);

}  // namespace
}  // namespace octet::test
