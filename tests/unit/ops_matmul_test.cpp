#include "octet/ops/plan_cache.h"
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
      const double rms = std::sqrt(static_cast<double>(s.k)), allowed = float_output ? 1e-5 : tolerance();
      const std::string label =
          fmt::format("matmul m {} n {} k {} transpose_a {} transpose_b {} accumulate {} bias {} output {}",
                      s.m, s.n, s.k, transpose_a, transpose_b, accumulate, with_bias, name_of(args.y.dtype));
      EXPECT_TRUE(close(bench.get(args.y), expected, allowed, rms)) << label;
      if (!accumulate) continue;
      args.accumulate = false;
      args.addend = output();
      args.y = float_output ? bench.blank_float(s.m, s.n) : bench.blank(s.m, s.n);
      bench.ops().matmul(bench.stream(), args);
      EXPECT_TRUE(close(bench.get(args.y), expected, allowed, rms)) << label << ", from an addend";
    }
  }
}

TEST_P(MatmulTest, TimedPlansComputeTheSameProductsAndAreRememberedBitwise) {
  PlanCache plans;
  Workbench timing(GetParam(), workload(), {.matmul_plans = &plans});
  const Sizes s{96, 160, 520};
  struct Form {
    Matrix a, b, bias, start;
    bool transpose_a, accumulate;
  };
  std::vector<Form> forms;
  for (int form = 0; form < 4; ++form) {
    const bool transpose_a = form & 1;
    forms.push_back({transpose_a ? random(s.k, s.m) : random(s.m, s.k), random(s.k, s.n), random(1, s.n),
                     random(s.m, s.n), transpose_a, (form & 2) != 0});
  }
  const auto compute = [&](Workbench& bench) {
    std::vector<Matrix> results;
    for (const Form& form : forms) {
      const Tensor y = form.accumulate ? bench.put_float(form.start) : bench.blank(s.m, s.n);
      Matmul args{bench.put(form.a), bench.put(form.b), form.transpose_a, false, y, form.accumulate, {}};
      if (!form.accumulate) args.bias = bench.put(form.bias);
      bench.ops().matmul(bench.stream(), args);
      results.push_back(bench.get(y));
    }
    return results;
  };
  compute(timing);
  timing.ops().time_products(timing.stream());
  const std::vector<Matrix> timed = compute(timing);
  for (std::size_t i = 0; i < forms.size(); ++i) {
    const Form& form = forms[i];
    const Matrix expected =
        expected_product(form.a, form.transpose_a, form.b, false, form.accumulate ? nullptr : &form.bias,
                         form.accumulate ? &form.start : nullptr, s);
    EXPECT_TRUE(close(timed[i], expected, form.accumulate ? 1e-5 : tolerance(), std::sqrt(520.0)));
  }
  const std::string chosen = plans.added_text();
  if (GetParam().device == DeviceKind::kCuda) {
    EXPECT_EQ(plans.added(), forms.size());
  }

  PlanCache remembered;
  ASSERT_TRUE(remembered.take(chosen));
  Workbench later(GetParam(), workload(), {.matmul_plans = &remembered});
  const std::vector<Matrix> again = compute(later);
  for (std::size_t i = 0; i < forms.size(); ++i) EXPECT_EQ(again[i].values, timed[i].values);
  later.ops().time_products(later.stream());
  EXPECT_EQ(remembered.added(), 0u) << "a remembered product was timed again";
}

TEST_P(MatmulTest, DamagedPlanIsForgotten) {
  PlanCache timed;
  Workbench bench(GetParam(), workload(), {.matmul_plans = &timed});
  const Matrix a = random(64, 128), b = random(128, 64);
  const auto compute = [&](Workbench& on) {
    const Tensor y = on.blank(64, 64);
    on.ops().matmul(on.stream(), {.a = on.put(a), .b = on.put(b), .y = y});
    return on.get(y);
  };
  compute(bench);
  bench.ops().time_products(bench.stream());
  // The same keys with plans that are no algorithm at all.
  std::string text = timed.added_text();
  for (std::size_t at = text.find("\"plan\": \""); at != std::string::npos;
       at = text.find("\"plan\": \"", at)) {
    at += 9;
    while (text[at] != '"') text[at++] = 'f';
  }
  PlanCache damaged;
  ASSERT_TRUE(damaged.take(text));
  Workbench again(GetParam(), workload(), {.matmul_plans = &damaged});
  EXPECT_TRUE(close(compute(again), expected_product(a, false, b, false, nullptr, nullptr, {64, 64, 128}),
                    tolerance(), std::sqrt(128.0)));
  again.ops().time_products(again.stream());
  EXPECT_EQ(damaged.added(), timed.added());
}

OCTET_TEST_BACKENDS_AND_TYPES(MatmulTest);

}  // namespace
}  // namespace octet::test
