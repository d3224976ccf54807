// Gradient norm, clipping, skipped steps and AdamW.
#include <limits>

#include "ops_fixture.h"

namespace octet::test {
namespace {

class OptimizerReferenceTest : public OpsTest {};
class OptimizerTest : public OpsTest {};

constexpr float kBeta1 = 0.9f, kBeta2 = 0.95f;

StepScalars finish(Workbench& bench, const StepScalars& before, const Matrix& rates, float clip) {
  StepScalars* const scalars = bench.put_scalars(before);
  bench.ops().finish_step(bench.stream(), scalars, bench.put_float(rates), clip, kBeta1, kBeta2);
  return bench.get_scalars(scalars);
}

Matrix ten_rates() {
  Matrix rates(1, 10);
  for (int i = 0; i < 10; ++i) rates.values[i] = 0.01f * static_cast<float>(i + 1);
  return rates;
}

Adamw put_adamw(Workbench& bench, const Matrix& master, const Matrix& first, const Matrix& second) {
  Adamw args;
  args.master = bench.put_float(master);
  args.first_moment = bench.put_float(first);
  args.second_moment = bench.put_float(second);
  args.parameter = bench.blank(1, master.cols);
  args.beta1 = kBeta1;
  args.beta2 = kBeta2;
  args.epsilon = 1e-8f;
  args.weight_decay = 0.1f;
  return args;
}

TEST_P(OptimizerReferenceTest, ThreeClippedStepsMatchPyTorch) {
  const ReferenceFile file("ops.ref");
  Workbench bench = this->bench();
  const Matrix zeros(1, 40);
  Adamw args = put_adamw(bench, file["adamw/initial"], zeros, zeros);
  const Tensor rates = bench.put_float(ten_rates());
  StepScalars* scalars = bench.put_scalars({});
  for (int step = 0; step < 3; ++step) {
    args.gradient = bench.put_float(file[fmt::format("adamw/gradient{}", step)]);
    StepScalars next = bench.get_scalars(scalars);
    next.tokens = 8.0;
    next.gradient_square = 0.0;
    scalars = bench.put_scalars(next);
    bench.ops().add_square(bench.stream(), args.gradient, scalars);
    bench.ops().finish_step(bench.stream(), scalars, rates, 1.0f, kBeta1, kBeta2);
    bench.ops().adamw(bench.stream(), args, scalars);
    EXPECT_NEAR(bench.get_scalars(scalars).gradient_norm, file["adamw/norms"].values[step], 1e-5)
        << "step " << step;
  }
  EXPECT_TRUE(close(bench.get(args.master), file["adamw/updated"], 1e-6));
  EXPECT_EQ(bench.get(args.parameter).values, bench.get(args.master).values);
}

TEST_P(OptimizerTest, SquaresAddUpInDoublePrecision) {
  Workbench bench = this->bench();
  for (const std::int64_t count : {1, 3, 257, 100003, 3000000}) {
    const Matrix x = random(1, count);
    StepScalars* const scalars = bench.put_scalars({.gradient_square = 5.0});
    bench.ops().add_square(bench.stream(), bench.put_float(x), scalars);
    const double expected = 5.0 + dot(x, x);
    EXPECT_NEAR(bench.get_scalars(scalars).gradient_square, expected, 1e-9 * expected)
        << count << " elements";
  }
}

TEST_P(OptimizerTest, NormAboveTheLimitIsClippedToIt) {
  Workbench bench = this->bench();
  const StepScalars before{
      .loss = 12.0, .tokens = 8.0, .gradient_square = 6400.0};  // the mean gradient has norm 10
  const StepScalars clipped = finish(bench, before, ten_rates(), 2.0f);
  EXPECT_FLOAT_EQ(clipped.gradient_norm, 10.0f);
  EXPECT_FLOAT_EQ(clipped.gradient_scale, 0.2f / 8.0f);
  EXPECT_FLOAT_EQ(finish(bench, before, ten_rates(), 16.0f).gradient_scale, 1.0f / 8.0f);
  EXPECT_FLOAT_EQ(finish(bench, before, ten_rates(), 0.0f).gradient_scale, 1.0f / 8.0f)
      << "0 means no clipping";
}

TEST_P(OptimizerTest, UpdatesChooseTheRateAndTheBiasCorrections) {
  Workbench bench = this->bench();
  StepScalars scalars{.loss = 1.0, .tokens = 1.0, .gradient_square = 1.0};
  for (const int done : {0, 3, 9, 10, 5000}) {
    scalars.updates = done;
    const StepScalars after = finish(bench, scalars, ten_rates(), 1.0f);
    EXPECT_EQ(after.updates, done + 1);
    EXPECT_EQ(after.skip, 0);
    EXPECT_EQ(after.learning_rate, ten_rates().values[std::min(done, 9)]) << done << " updates";
    EXPECT_NEAR(after.bias_correction1, 1.0 - std::pow(double{kBeta1}, done + 1), 1e-6) << done << " updates";
    EXPECT_NEAR(after.bias_correction2, 1.0 - std::pow(double{kBeta2}, done + 1), 1e-6) << done << " updates";
  }
}

TEST_P(OptimizerTest, StepsWithoutTokensOrFiniteNumbersAreSkipped) {
  Workbench bench = this->bench();
  const double infinity = std::numeric_limits<double>::infinity(), nan = std::nan("");
  const StepScalars bad[] = {{.loss = 0.0, .tokens = 0.0, .gradient_square = 0.0},
                             {.loss = 1.0, .tokens = 4.0, .gradient_square = infinity},
                             {.loss = 1.0, .tokens = 4.0, .gradient_square = nan},
                             {.loss = nan, .tokens = 4.0, .gradient_square = 1.0}};
  const Matrix master = random(1, 300), first = random(1, 300), second = random(1, 300, 0.1, 1.0);
  for (StepScalars scalars : bad) {
    scalars.updates = 7;
    const StepScalars after = finish(bench, scalars, ten_rates(), 1.0f);
    EXPECT_EQ(after.skip, 1) << "loss " << scalars.loss << " tokens " << scalars.tokens << " square "
                             << scalars.gradient_square;
    EXPECT_EQ(after.updates, 7);

    Adamw args = put_adamw(bench, master, first, second);
    args.parameter = bench.put(first);
    args.gradient = bench.put_float(random(1, 300));
    bench.ops().adamw(bench.stream(), args, bench.put_scalars(after));
    Matrix rounded = first;
    if (compute() == DType::kBF16) {
      for (float& value : rounded.values) value = static_cast<float>(BF16(value));
    }
    EXPECT_EQ(bench.get(args.master).values, master.values);
    EXPECT_EQ(bench.get(args.first_moment).values, first.values);
    EXPECT_EQ(bench.get(args.second_moment).values, second.values);
    EXPECT_EQ(bench.get(args.parameter).values, rounded.values);
  }
  const StepScalars good{.loss = 1.0, .tokens = 4.0, .gradient_square = 1.0, .skip = 1};
  EXPECT_EQ(finish(bench, good, ten_rates(), 1.0f).skip, 0) << "the verdict of an earlier step stays";
}

TEST_P(OptimizerTest, AdamwFollowsItsFormula) {
  Workbench bench = this->bench();
  StepScalars s{.gradient_scale = 0.125f,
                .learning_rate = 0.01f,
                .bias_correction1 = 0.271f,
                .bias_correction2 = 0.142f};
  for (const std::int64_t count : {1, 3, 257, 4096, 100001}) {
    for (const float decay : {0.0f, 0.1f}) {
      const Matrix master = random(1, count), first = random(1, count), second = random(1, count, 0.1, 1.0);
      const Matrix gradient = random(1, count, 8.0);
      Adamw args = put_adamw(bench, master, first, second);
      args.gradient = bench.put_float(gradient);
      args.weight_decay = decay;
      bench.ops().adamw(bench.stream(), args, bench.put_scalars(s));

      Matrix new_master(1, count), new_first(1, count), new_second(1, count);
      for (std::size_t i = 0; i < master.values.size(); ++i) {
        const double g = 0.125 * gradient.values[i];
        const double m = 0.9 * first.values[i] + 0.1 * g, v = 0.95 * second.values[i] + 0.05 * g * g;
        const double direction = m / 0.271 / (std::sqrt(v / 0.142) + 1e-8);
        new_first.values[i] = static_cast<float>(m);
        new_second.values[i] = static_cast<float>(v);
        new_master.values[i] =
            static_cast<float>(master.values[i] - 0.01 * (direction + double{decay} * master.values[i]));
      }
      const std::string label = fmt::format("adamw: {} elements, weight decay {}", count, decay);
      EXPECT_TRUE(close(bench.get(args.master), new_master, 2e-6, 1.0)) << label;
      EXPECT_TRUE(close(bench.get(args.first_moment), new_first, 2e-6, 1.0)) << label;
      EXPECT_TRUE(close(bench.get(args.second_moment), new_second, 2e-6)) << label;
      Matrix rounded = bench.get(args.master);
      if (compute() == DType::kBF16) {
        for (float& value : rounded.values) value = static_cast<float>(BF16(value));
      }
      EXPECT_EQ(bench.get(args.parameter).values, rounded.values)
          << label << ": parameter is the rounded master";
    }
  }
}

OCTET_TEST_BACKENDS(OptimizerReferenceTest);
OCTET_TEST_BACKENDS_AND_TYPES(OptimizerTest);

}  // namespace
}  // namespace octet::test
