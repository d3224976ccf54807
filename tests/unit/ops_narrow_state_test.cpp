// Optimizer state that is narrower than float32: bfloat16 moments, 8-bit moments, split masters.
#include <bit>
#include <limits>

#include "octet/base/rng.h"
#include "ops_fixture.h"

namespace octet::test {
namespace {

class NarrowStateTest : public OpsTest {};

constexpr float kBeta1 = 0.9f, kBeta2 = 0.95f;

std::int64_t blocks_of(std::int64_t begin, std::int64_t count) {
  return ParameterRun{.begin = begin}.block(count - 1) + 1;
}

/// What codes stand for, by the formula.
double first_value(std::int8_t code, float scale) {
  const double value = double{scale} * std::pow(std::abs(code) / 127.0, 2);
  return code < 0 ? -value : value;
}
double second_value(std::uint8_t code, float scale) {
  return double{scale} * std::pow(code / 255.0, 4);
}
/// The most by which codes next to a value lie apart.
double first_gap(double value, double scale) {
  return scale * (2.0 * std::sqrt(std::abs(value) / scale) / 127.0 + 1.0 / 16129.0);
}
double second_gap(double value, double scale) {
  return scale * 4.0 * std::pow(std::pow(value / scale, 0.25) + 1.0 / 255.0, 3) / 255.0;
}
/// The distance of bfloat16 numbers next to a value.
double bf16_gap(double value) {
  return std::ldexp(1.0, std::max(std::ilogb(value), -126) - 7);
}

/// First and second moments of a run on a workbench, in one of three forms.
struct Moments {
  DType form;
  std::int64_t begin;
  Tensor first, second, first_scale, second_scale;

  Moments(Workbench& bench, DType moments, std::int64_t run_begin, std::int64_t count)
      : form(moments), begin(run_begin) {
    const auto size = static_cast<std::size_t>(count);
    if (form == DType::kF32) {
      first = bench.put_elements(std::vector<float>(size));
      second = bench.put_elements(std::vector<float>(size));
    } else if (form == DType::kBF16) {
      first = bench.put_elements(std::vector<BF16>(size));
      second = bench.put_elements(std::vector<BF16>(size));
    } else {
      first = bench.put_elements(std::vector<std::int8_t>(size));
      second = bench.put_elements(std::vector<std::uint8_t>(size));
      const std::vector<float> scales(static_cast<std::size_t>(blocks_of(begin, count)));
      first_scale = bench.put_elements(scales);
      second_scale = bench.put_elements(scales);
    }
  }
  void set(Workbench& bench, const Matrix& m, const Matrix& v) const {
    const auto keep = [&](const Matrix& values, Tensor to, Tensor scale) {
      if (form == DType::kI8) {
        bench.ops().narrow_state(bench.stream(), bench.put_float(values), {to, scale, begin});
      } else {
        bench.ops().cast(bench.stream(), bench.put_float(values), to);
      }
    };
    keep(m, first, first_scale);
    keep(v, second, second_scale);
  }
  std::vector<double> values(Workbench& bench, bool of_first) const {
    std::vector<double> result;
    if (form == DType::kF32) {
      for (const float x : bench.get_elements<float>(of_first ? first : second)) result.push_back(x);
    } else if (form == DType::kBF16) {
      for (const BF16 x : bench.get_elements<BF16>(of_first ? first : second))
        result.push_back(static_cast<float>(x));
    } else {
      const std::vector<float> scales = bench.get_elements<float>(of_first ? first_scale : second_scale);
      const ParameterRun run{.begin = begin};
      const auto scale = [&] { return scales[static_cast<std::size_t>(run.block(std::ssize(result)))]; };
      if (of_first) {
        for (const std::int8_t code : bench.get_elements<std::int8_t>(first))
          result.push_back(first_value(code, scale()));
      } else {
        for (const std::uint8_t code : bench.get_elements<std::uint8_t>(second))
          result.push_back(second_value(code, scale()));
      }
    }
    return result;
  }
  Adamw adamw() const {
    Adamw args;
    args.first_moment = first;
    args.second_moment = second;
    args.first_scale = first_scale;
    args.second_scale = second_scale;
    args.beta1 = kBeta1;
    args.beta2 = kBeta2;
    args.run.begin = begin;
    return args;
  }
};

/// Every low half of the masters of some upper halves: zero, subnormal, the largest, infinity, and any; of
/// both signs.
std::vector<float> masters_of_all_remainders(std::mt19937_64& random) {
  std::vector<std::uint32_t> upper = {0x0000, 0x0001, 0x007f, 0x0080, 0x3f7f, 0x3f80, 0x3f81, 0x7f7e, 0x7f7f};
  for (int i = 0; i < 8; ++i) upper.push_back(static_cast<std::uint32_t>(random() % 0x7f80));
  std::vector<float> values;
  for (const std::uint32_t sign : {0x0000u, 0x8000u}) {
    for (const std::uint32_t high : upper) {
      for (std::uint32_t low = 0; low < 0x10000u; ++low)
        values.push_back(std::bit_cast<float>(((sign | high) << 16) | low));
    }
    values.push_back(std::bit_cast<float>((sign | 0x7f80u) << 16));
  }
  return values;
}

/// Half way between two bfloat16 numbers, the even one being nearer to zero.
bool tie_rounded_down(float value) {
  return (std::bit_cast<std::uint32_t>(value) & 0x1ffffu) == 0x8000u;
}

TEST_P(NarrowStateTest, SplitMastersComeBackBitForBitButForOneTieIn131072) {
  Workbench bench = this->bench();
  const std::vector<float> masters = masters_of_all_remainders(random_);
  const Tensor values = bench.put_elements(masters);
  const NarrowState split{bench.put_elements(std::vector<std::int16_t>(masters.size())),
                          bench.put_elements(std::vector<BF16>(masters.size()))};
  bench.ops().narrow_state(bench.stream(), values, split);
  const Tensor back = bench.put_elements(std::vector<float>(masters.size()));
  bench.ops().widen_state(bench.stream(), split, back);
  const auto parameters = bench.get_elements<BF16>(split.companion);
  const auto found = bench.get_elements<float>(back);
  std::size_t ties = 0, wrong = 0;
  for (std::size_t i = 0; i < masters.size(); ++i) {
    const auto bits = std::bit_cast<std::uint32_t>(masters[i]);
    const std::uint32_t expected = tie_rounded_down(masters[i]) ? bits - 1 : bits;
    ties += expected != bits;
    wrong +=
        parameters[i].bits != BF16(masters[i]).bits || std::bit_cast<std::uint32_t>(found[i]) != expected;
  }
  EXPECT_EQ(wrong, 0u);
  EXPECT_GT(ties, 0u);

  bench.ops().narrow_state(bench.stream(), back, split);
  const Tensor again = bench.put_elements(std::vector<float>(masters.size()));
  bench.ops().widen_state(bench.stream(), split, again);
  EXPECT_EQ(std::memcmp(bench.get_elements<float>(again).data(), found.data(), found.size() * sizeof(float)),
            0)
      << "what was read back once stays";
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const NarrowState one{split.stored.range(0, 1), split.companion.range(0, 1)};
  bench.ops().narrow_state(bench.stream(), bench.put_elements(std::vector<float>{nan}), one);
  bench.ops().widen_state(bench.stream(), one, again.range(0, 1));
  EXPECT_TRUE(std::isnan(bench.get_elements<float>(again)[0]));
}

TEST_P(NarrowStateTest, SplitMastersFollowFloat32MastersBitForBit) {
  Workbench bench({GetParam().device, DType::kBF16}, workload());
  constexpr std::int64_t kCount = 20011;
  const Matrix start = random(1, kCount, 0.02);
  const Moments plain_moments(bench, DType::kF32, 0, kCount), split_moments(bench, DType::kF32, 0, kCount);
  Adamw plain = plain_moments.adamw(), split = split_moments.adamw();
  plain.weight_decay = split.weight_decay = 0.1f;
  plain.master = bench.put_float(start);
  plain.parameter = bench.put_elements(std::vector<BF16>(kCount));
  split.master = bench.put_elements(std::vector<std::int16_t>(kCount));
  split.parameter = bench.put_elements(std::vector<BF16>(kCount));
  bench.ops().narrow_state(bench.stream(), plain.master, {split.master, split.parameter});
  const Tensor joined = bench.put_float(start);
  StepScalars s{.gradient_scale = 0.5f, .learning_rate = 1e-3f};
  std::int64_t ties = 0;
  for (int step = 1; step <= 100; ++step) {
    s.updates = step;
    s.bias_correction1 = 1.0f - std::pow(kBeta1, static_cast<float>(step));
    s.bias_correction2 = 1.0f - std::pow(kBeta2, static_cast<float>(step));
    plain.gradient = split.gradient = bench.put_float(random(1, kCount));
    bench.ops().adamw(bench.stream(), plain, bench.put_scalars(s));
    bench.ops().adamw(bench.stream(), split, bench.put_scalars(s));
    bench.ops().widen_state(bench.stream(), {split.master, split.parameter}, joined);
    std::vector<float> expected = bench.get_elements<float>(plain.master);
    const auto parameters = bench.get_elements<BF16>(plain.parameter);
    const bool any = std::any_of(expected.begin(), expected.end(), tie_rounded_down);
    for (float& value : expected) {
      if (!tie_rounded_down(value)) continue;
      value = std::bit_cast<float>(std::bit_cast<std::uint32_t>(value) - 1);
      ++ties;
    }
    if (any) plain.master = bench.put_elements(expected);
    ASSERT_EQ(bench.get_elements<float>(joined), expected) << "step " << step;
    const auto found = bench.get_elements<BF16>(split.parameter);
    ASSERT_EQ(std::memcmp(found.data(), parameters.data(), kCount * sizeof(BF16)), 0) << "step " << step;
  }
  EXPECT_LT(ties, 100 * kCount / 20000) << "expected one in 131072";
}

/// Blocks of widely spread, equal, tiny and zero values.
Matrix assorted(std::mt19937_64& random, std::int64_t count, bool positive) {
  std::normal_distribution<double> normal;
  Matrix values(1, count);
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t block = i / 200;
    double x = normal(random) * (block % 4 == 0 ? std::pow(10.0, 3.0 * normal(random)) : 1.0);
    if (block % 4 == 1) x *= 1e-24;
    if (block % 4 == 3) x = block % 8 == 3 ? 0.0 : 0.25;
    if (positive) x = x * x;
    if (block % 4 == 2) x *= 1e-40;
    values(0, i) = static_cast<float>(x);
  }
  return values;
}

TEST_P(NarrowStateTest, CodesAreTheNearestAndComeBackBitForBit) {
  Workbench bench = this->bench();
  for (const std::int64_t count : {1, 3, 257, 5000}) {
    for (const std::int64_t begin : {0, 64, 1003}) {
      const std::string label = fmt::format("{} elements from {}", count, begin);
      const Matrix m = assorted(random_, count, false), v = assorted(random_, count, true);
      const Moments moments(bench, DType::kI8, begin, count);
      moments.set(bench, m, v);
      const auto first_codes = bench.get_elements<std::int8_t>(moments.first);
      const auto second_codes = bench.get_elements<std::uint8_t>(moments.second);
      const auto first_scales = bench.get_elements<float>(moments.first_scale);
      const auto second_scales = bench.get_elements<float>(moments.second_scale);
      const auto first = moments.values(bench, true), second = moments.values(bench, false);
      const ParameterRun run{.begin = begin};
      for (std::int64_t i = 0; i < count; ++i) {
        const auto at = static_cast<std::size_t>(i), block = static_cast<std::size_t>(run.block(i));
        const double a = first_scales[block], b = second_scales[block];
        ASSERT_LE(std::abs(first[at] - m(0, i)), a == 0.0 ? 0x1p-90 : 0.5001 * first_gap(m(0, i), a))
            << label;
        ASSERT_LE(std::abs(second[at] - v(0, i)), b == 0.0 ? 0x1p-90 : 0.5001 * second_gap(v(0, i), b))
            << label;
        ASSERT_TRUE(b == 0.0 || (second_codes[at] == 0) == (v(0, i) == 0.0f)) << label;
      }
      Matrix m_back(1, count), v_back(1, count);
      const auto widened = [&](Tensor codes, Tensor scale) {
        const Tensor values = bench.blank_float(1, count);
        bench.ops().widen_state(bench.stream(), {codes, scale, begin}, values);
        return bench.get(values);
      };
      m_back = widened(moments.first, moments.first_scale);
      v_back = widened(moments.second, moments.second_scale);
      for (std::int64_t i = 0; i < count; ++i) {
        ASSERT_NEAR(m_back(0, i), first[static_cast<std::size_t>(i)], 1e-6 * std::abs(m_back(0, i)));
        ASSERT_NEAR(v_back(0, i), second[static_cast<std::size_t>(i)], 1e-6 * std::abs(v_back(0, i)));
      }
      moments.set(bench, m_back, v_back);
      EXPECT_EQ(bench.get_elements<std::int8_t>(moments.first), first_codes) << label;
      EXPECT_EQ(bench.get_elements<std::uint8_t>(moments.second), second_codes) << label;
      EXPECT_EQ(bench.get_elements<float>(moments.first_scale), first_scales) << label;
      EXPECT_EQ(bench.get_elements<float>(moments.second_scale), second_scales) << label;
    }
  }
}

TEST_P(NarrowStateTest, AdamwFollowsItsFormulaInEveryForm) {
  Workbench bench({GetParam().device, DType::kBF16}, workload());
  const StepScalars s{.gradient_scale = 0.125f,
                      .learning_rate = 0.01f,
                      .bias_correction1 = 0.271f,
                      .bias_correction2 = 0.142f,
                      .updates = 3};
  StepScalars skipped = s;
  skipped.skip = 1;
  for (const std::int64_t count : {1, 3, 257, 4096, 50001}) {
    for (const std::int64_t begin : {0, 64, 1003}) {
      for (const auto& [form, split] : {std::pair{DType::kBF16, false},
                                        {DType::kI8, false},
                                        {DType::kF32, true},
                                        {DType::kBF16, true},
                                        {DType::kI8, true}}) {
        const std::string label = fmt::format("{} elements from {}, {} moments, {} master", count, begin,
                                              name_of(form), split ? "split" : "float32");
        const Matrix master = random(1, count), gradient = random(1, count, 8.0);
        const Moments moments(bench, form, begin, count);
        moments.set(bench, random(1, count), random(1, count, 0.1, 1.0));
        Adamw args = moments.adamw();
        args.gradient = bench.put_float(gradient);
        args.weight_decay = 0.1f;
        args.run = {5, 7, 24, 100, begin};
        args.parameter = bench.put_elements(std::vector<BF16>(static_cast<std::size_t>(count)));
        args.master = bench.put_float(master);
        if (split) {
          const Tensor remainder =
              bench.put_elements(std::vector<std::int16_t>(static_cast<std::size_t>(count)));
          bench.ops().narrow_state(bench.stream(), args.master, {remainder, args.parameter});
          args.master = remainder;
        }
        const auto masters = [&] {
          if (!split) return bench.get(args.master);
          const Tensor joined = bench.blank_float(1, count);
          bench.ops().widen_state(bench.stream(), {args.master, args.parameter}, joined);
          return bench.get(joined);
        };
        const Matrix before = masters();
        const auto m = moments.values(bench, true), v = moments.values(bench, false);
        bench.ops().adamw(bench.stream(), args, bench.put_scalars(skipped));
        ASSERT_EQ(masters().values, before.values) << label;
        ASSERT_EQ(moments.values(bench, true), m) << label << ": a skipped step changes nothing";
        ASSERT_EQ(moments.values(bench, false), v) << label << ": a skipped step changes nothing";

        bench.ops().adamw(bench.stream(), args, bench.put_scalars(s));
        Matrix expected(1, count);
        std::vector<double> new_m, new_v;
        for (std::int64_t i = 0; i < count; ++i) {
          const auto at = static_cast<std::size_t>(i);
          const double g = 0.125 * gradient(0, i);
          new_m.push_back(double{kBeta1} * m[at] + (1.0 - double{kBeta1}) * g);
          new_v.push_back(double{kBeta2} * v[at] + (1.0 - double{kBeta2}) * g * g);
          const double direction = new_m.back() / 0.271 / (std::sqrt(new_v.back() / 0.142) + 1e-8);
          expected(0, i) = static_cast<float>(before(0, i) - 0.01 * (direction + 0.1 * before(0, i)));
        }
        const Matrix found = masters();
        EXPECT_TRUE(close(found, expected, 2e-6, 1.0)) << label;
        Matrix rounded = found;
        for (float& value : rounded.values) value = static_cast<float>(BF16(value));
        EXPECT_EQ(bench.get(args.parameter).values, rounded.values) << label;
        std::vector<float> first_scales, second_scales;
        if (form == DType::kI8) {
          first_scales = bench.get_elements<float>(moments.first_scale);
          second_scales = bench.get_elements<float>(moments.second_scale);
        }
        const auto first = moments.values(bench, true), second = moments.values(bench, false);
        double worst = 0.0;
        for (std::int64_t i = 0; i < count; ++i) {
          const auto at = static_cast<std::size_t>(i), block = static_cast<std::size_t>(args.run.block(i));
          const double first_step = form == DType::kF32    ? 0.0
                                    : form == DType::kBF16 ? bf16_gap(new_m[at])
                                                           : first_gap(new_m[at], first_scales[block]);
          const double second_step = form == DType::kF32    ? 0.0
                                     : form == DType::kBF16 ? bf16_gap(new_v[at])
                                                            : second_gap(new_v[at], second_scales[block]);
          // Beside the step, what float32 makes of the sums.
          worst = std::max(worst, std::abs(first[at] - new_m[at]) / (1.001 * first_step + 3e-6));
          worst = std::max(worst, std::abs(second[at] - new_v[at]) / (1.001 * second_step + 3e-6));
        }
        EXPECT_LE(worst, 1.0) << label;
      }
    }
  }
}

/// Many elements of equal moments, each with its own random number: on average they are what they should be.
TEST_P(NarrowStateTest, RoundingByChanceIsUnbiased) {
  Workbench bench = this->bench();
  constexpr std::int64_t kBlocks = 400, kCount = kBlocks * kMomentBlock;
  for (const DType form : {DType::kBF16, DType::kI8}) {
    for (const float value : {0.7123f, -0.3001f, 0.01234f, -0.000717f}) {
      const Moments moments(bench, form, 0, kCount);
      Adamw args = moments.adamw();
      args.beta1 = args.beta2 = 0.0f;  // the moments are g and g²
      Matrix gradient(1, kCount);
      for (std::int64_t i = 0; i < kCount; ++i) gradient(0, i) = i % kMomentBlock == 0 ? 1.0f : value;
      args.gradient = bench.put_float(gradient);
      args.master = bench.put_float(Matrix(1, kCount));
      args.run = {9, 0, kCount, kCount, 0};
      bench.ops().adamw(bench.stream(), args, bench.put_scalars({.gradient_scale = 1.0f, .updates = 4}));
      for (const bool of_first : {true, false}) {
        const double exact = of_first ? double{value} : double{value * value};
        const double gap = form == DType::kBF16 ? bf16_gap(exact)
                           : of_first           ? first_gap(exact, 1.0)
                                                : second_gap(exact, 1.0);
        const auto found = moments.values(bench, of_first);
        double sum = 0.0;
        std::int64_t count = 0, up = 0;
        for (std::size_t i = 0; i < found.size(); ++i) {
          if (static_cast<std::int64_t>(i) % kMomentBlock == 0) continue;
          ASSERT_LE(std::abs(found[i] - exact), gap);
          sum += found[i];
          up += found[i] > exact;
          ++count;
        }
        const std::string label =
            fmt::format("{} moment {} as {}", of_first ? "first" : "second", exact, name_of(form));
        // Five deviations of the mean of as many draws, and 2^-16 of a step, the resolution of the draws.
        const double allowed = gap * (2.5 / std::sqrt(static_cast<double>(count)) + 0x1p-16);
        EXPECT_NEAR(sum / static_cast<double>(count), exact, allowed) << label;
        EXPECT_GT(up, 0) << label;
        EXPECT_LT(up, count) << label;
      }
    }
  }
}

/// A parameter updated whole, and the same cut by rows, columns and at any element, give the same bits; other
/// updates and other parameters give others.
TEST_P(NarrowStateTest, RandomNumbersBelongToGlobalElements) {
  Workbench bench = this->bench();
  constexpr std::int64_t kRows = 21, kCols = 40;
  const Matrix gradient = random(kRows, kCols);
  const auto update = [&](const Matrix& part, ParameterRun run, std::int64_t updates) {
    const Moments moments(bench, DType::kBF16, 0, part.size());
    Adamw args = moments.adamw();
    args.gradient = bench.put_float(part);
    args.master = bench.put_float(Matrix(1, part.size()));
    args.run = run;
    bench.ops().adamw(bench.stream(), args, bench.put_scalars({.gradient_scale = 1.0f, .updates = updates}));
    std::vector<double> all = moments.values(bench, true);
    const std::vector<double> second = moments.values(bench, false);
    all.insert(all.end(), second.begin(), second.end());
    return all;
  };
  const auto whole = update(gradient, {3, 0, kCols, kCols, 0}, 5);
  EXPECT_NE(update(gradient, {3, 0, kCols, kCols, 0}, 6), whole);
  EXPECT_NE(update(gradient, {4, 0, kCols, kCols, 0}, 5), whole);
  struct Cut {
    std::int64_t row, col, rows, cols;
  };
  for (const Cut& cut : {Cut{0, 0, kRows, 20}, {0, 20, kRows, 20}, {5, 0, 11, kCols}, {2, 7, 9, 13}}) {
    for (const std::int64_t begin : {std::int64_t{0}, std::int64_t{3}, cut.cols + 8}) {
      const std::int64_t size = cut.rows * cut.cols - begin;
      const ParameterRun run{3, cut.row * kCols + cut.col, cut.cols, kCols, begin};
      Matrix part(1, size);
      std::vector<double> expected(static_cast<std::size_t>(2 * size));
      for (std::int64_t i = 0; i < size; ++i) {
        const std::int64_t global = run.global(i);
        part(0, i) = gradient.values[static_cast<std::size_t>(global)];
        expected[static_cast<std::size_t>(i)] = whole[static_cast<std::size_t>(global)];
        expected[static_cast<std::size_t>(size + i)] =
            whole[static_cast<std::size_t>(gradient.size() + global)];
      }
      EXPECT_EQ(update(part, run, 5), expected)
          << fmt::format("from ({}, {}), {} columns, begin {}", cut.row, cut.col, cut.cols, begin);
    }
  }
}

OCTET_TEST_BACKENDS(NarrowStateTest);

}  // namespace
}  // namespace octet::test
