#include "ops_fixture.h"

namespace octet::test {
namespace {

class NormTest : public OpsTest {};
class NormPrecisionTest : public OpsTest {};

std::string name_of_norm(NormKind kind) {
  return kind == NormKind::kRms ? "rmsnorm" : "layernorm";
}
constexpr NormKind kKinds[] = {NormKind::kRms, NormKind::kLayer};

struct Operands {
  Matrix x, weight, bias;
};

struct Forward {
  Matrix y;
  Tensor x, weight, bias, rstd, mean;  ///< as backward takes them
};

Forward run_forward(Workbench& bench, NormKind kind, const Operands& in) {
  NormForward args;
  args.kind = kind;
  args.epsilon = 1e-5f;
  args.residual = bench.put(in.x);
  args.weight = bench.put(in.weight);
  args.y = bench.blank(in.x.rows, in.x.cols);
  args.rstd = bench.blank_float(1, in.x.rows);
  if (kind == NormKind::kLayer) {
    args.bias = bench.put(in.bias);
    args.mean = bench.blank_float(1, in.x.rows);
  }
  bench.ops().norm_forward(bench.stream(), args);
  return {bench.get(args.y), args.residual, args.weight, args.bias, args.rstd, args.mean};
}

/// dx starts from `dx_start`, dweight, dbias and with `sums` dx_sums from `parameter_start` where that is
/// given.
Results run_backward(Workbench& bench, NormKind kind, const Forward& forward, const Matrix& dy,
                     const Matrix& dx_start, const Matrix* parameter_start, bool y_in_place_of_dy,
                     bool sums = false, bool measured = false) {
  NormBackward args;
  args.kind = kind;
  args.x = forward.x;
  args.weight = forward.weight;
  args.bias = forward.bias;
  args.rstd = forward.rstd;
  args.mean = forward.mean;
  args.dy = bench.put(dy);
  args.dx = bench.put(dx_start);
  args.y = y_in_place_of_dy ? args.dy : bench.blank(dy.rows, dy.cols);
  args.accumulate = parameter_start != nullptr;
  const auto parameter_gradient = [&] {
    return args.accumulate ? bench.put_float(*parameter_start) : bench.blank_float(1, dy.cols);
  };
  args.dweight = parameter_gradient();
  if (kind == NormKind::kLayer) args.dbias = parameter_gradient();
  if (sums) args.dx_sums = parameter_gradient();
  if (measured && bench.compute() == DType::kBF16) args.largest = bench.put_float(Matrix(1, 1));
  bench.ops().norm_backward(bench.stream(), args);
  Results results{
      {"dx", bench.get(args.dx)}, {"dweight", bench.get(args.dweight)}, {"rebuilt y", bench.get(args.y)}};
  if (kind == NormKind::kLayer) results.emplace_back("dbias", bench.get(args.dbias));
  if (sums) results.emplace_back("dx_sums", bench.get(args.dx_sums));
  return results;
}

TEST_P(NormTest, MatchesPyTorch) {
  const ReferenceFile file("ops.ref");
  for (const NormKind kind : kKinds) {
    Workbench bench = this->bench();
    const std::string name = name_of_norm(kind);
    const auto recorded = [&](const std::string& entry) { return Matrix(file[name + "/" + entry]); };
    const Operands in{recorded("x"), recorded("weight"), recorded("bias")};
    const Forward forward = run_forward(bench, kind, in);
    EXPECT_TRUE(close(forward.y, recorded("y"), 2e-6)) << name;
    const Matrix zeros(in.x.rows, in.x.cols);
    for (const auto& [entry, actual] :
         run_backward(bench, kind, forward, recorded("dy"), zeros, nullptr, false)) {
      EXPECT_TRUE(close(actual, recorded(entry == "rebuilt y" ? "y" : entry), 2e-6)) << name << " " << entry;
    }
  }
}

TEST_P(NormTest, GradientsMatchCentralDifferences) {
  for (const NormKind kind : kKinds) {
    Workbench bench = this->bench();
    const Operands in{random(6, 40), random(1, 40), random(1, 40)};
    const Operands direction{random(6, 40), random(1, 40), random(1, 40)};
    const Matrix dy = random(6, 40);
    const Forward forward = run_forward(bench, kind, in);
    const Results gradients = run_backward(bench, kind, forward, dy, Matrix(6, 40), nullptr, false);
    double slope = 0.0, scale = 0.0;
    for (const auto& [entry, gradient] : gradients) {
      if (entry == "rebuilt y") continue;
      slope += dot(gradient, entry == "dx"        ? direction.x
                             : entry == "dweight" ? direction.weight
                                                  : direction.bias);
      scale += norm_of(gradient);
    }
    const auto loss = [&](double step) {
      const Operands there{moved(in.x, step, direction.x), moved(in.weight, step, direction.weight),
                           moved(in.bias, step, direction.bias)};
      return dot(run_forward(bench, kind, there).y, dy);
    };
    expect_slope(name_of_norm(kind), loss, slope, scale);
  }
}

TEST_P(NormTest, SumOfResidualAndDeltaIsNormalised) {
  const ReferenceFile file("ops.ref");
  for (const NormKind kind : kKinds) {
    Workbench bench = this->bench();
    const std::string name = name_of_norm(kind);
    const auto put = [&](const std::string& entry) { return bench.put(Matrix(file[name + "/" + entry])); };
    NormForward args;
    args.kind = kind;
    args.residual = put("residual");
    args.delta = put("delta");
    args.weight = put("weight");
    args.sum = bench.blank(5, 37);
    args.y = bench.blank(5, 37);
    args.rstd = bench.blank_float(1, 5);
    if (kind == NormKind::kLayer) {
      args.bias = put("bias");
      args.mean = bench.blank_float(1, 5);
    }
    bench.ops().norm_forward(bench.stream(), args);
    EXPECT_EQ(bench.get(args.sum).values, Matrix(file[name + "/x"]).values) << name;
    EXPECT_TRUE(close(bench.get(args.y), file[name + "/y"], 2e-6)) << name;
  }
}

TEST_P(NormPrecisionTest, AgreesWithReferenceInEveryWidth) {
  constexpr std::int64_t kWidths[] = {1, 3, 64, 100, 257, 1600, 4096, 8192};
  for (const NormKind kind : kKinds) {
    for (const std::int64_t cols : kWidths) {
      if (kind == NormKind::kLayer && cols == 1)
        continue;  // a variance of zero: y is the bias, rstd is large
      const std::int64_t rows = cols > 1000 ? 13 : 133;
      const Operands in{random(rows, cols, 1.0, 0.2), random(1, cols), random(1, cols)};
      const Matrix dy = random(rows, cols), dx = random(rows, cols), start = random(1, cols, 4.0);
      for (const bool accumulate : {false, true}) {
        expect_like_reference(
            fmt::format("{} [{}, {}] accumulate {}", name_of_norm(kind), rows, cols, accumulate),
            [&](Workbench& bench) {
              const Forward forward = run_forward(bench, kind, in);
              Results results =
                  run_backward(bench, kind, forward, dy, dx, accumulate ? &start : nullptr, accumulate);
              results.emplace_back("y", forward.y);
              results.emplace_back("rstd", bench.get(forward.rstd));
              if (kind == NormKind::kLayer) results.emplace_back("mean", bench.get(forward.mean));
              return results;
            });
      }
    }
  }
}

TEST_P(NormPrecisionTest, GradientsOfMoreRowsThanAGpuTakesAtATimeAgreeWithReference) {
  constexpr std::int64_t kShapes[][2] = {{3300, 16}, {1100, 800}};
  for (const auto& [rows, cols] : kShapes) {
    const NormKind kind = cols == 16 ? NormKind::kLayer : NormKind::kRms;
    const Operands in{random(rows, cols, 1.0, 0.2), random(1, cols), random(1, cols)};
    const Matrix dy = random(rows, cols), dx = random(rows, cols);
    expect_like_reference(fmt::format("{} [{}, {}]", name_of_norm(kind), rows, cols), [&](Workbench& bench) {
      return run_backward(bench, kind, run_forward(bench, kind, in), dy, dx, nullptr, true);
    });
  }
}

TEST_P(NormPrecisionTest, ColumnsOfTheStreamsGradientAreSummedAsItComesIn) {
  struct Shape {
    std::int64_t rows, cols;
  };
  constexpr Shape kShapes[] = {{3300, 16}, {133, 100}, {19, 257}, {70, 768}, {140, 1600}, {3, 8200}};
  for (const NormKind kind : kKinds) {
    for (const auto& [rows, cols] : kShapes) {
      const Operands in{random(rows, cols, 1.0, 0.2), random(1, cols), random(1, cols)};
      const Matrix dy = random(rows, cols), dx = random(rows, cols), start = random(1, cols, 4.0);
      for (const bool accumulate : {false, true}) {
        const std::string label =
            fmt::format("{} [{}, {}] accumulate {}", name_of_norm(kind), rows, cols, accumulate);
        expect_like_reference(label, [&](Workbench& bench) {
          const Forward forward = run_forward(bench, kind, in);
          return run_backward(bench, kind, forward, dy, dx, accumulate ? &start : nullptr, true, true,
                              accumulate);
        });
      }
    }
  }
}

TEST_P(NormPrecisionTest, SumIsRoundedBeforeItIsNormalised) {
  Workbench bench = this->bench();
  const Matrix residual = random(7, 96), delta = random(7, 96, 0.01);
  NormForward args;
  args.epsilon = 0.0f;
  args.residual = bench.put(residual);
  args.delta = bench.put(delta);
  args.weight = bench.put(random(1, 96));
  args.sum = bench.blank(7, 96);
  args.y = bench.blank(7, 96);
  args.rstd = bench.blank_float(1, 7);
  bench.ops().norm_forward(bench.stream(), args);
  const Matrix sum = bench.get(args.sum);
  Matrix rstd(1, 7);
  for (std::int64_t row = 0; row < 7; ++row) {
    double square = 0.0;
    for (std::int64_t j = 0; j < 96; ++j) {
      const float exact = residual(row, j) + delta(row, j);
      EXPECT_EQ(sum(row, j), compute() == DType::kF32 ? exact : static_cast<float>(BF16(exact)));
      square += double{sum(row, j)} * double{sum(row, j)};
    }
    rstd(0, row) = static_cast<float>(1.0 / std::sqrt(square / 96.0));
  }
  EXPECT_TRUE(close(bench.get(args.rstd), rstd, 2e-6));
}

OCTET_TEST_BACKENDS(NormTest);
OCTET_TEST_AGAINST_REFERENCE(NormPrecisionTest);

}  // namespace
}  // namespace octet::test
