// Rotary embedding and QK norm.
#include "ops_fixture.h"

namespace octet::test {
namespace {

class HeadsTest : public OpsTest {};
class HeadsPrecisionTest : public OpsTest {};

/// Head layouts beside the recorded one: (heads, key heads, head size).
const HeadLayout kLayouts[] = {{4, 2, 8, 2, 0},  {1, 1, 2, 1, 0},   {5, 5, 16, 1, 0}, {8, 1, 64, 8, 0},
                               {6, 3, 80, 2, 0}, {8, 2, 128, 4, 0}, {20, 4, 90, 5, 0}};

std::string describe(const char* op, const HeadLayout& layout, std::int64_t tokens) {
  return fmt::format("{}: {} tokens, {} heads, {} key heads of {}", op, tokens, layout.heads, layout.kv_heads,
                     layout.head_size);
}

Matrix run_rope(Workbench& bench, const HeadLayout& layout, const Matrix& x,
                const std::vector<std::int32_t>& positions, const Matrix& cos_sin, bool inverse) {
  const Tensor qkv = bench.put(x);
  bench.ops().rope(bench.stream(), layout, qkv, bench.put(positions), bench.put_float(cos_sin), inverse);
  return bench.get(qkv);
}

std::vector<std::int32_t> recorded_positions() {
  std::vector<std::int32_t> positions(24);
  for (int token = 0; token < 24; ++token) positions[token] = token % 12;
  return positions;
}

TEST_P(HeadsTest, RopeMatchesPyTorch) {
  const ReferenceFile file("ops.ref");
  Workbench bench = this->bench();
  const Matrix angles = file["rope/cos_sin"];
  EXPECT_TRUE(close(run_rope(bench, kLayouts[0], file["rope/x"], recorded_positions(), angles, false),
                    file["rope/y"], 1e-6));
  EXPECT_TRUE(close(run_rope(bench, kLayouts[0], file["rope/dy"], recorded_positions(), angles, true),
                    file["rope/dx"], 1e-6));
}

struct HeadNorm {
  Matrix x, q_weight, k_weight;
};

struct HeadNormForward {
  Matrix y;
  Tensor in, q_weight, k_weight, rstd;  ///< as backward takes them
};

HeadNormForward run_head_norm(Workbench& bench, const HeadLayout& layout, const HeadNorm& in) {
  HeadNormForward result{{},
                         bench.put(in.x),
                         bench.put(in.q_weight),
                         bench.put(in.k_weight),
                         bench.blank_float(in.x.rows, layout.heads + layout.kv_heads)};
  const Tensor out = bench.blank(in.x.rows, in.x.cols);
  bench.ops().head_norm_forward(bench.stream(), layout, 1e-6f, result.in, result.q_weight, result.k_weight,
                                out, result.rstd);
  result.y = bench.get(out);
  return result;
}

Results run_head_norm_backward(Workbench& bench, const HeadLayout& layout, const HeadNormForward& forward,
                               const Matrix& dy, const Matrix* weight_start) {
  const Tensor dqkv = bench.put(dy);
  const auto weight_gradient = [&] {
    return weight_start != nullptr ? bench.put_float(*weight_start) : bench.blank_float(1, layout.head_size);
  };
  const Tensor dq_weight = weight_gradient(), dk_weight = weight_gradient();
  bench.ops().head_norm_backward(bench.stream(), layout, forward.in, forward.rstd, forward.q_weight,
                                 forward.k_weight, dqkv, dq_weight, dk_weight, weight_start != nullptr);
  return {{"dx", bench.get(dqkv)}, {"dq_weight", bench.get(dq_weight)}, {"dk_weight", bench.get(dk_weight)}};
}

TEST_P(HeadsTest, QkNormMatchesPyTorch) {
  const ReferenceFile file("ops.ref");
  Workbench bench = this->bench();
  const HeadNorm in{file["head_norm/x"], file["head_norm/q_weight"], file["head_norm/k_weight"]};
  const HeadNormForward forward = run_head_norm(bench, kLayouts[0], in);
  EXPECT_TRUE(close(forward.y, file["head_norm/y"], 2e-6));
  for (const auto& [entry, actual] :
       run_head_norm_backward(bench, kLayouts[0], forward, file["head_norm/dy"], nullptr)) {
    EXPECT_TRUE(close(actual, file["head_norm/" + entry], 2e-6)) << entry;
  }
}

TEST_P(HeadsTest, QkNormGradientsMatchCentralDifferences) {
  Workbench bench = this->bench();
  const HeadLayout layout{3, 1, 16, 3, 0};
  const HeadNorm in{random(9, layout.packed()), random(1, 16), random(1, 16)};
  const HeadNorm direction{random(9, layout.packed()), random(1, 16), random(1, 16)};
  const Matrix dy = random(9, layout.packed());
  const Results gradients =
      run_head_norm_backward(bench, layout, run_head_norm(bench, layout, in), dy, nullptr);
  const double slope = dot(gradients[0].second, direction.x) + dot(gradients[1].second, direction.q_weight) +
                       dot(gradients[2].second, direction.k_weight);
  const auto loss = [&](double step) {
    const HeadNorm there{moved(in.x, step, direction.x), moved(in.q_weight, step, direction.q_weight),
                         moved(in.k_weight, step, direction.k_weight)};
    return dot(run_head_norm(bench, layout, there).y, dy);
  };
  expect_slope("head_norm", loss, slope, norm_of(gradients[0].second) + norm_of(gradients[1].second));
}

TEST_P(HeadsPrecisionTest, RopeAgreesWithReference) {
  for (const HeadLayout& layout : kLayouts) {
    for (const std::int64_t tokens : {1, 77, 256}) {
      const Matrix x = random(tokens, layout.packed());
      Matrix angles(300, layout.head_size);
      for (std::int64_t p = 0; p < angles.rows; ++p) {
        for (int i = 0; i < layout.head_size / 2; ++i) {
          const double angle = static_cast<double>(p) * std::pow(10000.0, -2.0 * i / layout.head_size);
          angles(p, i) = static_cast<float>(std::cos(angle));
          angles(p, layout.head_size / 2 + i) = static_cast<float>(std::sin(angle));
        }
      }
      const auto positions = random_ids(tokens, 0, 299);
      for (const bool inverse : {false, true}) {
        expect_like_reference(describe("rope", layout, tokens), [&](Workbench& bench) {
          return Results{
              {inverse ? "inverse" : "forward", run_rope(bench, layout, x, positions, angles, inverse)}};
        });
      }
    }
  }
}

TEST_P(HeadsPrecisionTest, QkNormAgreesWithReference) {
  for (const HeadLayout& layout : kLayouts) {
    for (const std::int64_t tokens : {1, 77, 256}) {
      const HeadNorm in{random(tokens, layout.packed()), random(1, layout.head_size),
                        random(1, layout.head_size)};
      const Matrix dy = random(tokens, layout.packed()), start = random(1, layout.head_size, 4.0);
      for (const bool accumulate : {false, true}) {
        expect_like_reference(describe("head_norm", layout, tokens), [&](Workbench& bench) {
          const HeadNormForward forward = run_head_norm(bench, layout, in);
          Results results = run_head_norm_backward(bench, layout, forward, dy, accumulate ? &start : nullptr);
          results.emplace_back("y", forward.y);
          results.emplace_back("rstd", bench.get(forward.rstd));
          return results;
        });
      }
    }
  }
}

OCTET_TEST_BACKENDS(HeadsTest);
OCTET_TEST_AGAINST_REFERENCE(HeadsPrecisionTest);

}  // namespace
}  // namespace octet::test
