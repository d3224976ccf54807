// Products that end in a GELU, a SwiGLU, or the gradient of one.
#include "octet/ops/plan_cache.h"
#include "ops_fixture.h"

namespace octet::test {
namespace {

class EpilogueTest : public OpsTest {
 protected:
  /// op(a)·op(b) + bias, in float64.
  static std::vector<double> product(const Matrix& a, const Matrix& b, bool transpose_b, const Matrix* bias) {
    const std::int64_t n = transpose_b ? b.rows : b.cols;
    std::vector<double> y;
    for (std::int64_t i = 0; i < a.rows; ++i) {
      for (std::int64_t j = 0; j < n; ++j) {
        double total = bias == nullptr ? 0.0 : (*bias)(0, j);
        for (std::int64_t p = 0; p < a.cols; ++p) {
          total += double{a(i, p)} * double{transpose_b ? b(j, p) : b(p, j)};
        }
        y.push_back(total);
      }
    }
    return y;
  }
  static Matrix rounded(std::int64_t rows, std::int64_t cols, const std::vector<double>& values) {
    Matrix matrix(rows, cols);
    std::transform(values.begin(), values.end(), matrix.values.begin(),
                   [](double x) { return static_cast<float>(x); });
    return matrix;
  }
};

constexpr double kScale = 0.7978845608028654, kCubic = 0.044715;  // sqrt(2/pi)

double gelu(double x) {
  return 0.5 * x * (1.0 + std::tanh(kScale * (x + kCubic * x * x * x)));
}

double gelu_slope(double x) {
  const double t = std::tanh(kScale * (x + kCubic * x * x * x));
  return 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * kScale * (1.0 + 3.0 * kCubic * x * x);
}

double sigmoid(double x) {
  return 1.0 / (1.0 + std::exp(-x));
}

struct Sizes {
  std::int64_t m, n, k;
};
// Widths that are no multiple of 8 are none that the library's epilogues take.
constexpr Sizes kSizes[] = {{1, 1, 1},      {5, 12, 7},     {64, 64, 64},
                            {33, 264, 100}, {300, 24, 520}, {40, 520, 192}};

TEST_P(EpilogueTest, ForwardProductEndsInTheGeluAndKeepsItsInput) {
  Workbench bench = this->bench();
  for (const auto& [m, n, k] : kSizes) {
    const double size = 1.0 / std::sqrt(static_cast<double>(k));
    for (const bool biased : {false, true}) {
      const Matrix x = random(m, k), w = random(n, k, size), bias = random(1, n);
      Matmul args{.a = bench.put(x), .b = bench.put(w), .transpose_b = true, .y = bench.blank(m, n)};
      args.epilogue = Epilogue::kGelu;
      args.inner = bench.blank(m, n);
      if (biased) args.bias = bench.put(bias);
      bench.ops().matmul(bench.stream(), args);
      std::vector<double> expected = product(x, w, true, biased ? &bias : nullptr);
      const std::string label = fmt::format("m {} n {} k {} bias {}", m, n, k, biased);
      EXPECT_TRUE(close(bench.get(args.inner), rounded(m, n, expected), tolerance(), 1.0)) << label;
      for (double& value : expected) value = gelu(value);
      EXPECT_TRUE(close(bench.get(args.y), rounded(m, n, expected), tolerance(), 1.0)) << label;
    }
  }
}

TEST_P(EpilogueTest, InputGradientEndsInTheGradientOfTheGelu) {
  Workbench bench = this->bench();
  for (const auto& [m, n, k] : kSizes) {
    const Matrix dy = random(m, k), w = random(k, n, 1.0 / std::sqrt(static_cast<double>(k)));
    const Matrix inner = random(m, n, 2.0);
    Matmul args{.a = bench.put(dy), .b = bench.put(w), .y = bench.blank(m, n)};
    args.epilogue = Epilogue::kGeluGradient;
    args.inner = bench.put(inner);
    bench.ops().matmul(bench.stream(), args);
    std::vector<double> expected = product(dy, w, false, nullptr);
    for (std::size_t i = 0; i < expected.size(); ++i) expected[i] *= gelu_slope(inner.values[i]);
    const std::string label = fmt::format("m {} n {} k {}", m, n, k);
    EXPECT_TRUE(close(bench.get(args.y), rounded(m, n, expected), tolerance(), 1.0)) << label;
    EXPECT_EQ(bench.get(args.inner).values, inner.values) << label;
  }
}

TEST_P(EpilogueTest, GradientOfTheGeluIsSummedOverTokensForTheBias) {
  Workbench bench = this->bench();
  for (const auto& [m, n, k] : kSizes) {
    const Matrix dy = random(m, k), w = random(k, n, 1.0 / std::sqrt(static_cast<double>(k)));
    const Matrix inner = random(m, n, 2.0), start = random(1, n, 3.0);
    for (const bool accumulate : {false, true}) {
      Matmul args{.a = bench.put(dy), .b = bench.put(w), .y = bench.blank(m, n)};
      args.epilogue = Epilogue::kGeluGradient;
      args.inner = bench.put(inner);
      args.bias_gradient = accumulate ? bench.put_float(start) : bench.blank_float(1, n);
      args.accumulate_bias_gradient = accumulate;
      bench.ops().matmul(bench.stream(), args);
      const Matrix expected = column_sums(bench.get(args.y), accumulate ? &start : nullptr);
      EXPECT_TRUE(close(bench.get(args.bias_gradient), expected, 1e-5, std::sqrt(static_cast<double>(m))))
          << fmt::format("m {} n {} k {} accumulate {}", m, n, k, accumulate);
    }
  }
}

TEST_P(EpilogueTest, ForwardProductEndsInTheSwigluAndKeepsGatesAndUps) {
  Workbench bench = this->bench();
  for (const auto& [m, f, k] : kSizes) {
    const Matrix x = random(m, k), w = random(2 * f, k, 1.0 / std::sqrt(static_cast<double>(k)));
    Matmul args{.a = bench.put(x), .b = bench.put(w), .transpose_b = true, .y = bench.blank(m, f)};
    args.epilogue = Epilogue::kSwiglu;
    args.inner = bench.blank(m, 2 * f);
    bench.ops().matmul(bench.stream(), args);
    const Matrix inner = rounded(m, 2 * f, product(x, w, true, nullptr));
    Matrix y(m, f);
    for (std::int64_t i = 0; i < m; ++i) {
      for (std::int64_t j = 0; j < f; ++j)
        y(i, j) = static_cast<float>(inner(i, j) * sigmoid(inner(i, j)) * inner(i, f + j));
    }
    const std::string label = fmt::format("m {} f {} k {}", m, f, k);
    EXPECT_TRUE(close(bench.get(args.inner), inner, tolerance(), 1.0)) << label;
    EXPECT_TRUE(close(bench.get(args.y), y, tolerance(), 1.0)) << label;
  }
}

TEST_P(EpilogueTest, InputGradientEndsInTheGradientOfTheSwigluAndItsOutput) {
  Workbench bench = this->bench();
  for (const auto& [m, f, k] : kSizes) {
    const Matrix dy = random(m, k), w = random(k, f, 1.0 / std::sqrt(static_cast<double>(k)));
    const Matrix inner = random(m, 2 * f);
    Matmul args{.a = bench.put(dy), .b = bench.put(w), .y = bench.blank(m, f)};
    args.epilogue = Epilogue::kSwigluGradient;
    args.inner = bench.put(inner);
    bench.ops().matmul(bench.stream(), args);
    const Matrix dout = rounded(m, f, product(dy, w, false, nullptr));
    Matrix y(m, f), dinner(m, 2 * f);
    for (std::int64_t i = 0; i < m; ++i) {
      for (std::int64_t j = 0; j < f; ++j) {
        const double gate = inner(i, j), up = inner(i, f + j), s = sigmoid(gate);
        y(i, j) = static_cast<float>(gate * s * up);
        dinner(i, j) = static_cast<float>(dout(i, j) * up * s * (1.0 + gate * (1.0 - s)));
        dinner(i, f + j) = static_cast<float>(dout(i, j) * gate * s);
      }
    }
    const std::string label = fmt::format("m {} f {} k {}", m, f, k);
    EXPECT_TRUE(close(bench.get(args.y), y, tolerance(), 1.0)) << label;
    const Matrix found = bench.get(args.inner);
    EXPECT_TRUE(close(found, dinner, tolerance(), 1.0)) << label;
    args.epilogue = Epilogue::kSwigluGradientAlone;
    args.inner = bench.put(inner);
    bench.ops().matmul(bench.stream(), args);
    EXPECT_EQ(bench.get(args.inner).values, found.values) << label;
  }
}

/// What timing chooses, another algorithm or kernels apart from the product, ends in the same way.
TEST_P(EpilogueTest, TimedProductsEndInTheSameWayAndAreRememberedBitwise) {
  PlanCache plans;
  Workbench timing(GetParam(), workload(), {.matmul_plans = &plans});
  const std::int64_t m = 96, n = 160, k = 256;
  const Matrix x = random(m, k), w = random(n, k, 1.0 / 16), bias = random(1, n), inner = random(m, n, 2.0);
  const Matrix dy = random(m, k), back = random(k, n, 1.0 / 16);
  const auto compute = [&](Workbench& bench) {
    Matmul forward{.a = bench.put(x), .b = bench.put(w), .transpose_b = true, .y = bench.blank(m, n)};
    forward.bias = bench.put(bias);
    forward.epilogue = Epilogue::kGelu;
    forward.inner = bench.blank(m, n);
    Matmul gradient{.a = bench.put(dy), .b = bench.put(back), .y = bench.blank(m, n)};
    gradient.epilogue = Epilogue::kGeluGradient;
    gradient.inner = bench.put(inner);
    Matmul weight{.a = bench.put(inner),
                  .b = bench.put(x),
                  .transpose_a = true,
                  .y = bench.put_float(Matrix(n, k)),
                  .accumulate = true};
    Results results;
    for (const Matmul& args : {forward, gradient, weight}) {
      bench.ops().matmul(bench.stream(), args);
      results.emplace_back("y", bench.get(args.y));
      if (args.epilogue == Epilogue::kGelu) results.emplace_back("inner", bench.get(args.inner));
    }
    return results;
  };
  const Results first = compute(timing);
  timing.ops().time_products(timing.stream());
  const Results timed = compute(timing);
  PlanCache remembered;
  ASSERT_TRUE(remembered.take(plans.added_text()));
  Workbench later(GetParam(), workload(), {.matmul_plans = &remembered});
  const Results again = compute(later);
  for (std::size_t i = 0; i < first.size(); ++i) {
    const double allowed = tolerance_of(first[i].second.dtype);
    EXPECT_TRUE(close(timed[i].second, first[i].second, allowed)) << first[i].first << " " << i;
    EXPECT_EQ(again[i].second.values, timed[i].second.values) << first[i].first << " " << i;
  }
  later.ops().time_products(later.stream());
  EXPECT_EQ(remembered.added(), 0u) << "a remembered product was timed again";
}

OCTET_TEST_BACKENDS_AND_TYPES(EpilogueTest);

}  // namespace
}  // namespace octet::test
