// 8-bit copies of matrices, their scales and their products.
#include <cmath>
#include <limits>

#include "ops_fixture.h"

namespace octet::test {
namespace {

class Float8Test : public OpsTest {
 protected:
  struct Copies {
    Tensor codes, transposed;
    Scales scales, transposed_scales;
  };
  static Tensor largest_in(Workbench& bench, const Tensor& from) {
    const Tensor largest = bench.blank_float(1, 1);
    bench.ops().largest_magnitude(bench.stream(), from, largest);
    return largest;
  }
  static Copies quantized(Workbench& bench, const Tensor& from, DType type, ScaleCut cut) {
    const auto scales = [&](std::int64_t rows, std::int64_t cols) {
      const Tensor shape = scale_shape(cut, rows, cols);
      return Scales{bench.blank_float(shape.rows, shape.cols), cut};
    };
    Copies copies{bench.blank(from.rows, from.cols, type), bench.blank(from.cols, from.rows, type),
                  scales(from.rows, from.cols), scales(from.cols, from.rows)};
    Quantize args;
    args.from = from;
    if (cut == ScaleCut::kTensor) args.largest = largest_in(bench, from);
    args.codes = copies.codes;
    args.scales = copies.scales;
    args.transposed = copies.transposed;
    args.transposed_scales = copies.transposed_scales;
    bench.ops().quantize(bench.stream(), args);
    return copies;
  }
  /// What codes and scales stand for, where a scale serves element (row, col) as the cut says.
  static Matrix meant(Workbench& bench, const Tensor& codes, const Scales& scales) {
    Matrix result = bench.get(codes);
    const Matrix factors = bench.get(scales.values);
    for (std::int64_t row = 0; row < result.rows; ++row) {
      for (std::int64_t col = 0; col < result.cols; ++col) {
        float factor = factors(0, 0);
        if (scales.cut == ScaleCut::kRow128) factor = factors(col / 128, row);
        if (scales.cut == ScaleCut::kSquare128) factor = factors(row / 128, col / 128);
        result(row, col) *= factor;
      }
    }
    return result;
  }
  /// Rows of very different sizes, as activations have them.
  Matrix uneven(std::int64_t rows, std::int64_t cols) {
    Matrix matrix = random(rows, cols);
    for (std::int64_t row = 0; row < rows; ++row) {
      for (std::int64_t col = 0; col < cols; ++col) {
        matrix(row, col) = std::ldexp(matrix(row, col), static_cast<int>((row * 7 + col / 16) % 9) - 12);
      }
    }
    return matrix;
  }
};

constexpr ScaleCut kCuts[] = {ScaleCut::kTensor, ScaleCut::kRow128, ScaleCut::kSquare128};

TEST_P(Float8Test, LargestMagnitudeIsExact) {
  Workbench bench = this->bench();
  for (const auto& [rows, cols] : {std::pair{16, 16}, {48, 272}, {1024, 512}}) {
    Matrix x = random(rows, cols);
    const auto size = static_cast<std::size_t>(x.size());
    for (const std::size_t at : {std::size_t{0}, size / 2 + 5, size - 1}) {
      x.values[at] = -100.5f - static_cast<float>(at % 7);
      EXPECT_EQ(bench.get(largest_in(bench, bench.put(x)))(0, 0),
                std::fabs(*std::min_element(x.values.begin(), x.values.end())));
    }
    EXPECT_EQ(bench.get(largest_in(bench, bench.put(Matrix(rows, cols))))(0, 0), 0.0f);
  }
}

TEST_P(Float8Test, ProducersMeasureWhatTheyWriteAndWriteTheSame) {
  Workbench bench = this->bench();
  const auto check = [&](const std::string& what, const std::function<Tensor(Tensor)>& produce) {
    const Matrix alone = bench.get(produce({}));
    const Tensor largest = bench.put_float(Matrix(1, 1));
    const Matrix measured = bench.get(produce(largest));
    float expected = 0.0f;
    for (std::size_t i = 0; i < alone.values.size(); ++i) {
      const float value = alone.values[i];
      if (std::isnan(value)) {
        EXPECT_TRUE(std::isnan(measured.values[i])) << what;
        continue;
      }
      EXPECT_EQ(measured.values[i], value) << what;
      expected = std::max(expected, std::fabs(value));
    }
    EXPECT_EQ(bench.get(largest)(0, 0), expected) << what;
    Matrix larger(1, 1);
    larger(0, 0) = 2.0f * expected + 1.0f;
    const Tensor raised = bench.put_float(larger);
    produce(raised);
    EXPECT_EQ(bench.get(raised)(0, 0), larger(0, 0)) << what;
  };
  constexpr std::int64_t kShapes[][2] = {{1, 2}, {133, 64}, {6, 37}, {130, 264}, {13, 1600}, {3, 8192}};
  for (const auto& [t, h] : kShapes) {
    const std::int64_t rows = t, cols = h;
    Matrix x = random(rows, cols, 2.0), gate_up = random(rows, 2 * cols, 2.0);
    const Matrix dy = random(rows, cols), dx = random(rows, cols);
    const Matrix weight = random(1, cols), bias = random(1, cols);
    x.values.back() = gate_up.values.front() = std::numeric_limits<float>::quiet_NaN();
    const auto name = [&](const char* what) { return fmt::format("{} [{}, {}]", what, rows, cols); };
    Stream& stream = bench.stream();
    Ops& ops = bench.ops();
    check(name("swiglu"), [&](Tensor largest) {
      const Tensor out = bench.blank(rows, cols);
      ops.swiglu_forward(stream, bench.put(gate_up), out, largest);
      return out;
    });
    check(name("swiglu gradient"), [&](Tensor largest) {
      const Tensor in = bench.put(gate_up);
      ops.swiglu_backward(stream, in, bench.put(dy), largest);
      return in;
    });
    check(name("gelu"), [&](Tensor largest) {
      const Tensor out = bench.blank(rows, cols);
      ops.gelu_forward(stream, bench.put(x), out, largest);
      return out;
    });
    check(name("gelu gradient"), [&](Tensor largest) {
      const Tensor in = bench.put(x);
      ops.gelu_backward(stream, in, bench.put(dy), largest);
      return in;
    });
    for (const NormKind kind : {NormKind::kRms, NormKind::kLayer}) {
      const bool layer = kind == NormKind::kLayer;
      NormForward forward;
      forward.kind = kind;
      forward.residual = bench.put(x);
      forward.weight = bench.put(weight);
      if (layer) forward.bias = bench.put(bias);
      forward.y = bench.blank(rows, cols);
      forward.rstd = bench.blank_float(1, rows);
      if (layer) forward.mean = bench.blank_float(1, rows);
      check(name(layer ? "layernorm" : "rmsnorm"), [&](Tensor largest) {
        forward.largest = largest;
        ops.norm_forward(stream, forward);
        return forward.y;
      });
      NormBackward backward;
      backward.kind = kind;
      backward.x = forward.residual;
      backward.weight = forward.weight;
      backward.bias = forward.bias;
      backward.rstd = forward.rstd;
      backward.mean = forward.mean;
      backward.dweight = bench.blank_float(1, cols);
      if (layer) backward.dbias = bench.blank_float(1, cols);
      check(name(layer ? "layernorm gradient" : "rmsnorm gradient"), [&](Tensor largest) {
        backward.dy = backward.y = bench.put(dy);
        backward.dx = bench.put(dx);
        backward.largest = largest;
        ops.norm_backward(stream, backward);
        return backward.dx;
      });
    }
  }
}

TEST_P(Float8Test, CopiesAreTheRoundedElementsWhateverTheCut) {
  Workbench bench = this->bench();
  for (const DType type : {DType::kE4M3, DType::kE5M2}) {
    for (const ScaleCut cut : kCuts) {
      for (const auto& [rows, cols] : {std::pair{16, 16}, {64, 144}, {272, 128}, {256, 400}}) {
        const Matrix x = uneven(rows, cols);
        const Copies copies = quantized(bench, bench.put(x), type, cut);
        const Matrix straight = meant(bench, copies.codes, copies.scales);
        const Matrix turned = meant(bench, copies.transposed, copies.transposed_scales);
        const double step = type == DType::kE4M3 ? 1.0 / 16.0 : 1.0 / 8.0;  // half a unit of the mantissa
        const double least =
            type == DType::kE4M3 ? 0x1p-18 : 0x1p-32;  // of what is largest: half a subnormal step
        const double largest = 8.0;
        for (std::int64_t row = 0; row < rows; ++row) {
          for (std::int64_t col = 0; col < cols; ++col) {
            const double bound = step * std::fabs(double{x(row, col)}) + least * largest;
            ASSERT_NEAR(straight(row, col), x(row, col), bound)
                << name_of(type) << " cut " << static_cast<int>(cut);
            ASSERT_NEAR(turned(col, row), x(row, col), bound)
                << name_of(type) << " cut " << static_cast<int>(cut);
          }
        }
      }
    }
  }
}

TEST_P(Float8Test, PartsOfAMatrixNeedNotAgreeOnAScale) {
  Workbench bench = this->bench();
  Matrix x = random(32, 64);
  for (float& value : x.values) value = std::copysign(std::max(std::fabs(value), 1e-2f), value);
  for (float& value : x.values) value = static_cast<float>(BF16(value));
  Matrix upper(16, 64);
  std::copy_n(x.values.begin(), upper.values.size(), upper.values.begin());
  x(31, 63) = 64.0f;  // the whole has another scale than its upper half
  const Copies whole = quantized(bench, bench.put(x), DType::kE4M3, ScaleCut::kTensor);
  const Copies part = quantized(bench, bench.put(upper), DType::kE4M3, ScaleCut::kTensor);
  EXPECT_NE(bench.get(whole.scales.values).values, bench.get(part.scales.values).values);
  const Matrix all = meant(bench, whole.codes, whole.scales), some = meant(bench, part.codes, part.scales);
  for (std::size_t i = 0; i < some.values.size(); ++i) EXPECT_EQ(all.values[i], some.values[i]);
}

TEST_P(Float8Test, LargestMagnitudeOfEarlierStepsLimitsAndThatOfThisOneIsSeen) {
  Workbench bench = this->bench();
  Matrix x = random(32, 48), history(1, 1), seen(1, 1);
  x(3, 5) = 1000.0f;
  history(0, 0) = 7.0f;  // scale 2^-6
  seen(0, 0) = 12.0f;
  Quantize args;
  args.from = bench.put(x);
  args.largest = bench.put_float(history);
  args.seen = bench.put_float(seen);
  args.codes = bench.blank(32, 48, DType::kE4M3);
  args.scales.values = bench.blank_float(1, 1);
  bench.ops().quantize(bench.stream(), args);
  EXPECT_EQ(bench.get(args.scales.values)(0, 0), 0x1p-6f);
  EXPECT_EQ(meant(bench, args.codes, args.scales)(3, 5), 7.0f);
  EXPECT_EQ(bench.get(args.seen)(0, 0), 1000.0f);
  bench.ops().quantize(bench.stream(), args);
  EXPECT_EQ(bench.get(args.largest)(0, 0), 7.0f);
}

/// What a rank has of a weight is a run of it; its master is float32.
TEST_P(Float8Test, RunsOfAMatrixGetTheCodesOfTheWhole) {
  Workbench bench = this->bench();
  constexpr std::int64_t kRows = 80, kCols = 144, kSize = kRows * kCols;
  Matrix x = random(kRows, kCols);
  x(70, 9) = -50.0f;
  for (float& value : x.values) value += 1e-4f * value;  // no bfloat16 numbers
  const Tensor master = bench.put_float(x), whole = bench.put(x);
  const Tensor largest = largest_in(bench, whole);
  EXPECT_EQ(bench.get(largest_in(bench, master)).values, bench.get(largest).values);
  const Copies expected = quantized(bench, whole, DType::kE4M3, ScaleCut::kTensor);
  const Matrix codes = bench.get(expected.codes), scale = bench.get(expected.scales.values);
  for (const Tensor& from : {master, whole}) {
    const Tensor parts = bench.blank(1, kSize, DType::kE4M3);
    // Ends lie within rows.
    for (const auto& [begin, end] : {std::pair{0, 64}, {64, 64}, {64, 4160}, {4160, 11520}}) {
      Quantize args;
      args.from = from.range(begin, end - begin);
      args.largest = largest;
      args.codes = parts.range(begin, end - begin);
      args.scales.values = bench.blank_float(1, 1);
      bench.ops().quantize(bench.stream(), args);
      EXPECT_EQ(bench.get(args.scales.values).values, scale.values) << begin;
    }
    EXPECT_EQ(bench.get(parts).values, codes.values) << name_of(from.dtype);
  }
}

TEST_P(Float8Test, TransposedCodesAreThoseOfTheTransposedMatrix) {
  Workbench bench = this->bench();
  for (const auto& [rows, cols] : {std::pair{16, 16}, {64, 128}, {80, 272}, {272, 144}}) {
    const Copies copies = quantized(bench, bench.put(random(rows, cols)), DType::kE4M3, ScaleCut::kTensor);
    const Tensor turned = bench.blank(cols, rows, DType::kE4M3);
    bench.ops().transpose_codes(bench.stream(), copies.codes, turned);
    EXPECT_EQ(bench.get(turned).values, bench.get(copies.transposed).values) << rows << " x " << cols;
  }
}

TEST_P(Float8Test, NumbersThatAreNotFiniteStayVisible) {
  Workbench bench = this->bench();
  for (const float bad : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    for (const ScaleCut cut : kCuts) {
      Matrix x = random(16, 128);
      x(2, 3) = bad;
      const Copies copies = quantized(bench, bench.put(x), DType::kE5M2, cut);
      EXPECT_FALSE(std::isfinite(meant(bench, copies.codes, copies.scales)(2, 3)));
      EXPECT_FALSE(std::isfinite(meant(bench, copies.transposed, copies.transposed_scales)(3, 2)));
    }
  }
}

TEST_P(Float8Test, ProductEqualsTheSumOfWhatTheCodesStandFor) {
  Workbench bench = this->bench();
  struct Case {
    DType a, b;
    ScaleCut a_cut, b_cut;
  };
  const Case cases[] = {{DType::kE4M3, DType::kE4M3, ScaleCut::kTensor, ScaleCut::kTensor},
                        {DType::kE5M2, DType::kE4M3, ScaleCut::kTensor, ScaleCut::kTensor},
                        {DType::kE4M3, DType::kE4M3, ScaleCut::kRow128, ScaleCut::kSquare128},
                        {DType::kE4M3, DType::kE4M3, ScaleCut::kRow128, ScaleCut::kRow128}};
  for (const Case& c : cases) {
    for (const auto& [m, n, k] : {std::array{16, 16, 16}, {144, 272, 128}, {256, 128, 400}}) {
      if (c.a_cut != ScaleCut::kTensor && k % 128 != 0) continue;
      for (const bool float_output : {false, true}) {
        const Copies a = quantized(bench, bench.put(uneven(m, k)), c.a, c.a_cut);
        const Copies b = quantized(bench, bench.put(random(n, k)), c.b, c.b_cut);
        const Matrix left = meant(bench, a.codes, a.scales), right = meant(bench, b.codes, b.scales);
        const Matrix start = random(m, n), bias = random(1, n);
        Matmul args;
        args.a = a.codes;
        args.b = b.codes;
        args.a_scales = a.scales;
        args.b_scales = b.scales;
        args.transpose_b = true;
        args.y = float_output ? bench.put_float(start) : bench.blank(m, n);
        args.accumulate = float_output;
        if (!float_output) args.addend = bench.put(start);
        if (!float_output && c.a_cut == ScaleCut::kTensor) args.bias = bench.put(bias);
        bench.ops().matmul(bench.stream(), args);
        Matrix expected(m, n);
        for (std::int64_t i = 0; i < m; ++i) {
          for (std::int64_t j = 0; j < n; ++j) {
            double total = start(i, j) + (args.bias ? bias(0, j) : 0.0f);
            for (std::int64_t p = 0; p < k; ++p) total += double{left(i, p)} * double{right(j, p)};
            expected(i, j) = static_cast<float>(total);
          }
        }
        // Matrix units keep 13 bits behind the point of what they add, even where float32 takes their sums.
        const double exact = GetParam().device == DeviceKind::kCpu ? 2e-4 : 2e-3;
        EXPECT_TRUE(close(bench.get(args.y), expected, float_output ? exact : tolerance()))
            << name_of(c.a) << " cut " << static_cast<int>(c.a_cut) << " and " << static_cast<int>(c.b_cut)
            << ": " << m << " " << n << " " << k;
      }
    }
  }
}

TEST_P(Float8Test, LargestOfTheLastStepsIsRememberedUnlessAStepWasSkipped) {
  Workbench bench = this->bench();
  constexpr int kRows = 300, kSteps = 3;
  const Tensor history = bench.put_float(Matrix(kRows, kSteps)), largest = bench.blank_float(kRows, 1);
  std::vector<Matrix> steps;
  for (const auto& [updates, skip] : {std::pair{1, 0}, {2, 0}, {3, 0}, {3, 1}, {4, 0}}) {
    Matrix seen = random(kRows, 1);
    for (float& value : seen.values) value = std::fabs(value);
    if (skip == 0) steps.push_back(seen);
    StepScalars* const scalars = bench.put_scalars({.skip = skip, .updates = updates});
    bench.ops().remember_largest(bench.stream(), bench.put_float(seen), history, largest, scalars);
  }
  const Matrix remembered = bench.get(largest);
  for (int row = 0; row < kRows; ++row)
    EXPECT_EQ(remembered(row, 0), std::max({steps[1](row, 0), steps[2](row, 0), steps[3](row, 0)})) << row;
  bench.ops().fill(bench.stream(), largest, -1.0f);
  bench.ops().remember_largest(bench.stream(), {}, history, largest, nullptr);
  EXPECT_EQ(bench.get(largest).values, remembered.values);
}

TEST_P(Float8Test, NothingSeenAndInfinitiesLeaveTheScaleAsItWas) {
  Workbench bench = this->bench();
  Matrix seen(3, 1), before(3, 1);
  seen(0, 0) = 2.0f;
  seen(1, 0) = std::numeric_limits<float>::infinity();
  for (float& value : before.values) value = 5.0f;
  const Tensor history = bench.put_float(Matrix(3, 4)), largest = bench.put_float(before);
  bench.ops().remember_largest(bench.stream(), bench.put_float(seen), history, largest,
                               bench.put_scalars({.updates = 1}));
  EXPECT_EQ(bench.get(largest).values, (std::vector<float>{2.0f, 5.0f, 5.0f}));
}

OCTET_TEST_BACKENDS_BF16(Float8Test);

}  // namespace
}  // namespace octet::test
