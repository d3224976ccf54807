#include <algorithm>
#include <cmath>
#include <set>

#include "local_sizes.h"
#include "octet/base/rng.h"
#include "octet/bench/operands.h"
#include "octet/bench/session.h"

namespace octet {

namespace {

constexpr double kWarnAbove = 1.1;  ///< time of the slowest rank over that of the fastest

/// y[rows, out] = x[rows, in]·w[out, in]ᵀ.
struct Linear {
  const char* name;
  std::int64_t rows, out, in;
};

struct Pass {
  const char* name;
  Matmul args;
  bool accumulates_from_one = false;  ///< y is 1 everywhere before
};

std::int64_t inner_size(const Matmul& args) {
  return args.transpose_a ? args.a.rows : args.a.cols;
}

/// Numbers below `count`: the first, the last, and some between.
std::vector<std::int64_t> pick(std::int64_t count, std::uint64_t key) {
  std::set<std::int64_t> picked{0, count - 1};
  for (std::uint64_t i = 0; i < 7; ++i)
    picked.insert(static_cast<std::int64_t>(mix(key, i) % static_cast<std::uint64_t>(count)));
  return {picked.begin(), picked.end()};
}

/// Some rows, or columns, of a matrix. Columns are taken from the whole of it, piece by piece.
std::vector<std::vector<float>> lines_of(BenchSession& session, const Tensor& matrix,
                                         const std::vector<std::int64_t>& picked, bool columns) {
  constexpr std::int64_t kPieceElements = 1 << 24;
  std::vector<std::vector<float>> lines(picked.size());
  const auto read = [&](std::int64_t row, std::int64_t count) {
    return to_host(session.device, session.stream, matrix.row_range(row, count));
  };
  if (!columns) {
    for (std::size_t i = 0; i < picked.size(); ++i) lines[i] = read(picked[i], 1);
    return lines;
  }
  const std::int64_t piece = std::max<std::int64_t>(1, kPieceElements / matrix.cols);
  for (std::int64_t row = 0; row < matrix.rows; row += piece) {
    const std::int64_t count = std::min(piece, matrix.rows - row);
    const std::vector<float> values = read(row, count);
    for (std::int64_t r = 0; r < count; ++r) {
      for (std::size_t i = 0; i < picked.size(); ++i)
        lines[i].push_back(values[static_cast<std::size_t>(r * matrix.cols + picked[i])]);
    }
  }
  return lines;
}

/// Compares elements of y with sums in float64: where some rows and columns cross.
bool right(BenchSession& session, const Pass& pass) {
  const Matmul& args = pass.args;
  const std::vector<std::int64_t> rows = pick(args.y.rows, 1), cols = pick(args.y.cols, 2);
  const auto a = lines_of(session, args.a, rows, args.transpose_a);
  const auto b = lines_of(session, args.b, cols, !args.transpose_b);
  const auto y = lines_of(session, args.y, rows, false);
  // What a float32 sum of k products of unit size may be off by, and the rounding of the result.
  const double sum_error = 2e-4 * std::sqrt(static_cast<double>(inner_size(args)));
  const double rounding = args.y.dtype == DType::kBF16 ? 1.0 / 256 : 0.0;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    for (std::size_t j = 0; j < cols.size(); ++j) {
      double total = pass.accumulates_from_one ? 1.0 : 0.0;
      for (std::size_t p = 0; p < a[i].size(); ++p) total += double{a[i][p]} * double{b[j][p]};
      const double found = y[i][static_cast<std::size_t>(cols[j])];
      if (!(std::abs(found - total) <= sum_error + rounding * std::abs(total))) return false;
    }
  }
  return true;
}

}  // namespace

PartResult bench_matmul(BenchSession& session) {
  PartResult result{"",
                    ResultTable({{"product", "product"},
                                 {"pass", "pass"},
                                 {"m", "m"},
                                 {"n", "n"},
                                 {"k", "k"},
                                 {"time_us", "time us"},
                                 {"tflops", "TFLOP/s", 2},
                                 {"fastest_rank_tflops", "fastest rank", 2},
                                 {"percent_of_peak", "% of peak"},
                                 {"percent_of_best", "% of best"},
                                 {"correct", "correct"}}),
                    {},
                    {}};
  const LocalSizes sizes(session);
  const std::int64_t h = sizes.shape.hidden;
  std::vector<Linear> linears = {
      {"qkv", sizes.tokens, sizes.heads.packed(), h},
      {"attention out", sizes.tokens, h, sizes.heads.query()},
      {sizes.shape.gated() ? "gate, up" : "up", sizes.tokens, sizes.inner, h},
      {"down", sizes.tokens, h, sizes.mlp},
      {"head", sizes.logits_rows, sizes.vocabulary_rows, h},
  };
  result.title =
      fmt::format("matrix products of a micro-batch of {} tokens, {}", sizes.tokens, name_of(sizes.compute));
  const std::unique_ptr<Ops> ops = session.backend.make_ops();
  AttentionShape small = sizes.attention;  // plans of the attention that the deck has are not needed here
  small.batch = 1;
  small.sequence = std::min<std::int64_t>(small.sequence, 64);
  small.keys = 0;
  ops->prepare(workload_of(sizes, small, false));

  Stopwatch stopwatch = session.stopwatch();
  std::vector<nlohmann::json> rows;
  double best = 0.0, slowest_ms = 0.0, fastest_ms = 0.0;
  for (Linear& linear : linears) {
    linear.out = rows_within(session.limits, linear.out, linear.in, 0.0, result.notes);
    const double flops = 2.0 * static_cast<double>(linear.out) * static_cast<double>(linear.in);
    linear.rows =
        rows_within(session.limits, linear.rows, std::max(linear.in, linear.out), flops, result.notes);
    Operands operands(session.device, session.stream, 7, sizes.compute);
    const auto random = [&](std::int64_t r, std::int64_t c) { return operands.random(sizes.compute, r, c); };
    const Tensor x = random(linear.rows, linear.in), w = random(linear.out, linear.in),
                 dy = random(linear.rows, linear.out);
    const Pass passes[] = {
        {"forward",
         {.a = x, .b = w, .transpose_b = true, .y = operands.zeros(sizes.compute, linear.rows, linear.out)}},
        {"input gradient", {.a = dy, .b = w, .y = operands.zeros(sizes.compute, linear.rows, linear.in)}},
        {"weight gradient",
         {.a = dy,
          .b = x,
          .transpose_a = true,
          .y = operands.random(DType::kF32, linear.out, linear.in, 0.0, 1.0),
          .accumulate = true},
         true},
    };
    for (const Pass& pass : passes) {
      const auto run = [&] { ops->matmul(session.stream, pass.args); };
      run();
      const bool correct = session.everywhere(right(session, pass));
      const Timing timing = stopwatch.time(run);
      const Tensor& y = pass.args.y;
      const double work = 2.0 * static_cast<double>(y.size()) * static_cast<double>(inner_size(pass.args));
      const double tflops = work / timing.ms / 1e9;
      best = std::max(best, tflops);
      slowest_ms += timing.ms;
      fastest_ms += timing.fastest_ms;
      rows.push_back({{"product", linear.name},
                      {"pass", pass.name},
                      {"m", y.rows},
                      {"n", y.cols},
                      {"k", inner_size(pass.args)},
                      {"time_us", timing.ms * 1e3},
                      {"tflops", tflops},
                      {"fastest_rank_tflops", work / timing.fastest_ms / 1e9},
                      {"correct", correct}});
      if (sizes.compute == DType::kBF16 && session.device.peak_flops() > 0)
        rows.back()["percent_of_peak"] = 100 * tflops * 1e12 / session.device.peak_flops();
    }
  }
  if (session.device.kind() == DeviceKind::kCuda && slowest_ms > kWarnAbove * fastest_ms) {
    result.warnings.push_back(fmt::format("the slowest rank takes {:.2f} times as long as the fastest one",
                                          slowest_ms / fastest_ms));
  }
  for (nlohmann::json& row : rows) {
    row["percent_of_best"] = 100 * row["tflops"].get<double>() / best;
    result.table.add(std::move(row));
  }
  result.notes.push_back(
      "y is [m, n], k the length of its sums; weight gradients are added to float32; "
      "times are of the slowest rank, short bursts: under lasting load clocks may fall");
  return result;
}

}  // namespace octet
