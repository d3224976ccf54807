#include <algorithm>

#include "local_sizes.h"
#include "matmul_passes.h"
#include "octet/bench/session.h"

namespace octet {

namespace {

constexpr double kWarnAbove = 1.1;  ///< time of the slowest rank over that of the fastest

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
  const char* const head = "head";
  const bool gelu = !sizes.shape.gated();
  std::vector<Linear> linears = {
      {"qkv", sizes.tokens, sizes.heads.packed(), h},
      {"attention out", sizes.tokens, h, sizes.heads.query()},
      {gelu ? "up" : "gate, up", sizes.tokens, sizes.inner, h, gelu, false},
      {"down", sizes.tokens, h, sizes.mlp, false, gelu},
      {head, sizes.logits_rows, sizes.vocabulary_rows, h},
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
  /// `speed`: of the matrix units with these operands, as a multiple of bfloat16's.
  const auto measure = [&](const Linear& linear, const char* kind, const std::vector<MatmulPass>& passes,
                           double speed) {
    for (const MatmulPass& pass : passes) {
      const auto run = [&] { ops->matmul(session.stream, pass.args); };
      run();
      const bool correct = session.everywhere(product_right(session, pass));
      const Timing timing = stopwatch.time(run);
      const Tensor& y = pass.args.y;
      const double work = 2.0 * static_cast<double>(y.size()) * static_cast<double>(pass.inner());
      const double tflops = work / timing.ms / 1e9;
      best = std::max(best, tflops);
      slowest_ms += timing.ms;
      fastest_ms += timing.fastest_ms;
      rows.push_back({{"product", std::string(linear.name) + kind},
                      {"pass", pass.name},
                      {"m", y.rows},
                      {"n", y.cols},
                      {"k", pass.inner()},
                      {"time_us", timing.ms * 1e3},
                      {"tflops", tflops},
                      {"fastest_rank_tflops", work / timing.fastest_ms / 1e9},
                      {"correct", correct}});
      if (sizes.compute == DType::kBF16 && session.device.peak_flops() > 0)
        rows.back()["percent_of_peak"] = 100 * tflops * 1e12 / (speed * session.device.peak_flops());
    }
  };
  for (Linear& linear : linears) {
    linear.out = rows_within(session.limits, linear.out, linear.in, 0.0, result.notes);
    const double flops = 2.0 * static_cast<double>(linear.out) * static_cast<double>(linear.in);
    linear.rows =
        rows_within(session.limits, linear.rows, std::max(linear.in, linear.out), flops, result.notes);
    Operands memory(session.device, session.stream, 7, sizes.compute);
    const bool block = linear.name != head;
    measure(linear, "", make_passes(memory, linear, sizes.compute), 1.0);
    Operands more(session.device, session.stream, 7, sizes.compute);
    measure(linear, "", make_fused_passes(more, linear, sizes.compute), 1.0);
    if (sizes.fp8 && block) {
      Operands coded(session.device, session.stream, 7, sizes.compute);
      measure(linear, ", 8 bits", make_float8_passes(*ops, coded, linear, sizes.fp8_by_block), 2.0);
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
      "y is [m, n], k the length of its sums; weight gradients are added to float32; work is that of the "
      "product alone, also where it ends in a GELU or its gradient; "
      "8-bit products are compared with twice the peak of bfloat16; "
      "times are of the slowest rank, short bursts: under lasting load clocks may fall");
  return result;
}

}  // namespace octet
