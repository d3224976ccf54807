// Operators that write 8-bit copies of their outputs themselves.
#include <cmath>
#include <limits>

#include "ops_fixture.h"

namespace octet::test {
namespace {

/// What an operator makes of its output, and the copies that Quantize makes of the same numbers.
class OutputCodesTest : public OpsTest {
 protected:
  static OutputCodes room(Workbench& bench, std::int64_t rows, std::int64_t cols, DType type, bool straight,
                          bool transposed, float largest) {
    const auto number = [&](float value) {
      Matrix one(1, 1);
      one(0, 0) = value;
      return bench.put_float(one);
    };
    OutputCodes output;
    output.largest = number(largest);
    output.seen = number(0.25f);
    if (straight) output.codes = bench.blank(rows, cols, type);
    if (transposed) output.transposed = bench.blank(cols, rows, type);
    output.scale = bench.blank_float(1, 1);
    return output;
  }
  static void expect_copies(Workbench& bench, const std::string& what, const OutputCodes& found,
                            const Tensor& wide) {
    const DType type = (found.codes ? found.codes : found.transposed).dtype;
    OutputCodes expected = room(bench, wide.rows, wide.cols, type, static_cast<bool>(found.codes),
                                static_cast<bool>(found.transposed), bench.get(found.largest)(0, 0));
    Quantize args;
    args.from = wide;
    args.largest = expected.largest;
    args.seen = expected.seen;
    args.codes = expected.codes;
    args.transposed = expected.transposed;
    args.scales.values = args.transposed_scales.values = expected.scale;
    bench.ops().quantize(bench.stream(), args);
    EXPECT_EQ(bench.get(found.seen)(0, 0), bench.get(expected.seen)(0, 0)) << what;
    EXPECT_EQ(bench.get(found.scale)(0, 0), bench.get(expected.scale)(0, 0)) << what;
    const auto same = [&](const Tensor& a, const Tensor& b, const char* which) {
      if (!a) return;
      const auto bytes = [&](Tensor codes) {
        codes.dtype = DType::kE4M3;  // bits alone are compared
        std::vector<int> bits;
        for (const E4M3 code : bench.get_elements<E4M3>(codes)) bits.push_back(code.bits);
        return bits;
      };
      const std::vector<int> left = bytes(a), right = bytes(b);
      for (std::size_t i = 0; i < left.size(); ++i)
        ASSERT_EQ(left[i], right[i]) << what << " " << which << " " << i << " of " << left.size();
    };
    same(found.codes, expected.codes, "codes");
    same(found.transposed, expected.transposed, "transposed");
  }
  static constexpr std::int64_t kShapes[][2] = {{16, 16}, {48, 272}, {144, 128}, {48, 1600}};
};

TEST_P(OutputCodesTest, OfAnActivationAreThoseOfItsRoundedOutput) {
  Workbench bench = this->bench();
  Stream& stream = bench.stream();
  Ops& ops = bench.ops();
  for (const bool gated : {false, true}) {
    for (const auto& [rows, cols] : kShapes) {
      const std::string what = fmt::format("{} [{}, {}]", gated ? "swiglu" : "gelu", rows, cols);
      const std::int64_t width = gated ? 2 * cols : cols;
      Matrix in = random(rows, width, 2.0);
      const Matrix dout = random(rows, cols), start = random(1, cols);
      in(0, 3) = 200.0f;  // beyond what scales are made for
      const Tensor x = bench.put(in), out = bench.blank(rows, cols);
      const OutputCodes codes = room(bench, rows, cols, DType::kE4M3, true, false, 3.0f);
      ops.coded_activation(stream, {gated, x, codes});
      gated ? ops.swiglu_forward(stream, x, out, {}) : ops.gelu_forward(stream, x, out, {});
      expect_copies(bench, what, codes, out);

      CodedActivationBackward args;
      args.gated = gated;
      args.in = x;
      args.dout = bench.put(dout);
      args.din = room(bench, rows, width, DType::kE5M2, true, true, 5.0f);
      args.out = room(bench, rows, cols, DType::kE4M3, false, true, 3.0f);
      for (const bool accumulate : {false, true}) {
        args.accumulate = accumulate;
        if (!gated) args.dbias = accumulate ? bench.put_float(start) : bench.blank_float(1, cols);
        ops.coded_activation_backward(stream, args);
        const Tensor din = bench.put(in), again = bench.put(dout);
        gated ? ops.swiglu_backward(stream, din, again, {}) : ops.gelu_backward(stream, din, again, {});
        expect_copies(bench, what + " gradient", args.din, din);
        expect_copies(bench, what + " once more", args.out, again);
        EXPECT_EQ(bench.get(x).values, in.values);
        EXPECT_EQ(bench.get(args.dout).values, dout.values);
        if (gated) continue;
        const Tensor dbias = bench.put_float(start);
        ops.bias_backward(stream, din, dbias, accumulate);
        EXPECT_TRUE(close(bench.get(args.dbias), bench.get(dbias), 1e-5)) << what;
      }
    }
  }
}

TEST_P(OutputCodesTest, OfANormAreThoseOfItsRoundedOutput) {
  Workbench bench = this->bench();
  Stream& stream = bench.stream();
  Ops& ops = bench.ops();
  constexpr std::int64_t kStagedByHalves[] = {48, 2560}, kTooWide[] = {16, 8192};
  std::vector<const std::int64_t*> shapes{kStagedByHalves, kTooWide};
  for (const auto& shape : kShapes) shapes.push_back(shape);
  for (const NormKind kind : {NormKind::kRms, NormKind::kLayer}) {
    for (const std::int64_t* shape : shapes) {
      const std::int64_t rows = shape[0], cols = shape[1];
      const bool layer = kind == NormKind::kLayer;
      const std::string what = fmt::format("{} [{}, {}]", layer ? "layernorm" : "rmsnorm", rows, cols);
      NormForward forward;
      forward.kind = kind;
      forward.residual = bench.put(random(rows, cols, 2.0));
      forward.delta = bench.put(random(rows, cols));
      forward.weight = bench.put(random(1, cols));
      if (layer) forward.bias = bench.put(random(1, cols));
      forward.sum = bench.blank(rows, cols);
      forward.y = bench.blank(rows, cols);
      forward.rstd = bench.blank_float(1, rows);
      if (layer) forward.mean = bench.blank_float(1, rows);
      ops.norm_forward(stream, forward);
      NormForward coded = forward;
      coded.sum = bench.blank(rows, cols);
      coded.y = bench.put(Matrix(rows, cols));
      coded.rstd = bench.blank_float(1, rows);
      coded.codes = room(bench, rows, cols, DType::kE4M3, true, false, 2.0f);
      ops.norm_forward(stream, coded);
      expect_copies(bench, what, coded.codes, forward.y);
      EXPECT_EQ(bench.get(coded.y).values, Matrix(rows, cols).values) << what;
      EXPECT_EQ(bench.get(coded.sum).values, bench.get(forward.sum).values) << what;
      EXPECT_EQ(bench.get(coded.rstd).values, bench.get(forward.rstd).values) << what;

      const Matrix dy = random(rows, cols), dx = random(rows, cols), start = random(1, cols);
      NormBackward backward;
      backward.kind = kind;
      backward.x = forward.sum;
      backward.weight = forward.weight;
      backward.bias = forward.bias;
      backward.rstd = forward.rstd;
      backward.mean = forward.mean;
      const auto begin = [&](NormBackward& args) {
        args.dy = bench.put(dy);
        args.dx = bench.put(dx);
        args.dweight = bench.put_float(start);
        args.dx_sums = bench.put_float(start);
        if (layer) args.dbias = bench.put_float(start);
      };
      for (const bool with_dx : {false, true}) {
        backward.accumulate = with_dx;
        NormBackward plain = backward;
        begin(plain);
        plain.y = bench.blank(rows, cols);
        ops.norm_backward(stream, plain);
        NormBackward both = backward;
        begin(both);
        both.y_codes = room(bench, rows, cols, DType::kE4M3, false, true, 2.0f);
        if (with_dx) both.dx_codes = room(bench, rows, cols, DType::kE5M2, true, true, 3.0f);
        ops.norm_backward(stream, both);
        expect_copies(bench, what + " once more", both.y_codes, plain.y);
        if (with_dx) expect_copies(bench, what + " gradient", both.dx_codes, both.dx);
        // Sums over a row may be taken in another order.
        EXPECT_TRUE(close(bench.get(both.dx), bench.get(plain.dx), 1e-3)) << what;
        EXPECT_TRUE(close(bench.get(both.dweight), bench.get(plain.dweight), 1e-5)) << what;
        EXPECT_TRUE(close(bench.get(both.dx_sums), bench.get(plain.dx_sums), 1e-5)) << what;
        if (layer) {
          EXPECT_TRUE(close(bench.get(both.dbias), bench.get(plain.dbias), 1e-5)) << what;
        }
      }
    }
  }
}

TEST_P(OutputCodesTest, NumbersThatAreNotFiniteStayVisible) {
  Workbench bench = this->bench();
  for (const float bad : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    Matrix in = random(16, 128);
    in(2, 3) = bad;
    CodedActivationBackward args;
    args.in = bench.put(in);
    args.dout = bench.put(random(16, 128));
    args.din = room(bench, 16, 128, DType::kE5M2, true, true, 1.0f);
    args.out = room(bench, 16, 128, DType::kE4M3, false, true, 1.0f);
    bench.ops().coded_activation_backward(bench.stream(), args);
    EXPECT_TRUE(std::isnan(bench.get(args.din.codes)(2, 3)));
    EXPECT_TRUE(std::isnan(bench.get(args.din.transposed)(3, 2)));
    EXPECT_FALSE(std::isnan(bench.get(args.din.codes)(2, 4)));
  }
}

OCTET_TEST_BACKENDS_BF16(OutputCodesTest);

}  // namespace
}  // namespace octet::test
