// Activations, bias gradients, casts, sums and fills.
#include "octet/base/rng.h"
#include "ops_fixture.h"

namespace octet::test {
namespace {

class ElementwiseTest : public OpsTest {};
class ElementwiseReferenceTest : public OpsTest {};
class ElementwisePrecisionTest : public OpsTest {};

Matrix run_forward(Workbench& bench, bool swiglu, const Matrix& x) {
  const Tensor out = bench.blank(x.rows, swiglu ? x.cols / 2 : x.cols);
  if (swiglu) {
    bench.ops().swiglu_forward(bench.stream(), bench.put(x), out, {});
  } else {
    bench.ops().gelu_forward(bench.stream(), bench.put(x), out, {});
  }
  return bench.get(out);
}

Results run_backward(Workbench& bench, bool swiglu, const Matrix& x, const Matrix& dy) {
  const Tensor in = bench.put(x), dout = bench.put(dy);
  if (swiglu) {
    bench.ops().swiglu_backward(bench.stream(), in, dout, {});
  } else {
    bench.ops().gelu_backward(bench.stream(), in, dout, {});
  }
  return {{"dx", bench.get(in)}, {"rebuilt y", bench.get(dout)}};
}

TEST_P(ElementwiseReferenceTest, ActivationsMatchPyTorch) {
  const ReferenceFile file("ops.ref");
  Workbench bench = this->bench();
  for (const bool swiglu : {false, true}) {
    const std::string name = swiglu ? "swiglu/" : "gelu/";
    EXPECT_TRUE(close(run_forward(bench, swiglu, file[name + "x"]), file[name + "y"], 1e-6)) << name;
    const Results results = run_backward(bench, swiglu, file[name + "x"], file[name + "dy"]);
    EXPECT_TRUE(close(results[0].second, file[name + "dx"], 1e-6)) << name;
    EXPECT_TRUE(close(results[1].second, file[name + "y"], 1e-6)) << name;
  }
}

TEST_P(ElementwiseReferenceTest, ActivationGradientsMatchCentralDifferences) {
  Workbench bench = this->bench();
  for (const bool swiglu : {false, true}) {
    const Matrix x = random(7, 46, 2.0), direction = random(7, 46), dy = random(7, swiglu ? 23 : 46);
    const Matrix dx = run_backward(bench, swiglu, x, dy)[0].second;
    const auto loss = [&](double step) {
      return dot(run_forward(bench, swiglu, moved(x, step, direction)), dy);
    };
    expect_slope(swiglu ? "swiglu" : "gelu", loss, dot(dx, direction), norm_of(dx));
  }
}

TEST_P(ElementwiseTest, ActivationsOfExtremeInputsAreTheirLimits) {
  Workbench bench = this->bench();
  Matrix x(1, 4);
  x.values = {-1000.0f, -90.0f, 0.0f, 1000.0f};
  const std::vector<float> limits{0.0f, 0.0f, 0.0f, 1000.0f};
  const auto near_limits = [&](const Matrix& y) {
    for (std::size_t i = 0; i < limits.size(); ++i) EXPECT_NEAR(y.values[i], limits[i], 1e-30) << x.values[i];
  };
  near_limits(run_forward(bench, false, x));
  Matrix gate_up(1, 8);
  gate_up.values = {-1000.0f, -90.0f, 0.0f, 1000.0f, 1.0f, 1.0f, 1.0f, 1.0f};
  near_limits(run_forward(bench, true, gate_up));
  for (const bool swiglu : {false, true}) {
    const Matrix dx = run_backward(bench, swiglu, swiglu ? gate_up : x, random(1, 4))[0].second;
    for (const float value : dx.values) EXPECT_TRUE(std::isfinite(value));
  }
}

TEST_P(ElementwisePrecisionTest, ActivationsAgreeWithReference) {
  constexpr std::int64_t kShapes[][2] = {{1, 2}, {5, 6}, {33, 64}, {7, 514}, {129, 1600}, {3, 11008}};
  for (const auto& [rows, cols] : kShapes) {
    for (const bool swiglu : {false, true}) {
      const Matrix x = random(rows, cols, 2.0), dy = random(rows, swiglu ? cols / 2 : cols);
      expect_like_reference(fmt::format("{} [{}, {}]", swiglu ? "swiglu" : "gelu", rows, cols),
                            [&](Workbench& bench) {
                              Results results = run_backward(bench, swiglu, x, dy);
                              results.emplace_back("y", run_forward(bench, swiglu, x));
                              return results;
                            });
    }
  }
}

TEST_P(ElementwiseTest, BiasGradientIsTheColumnSum) {
  constexpr std::int64_t kShapes[][2] = {{1, 1}, {3, 100}, {257, 3}, {130, 1600}, {1000, 257}, {17, 4097}};
  Workbench bench = this->bench();
  for (const auto& [rows, cols] : kShapes) {
    const Matrix dy = random(rows, cols), start = random(1, cols);
    for (const bool accumulate : {false, true}) {
      Matrix expected(1, cols);
      for (std::int64_t j = 0; j < cols; ++j) {
        double total = accumulate ? start(0, j) : 0.0;
        for (std::int64_t row = 0; row < rows; ++row) total += dy(row, j);
        expected(0, j) = static_cast<float>(total);
      }
      const Tensor dbias = accumulate ? bench.put_float(start) : bench.blank_float(1, cols);
      bench.ops().bias_backward(bench.stream(), bench.put(dy), dbias, accumulate);
      EXPECT_TRUE(close(bench.get(dbias), expected, 2e-6))
          << fmt::format("bias_backward [{}, {}] accumulate {}", rows, cols, accumulate);
    }
  }
}

TEST_P(ElementwiseTest, CastRoundsToNearestEven) {
  Workbench bench = this->bench();
  for (const std::int64_t count : {1, 3, 1000, 4099}) {
    Matrix x = random(1, count);
    const Tensor narrow = bench.blank(1, count), wide = bench.blank_float(1, count);
    bench.ops().cast(bench.stream(), bench.put_float(x), narrow);
    bench.ops().cast(bench.stream(), narrow, wide);
    if (compute() == DType::kBF16) {
      for (float& value : x.values) value = static_cast<float>(BF16(value));
    }
    EXPECT_EQ(bench.get(narrow).values, x.values) << count << " elements";
    EXPECT_EQ(bench.get(wide).values, x.values) << count << " elements";
  }
}

TEST_P(ElementwiseTest, AddSumsAcrossTypes) {
  Workbench bench = this->bench();
  const auto round = [&](float value) {
    return compute() == DType::kBF16 ? static_cast<float>(BF16(value)) : value;
  };
  for (const std::int64_t count : {1, 3, 1000, 4099}) {
    const Matrix a = random(1, count), b = random(1, count);
    Matrix exact(1, count), rounded(1, count);
    for (std::size_t i = 0; i < a.values.size(); ++i) {
      exact.values[i] = a.values[i] + b.values[i];
      rounded.values[i] = round(exact.values[i]);
    }
    for (const bool from_float : {false, true}) {
      for (const bool to_float : {false, true}) {
        const Tensor from = from_float ? bench.put_float(a) : bench.put(a);
        const Tensor to = to_float ? bench.put_float(b) : bench.put(b);
        bench.ops().add(bench.stream(), from, to);
        EXPECT_EQ(bench.get(to).values, (to_float ? exact : rounded).values)
            << fmt::format("add {} elements, {} to {}", count, name_of(from.dtype), name_of(to.dtype));
      }
    }
  }
}

TEST_P(ElementwiseTest, FillWritesEveryElement) {
  Workbench bench = this->bench();
  for (const std::int64_t count : {1, 7, 4099}) {
    const Tensor values = bench.blank(1, count);
    bench.ops().fill(bench.stream(), values, 0.75f);
    EXPECT_EQ(bench.get(values).values, std::vector<float>(static_cast<std::size_t>(count), 0.75f));
  }
}

TEST_P(ElementwiseTest, NormalFillOfAPartEqualsThePartOfTheWhole) {
  Workbench bench = this->bench();
  const std::uint64_t key = key_of(random_(), "layers.0.mlp.up.weight");
  const std::int64_t rows = 37, cols = 101;
  Matrix whole(rows, cols);
  for (std::int64_t i = 0; i < whole.size(); ++i) {
    whole.values[i] = 0.02f * normal_at(key, static_cast<std::uint64_t>(i));
  }
  const auto filled = [&](std::int64_t part_rows, std::int64_t part_cols, std::int64_t first) {
    const Tensor part = bench.blank_float(part_rows, part_cols);
    bench.ops().fill_normal(bench.stream(), part, 0.02f, key, first, cols);
    return bench.get(part);
  };
  EXPECT_TRUE(close(filled(rows, cols, 0), whole, 1e-6));
  const Matrix part = filled(10, 33, 5 * cols + 60);
  Matrix expected(10, 33);
  for (std::int64_t i = 0; i < 10; ++i) {
    for (std::int64_t j = 0; j < 33; ++j) expected(i, j) = whole(5 + i, 60 + j);
  }
  EXPECT_TRUE(close(part, expected, 1e-6));
}

OCTET_TEST_BACKENDS(ElementwiseReferenceTest);
OCTET_TEST_BACKENDS_AND_TYPES(ElementwiseTest);
OCTET_TEST_AGAINST_REFERENCE(ElementwisePrecisionTest);

}  // namespace
}  // namespace octet::test
