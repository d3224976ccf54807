// hopper::Products, the own kernels for matrix products, in every form and with every epilogue, against the
// CPU operators; and what they take.
#include "../../src/ops/hopper/tiling.h"
#include "ops_fixture.h"

namespace octet::test {
namespace {

class OwnProductsTest : public OpsTest {
 protected:
  struct Sizes {
    std::int64_t m, n, k;
  };
  /// Tiles are 256 x 256 by 64: within one, at its edges, several of them, and five times what runs at once,
  /// also such as take one step along k, so that loads are tiles ahead. An emulated GPU runs two at once.
  static std::vector<Sizes> sizes() {
    const bool emulated = make_cuda_device(0)->identity() == "emulated";
    return {{256, 256, 64},
            {8, 64, 72},
            {300, 192, 200},
            {520, 448, 1000},
            {1, 320, 128},
            {emulated ? 2304 : 4352, emulated ? 704 : 4736, 136},
            {2304, emulated ? 704 : 2432, 40}};
  }

  /// Runs the same on own kernels and on the CPU.
  void expect_like_cpu(const std::string& label, const std::function<Results(Workbench&)>& run) {
    Workbench own(GetParam(), workload(), {.own_products = OwnKernels::kAlways});
    Workbench reference({DeviceKind::kCpu, DType::kF32}, workload());
    const Results found = run(own), expected = run(reference);
    for (std::size_t i = 0; i < expected.size(); ++i) {
      const double allowed = tolerance_of(found[i].second.dtype);
      EXPECT_TRUE(close(found[i].second, expected[i].second, allowed)) << label << ": " << expected[i].first;
    }
  }

  template <typename Body>
  void for_sizes(Body body) {
    for (const Sizes& s : sizes()) {
      body(s, fmt::format("m {} n {} k {}", s.m, s.n, s.k));
    }
  }
};

TEST_P(OwnProductsTest, ForwardWithAndWithoutBias) {
  for_sizes([&](const Sizes& s, const std::string& label) {
    const Matrix x = random(s.m, s.k), w = random(s.n, s.k, 0.1), bias = random(1, s.n);
    expect_like_cpu(label, [&](Workbench& bench) {
      Results results;
      for (const bool biased : {false, true}) {
        Matmul args{.a = bench.put(x), .b = bench.put(w), .transpose_b = true, .y = bench.blank(s.m, s.n)};
        if (biased) args.bias = bench.put(bias);
        bench.ops().matmul(bench.stream(), args);
        results.emplace_back(biased ? "with bias" : "plain", bench.get(args.y));
      }
      return results;
    });
  });
}

TEST_P(OwnProductsTest, InputGradient) {
  for_sizes([&](const Sizes& s, const std::string& label) {
    const Matrix dy = random(s.m, s.k), w = random(s.k, s.n, 0.1);
    expect_like_cpu(label, [&](Workbench& bench) {
      const Matmul args{.a = bench.put(dy), .b = bench.put(w), .y = bench.blank(s.m, s.n)};
      bench.ops().matmul(bench.stream(), args);
      return Results{{"dx", bench.get(args.y)}};
    });
  });
}

TEST_P(OwnProductsTest, WeightGradientWrittenAndAdded) {
  for_sizes([&](const Sizes& s, const std::string& label) {
    const std::int64_t out = (s.m + 63) / 64 * 64;
    const Matrix dy = random(s.k, out), x = random(s.k, s.n), before = random(out, s.n);
    expect_like_cpu(label, [&](Workbench& bench) {
      Results results;
      for (const bool accumulate : {false, true}) {
        const Tensor y = accumulate ? bench.put_float(before) : bench.blank_float(out, s.n);
        const Matmul args{
            .a = bench.put(dy), .b = bench.put(x), .transpose_a = true, .y = y, .accumulate = accumulate};
        bench.ops().matmul(bench.stream(), args);
        results.emplace_back(accumulate ? "added" : "written", bench.get(y));
      }
      return results;
    });
  });
}

TEST_P(OwnProductsTest, EpiloguesOfGelu) {
  for_sizes([&](const Sizes& s, const std::string& label) {
    const Matrix x = random(s.m, s.k), w = random(s.n, s.k, 0.1), bias = random(1, s.n);
    const Matrix back = random(s.k, s.n, 0.1), before = random(s.m, s.n, 2.0);
    expect_like_cpu(label, [&](Workbench& bench) {
      Matmul forward{.a = bench.put(x), .b = bench.put(w), .transpose_b = true, .y = bench.blank(s.m, s.n)};
      forward.bias = bench.put(bias);
      forward.epilogue = Epilogue::kGelu;
      forward.inner = bench.blank(s.m, s.n);
      bench.ops().matmul(bench.stream(), forward);
      Matmul gradient{.a = bench.put(x), .b = bench.put(back), .y = bench.blank(s.m, s.n)};
      gradient.epilogue = Epilogue::kGeluGradient;
      gradient.inner = bench.put(before);
      bench.ops().matmul(bench.stream(), gradient);
      return Results{{"inner", bench.get(forward.inner)},
                     {"y", bench.get(forward.y)},
                     {"gradient", bench.get(gradient.y)}};
    });
  });
}

TEST_P(OwnProductsTest, GradientOfGeluWithSumsOverItsRowsForTheBias) {
  Workbench bench(GetParam(), workload(), {.own_products = OwnKernels::kAlways});
  for_sizes([&](const Sizes& s, const std::string& label) {
    const Matrix start = random(1, s.n, 3.0);
    Matmul args{
        .a = bench.put(random(s.m, s.k)), .b = bench.put(random(s.k, s.n, 0.1)), .y = bench.blank(s.m, s.n)};
    args.epilogue = Epilogue::kGeluGradient;
    args.inner = bench.put(random(s.m, s.n, 2.0));
    bench.ops().matmul(bench.stream(), args);
    const Matrix y = bench.get(args.y);
    for (const bool accumulate : {false, true}) {
      args.y = bench.blank(s.m, s.n);
      args.bias_gradient = accumulate ? bench.put_float(start) : bench.blank_float(1, s.n);
      args.accumulate_bias_gradient = accumulate;
      bench.ops().matmul(bench.stream(), args);
      const Matrix expected = column_sums(y, accumulate ? &start : nullptr);
      EXPECT_TRUE(close(bench.get(args.bias_gradient), expected, 1e-5, norm_of(y) / std::sqrt(s.n)))
          << label << " accumulate " << accumulate;
      EXPECT_EQ(bench.get(args.y).values, y.values) << label << ": the sums change what is summed";
    }
  });
}

TEST_P(OwnProductsTest, EpiloguesOfSwiglu) {
  for_sizes([&](const Sizes& s, const std::string& label) {
    const std::int64_t f = (s.n + 127) / 128 * 128;
    const Matrix x = random(s.m, s.k), w = random(2 * f, s.k, 0.1);
    const Matrix back = random(s.k, f, 0.1), before = random(s.m, 2 * f, 2.0);
    expect_like_cpu(label, [&](Workbench& bench) {
      Matmul forward{.a = bench.put(x), .b = bench.put(w), .transpose_b = true, .y = bench.blank(s.m, f)};
      forward.epilogue = Epilogue::kSwiglu;
      forward.inner = bench.blank(s.m, 2 * f);
      bench.ops().matmul(bench.stream(), forward);
      Matmul gradient{.a = bench.put(x), .b = bench.put(back), .y = bench.blank(s.m, f)};
      gradient.epilogue = Epilogue::kSwigluGradient;
      gradient.inner = bench.put(before);
      bench.ops().matmul(bench.stream(), gradient);
      Matmul alone = gradient;
      alone.epilogue = Epilogue::kSwigluGradientAlone;
      alone.inner = bench.put(before);
      bench.ops().matmul(bench.stream(), alone);
      return Results{{"inner", bench.get(forward.inner)},
                     {"y", bench.get(forward.y)},
                     {"inner gradient", bench.get(gradient.inner)},
                     {"y rebuilt", bench.get(gradient.y)},
                     {"inner gradient alone", bench.get(alone.inner)}};
    });
  });
}

/// What the copy engine does not take is cuBLASLt's: odd widths, and an address between its bounds.
TEST_P(OwnProductsTest, OtherSizesGoElsewhere) {
  const Matrix x = random(33, 50), w = random(21, 50), odd = random(40, 136), thin = random(40, 100);
  expect_like_cpu("odd", [&](Workbench& bench) {
    const Matmul forward{.a = bench.put(x), .b = bench.put(w), .transpose_b = true, .y = bench.blank(33, 21)};
    const Matmul weight{
        .a = bench.put(odd), .b = bench.put(thin), .transpose_a = true, .y = bench.blank_float(136, 100)};
    bench.ops().matmul(bench.stream(), forward);
    bench.ops().matmul(bench.stream(), weight);
    return Results{{"forward", bench.get(forward.y)}, {"weight gradient", bench.get(weight.y)}};
  });
}

/// A product of a linear layer with addresses that nothing reads.
struct Addresses {
  alignas(16) char bytes[16] = {};

  Tensor matrix(std::int64_t rows, std::int64_t cols, DType dtype = DType::kBF16) {
    return {bytes, dtype, rows, cols};
  }
  Matmul forward(std::int64_t m, std::int64_t n, std::int64_t k) {
    return {.a = matrix(m, k), .b = matrix(n, k), .transpose_b = true, .y = matrix(m, n)};
  }
  Matmul input_gradient(std::int64_t m, std::int64_t n, std::int64_t k) {
    return {.a = matrix(m, k), .b = matrix(k, n), .y = matrix(m, n)};
  }
  Matmul weight_gradient(std::int64_t m, std::int64_t n, std::int64_t k) {
    return {.a = matrix(k, m), .b = matrix(k, n), .transpose_a = true, .y = matrix(m, n, DType::kF32)};
  }
  Matmul swiglu(std::int64_t m, std::int64_t f, std::int64_t k) {
    Matmul args = forward(m, 2 * f, k);
    args.y = matrix(m, f);
    args.inner = matrix(m, 2 * f);
    args.epilogue = Epilogue::kSwiglu;
    return args;
  }
};

TEST(OwnProductsTiling, EfficiencyIsThePartOfWholeRoundsOfTilesThatResultsFill) {
  Addresses at;
  EXPECT_EQ(hopper::efficiency(at.forward(66 * 256, 256, 64), 66), 1.0);
  EXPECT_EQ(hopper::efficiency(at.forward(256, 67 * 256, 64), 66), 67.0 / 132)
      << "a second round for one tile";
  EXPECT_EQ(hopper::efficiency(at.weight_gradient(192, 384, 64), 1), 192.0 * 384 / (256 * 512));
  EXPECT_EQ(hopper::efficiency(at.swiglu(256, 66 * 128, 64), 66), 1.0) << "tiles of gates and their ups";
  EXPECT_EQ(hopper::efficiency(at.swiglu(256, 67 * 128, 64), 66), 67.0 / 132);
}

TEST(OwnProductsTiling, EveryWarpgroupOfATileHasARowOfSums) {
  EXPECT_EQ(hopper::column_sum_rows(1), 2);
  EXPECT_EQ(hopper::column_sum_rows(256), 2);
  EXPECT_EQ(hopper::column_sum_rows(257), 4);
}

TEST(OwnProductsTiling, ThreeFormsAreTakenInWhatTheCopyEngineMoves) {
  Addresses at;
  EXPECT_TRUE(hopper::takes(at.forward(1, 8, 8)));
  EXPECT_FALSE(hopper::takes(at.forward(1, 8, 12))) << "rows of 24 bytes";
  EXPECT_FALSE(hopper::takes(at.forward(1, 12, 8)));
  EXPECT_TRUE(hopper::takes(at.input_gradient(1, 64, 8)));
  EXPECT_FALSE(hopper::takes(at.input_gradient(1, 72, 8))) << "boxes of 64 where k is outermost";
  EXPECT_TRUE(hopper::takes(at.weight_gradient(64, 128, 1)));
  EXPECT_FALSE(hopper::takes(at.weight_gradient(72, 128, 1)));
  EXPECT_FALSE(hopper::takes(at.forward(1, 8, 0))) << "nothing to sum";

  Matmul args = at.forward(64, 64, 64);
  args.b.data = at.bytes + 8;
  EXPECT_FALSE(hopper::takes(args));
  args = at.forward(64, 64, 64);
  args.accumulate = true;
  EXPECT_FALSE(hopper::takes(args)) << "only float32 is added to";
  args.accumulate = false;
  args.addend = args.y;
  EXPECT_FALSE(hopper::takes(args)) << "nothing else is added";
  args = at.weight_gradient(64, 64, 64);
  args.accumulate = true;
  EXPECT_TRUE(hopper::takes(args));
  args = at.forward(64, 64, 64);
  args.y.dtype = DType::kF32;
  EXPECT_FALSE(hopper::takes(args));
  args = at.forward(64, 64, 64);
  args.a.dtype = args.b.dtype = DType::kE4M3;
  EXPECT_FALSE(hopper::takes(args));
}

TEST(OwnProductsTiling, EpiloguesAreTakenWhereTheirFormHasThem) {
  Addresses at;
  EXPECT_TRUE(hopper::takes(at.swiglu(64, 128, 64)));
  EXPECT_FALSE(hopper::takes(at.swiglu(64, 192, 64))) << "a tile would hold gates and ups of other columns";
  Matmul gelu = at.forward(64, 72, 64);
  gelu.epilogue = Epilogue::kGelu;
  gelu.inner = at.matrix(64, 72);
  gelu.bias = at.matrix(1, 72);
  EXPECT_TRUE(hopper::takes(gelu));
  gelu.inner.data = at.bytes + 8;
  EXPECT_FALSE(hopper::takes(gelu));
  for (const Epilogue epilogue :
       {Epilogue::kGeluGradient, Epilogue::kSwigluGradient, Epilogue::kSwigluGradientAlone}) {
    Matmul gradient = at.input_gradient(64, 192, 64);
    gradient.epilogue = epilogue;
    gradient.inner = at.matrix(64, is_gated(epilogue) ? 384 : 192);
    EXPECT_TRUE(hopper::takes(gradient));
  }
}

INSTANTIATE_TEST_SUITE_P(Cuda, OwnProductsTest, testing::Values(OpsCase{DeviceKind::kCuda, DType::kBF16}),
                         name_of_case);

}  // namespace
}  // namespace octet::test
