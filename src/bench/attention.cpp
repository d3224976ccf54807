#include <algorithm>

#include "attention_case.h"
#include "local_sizes.h"
#include "octet/bench/session.h"

namespace octet {

namespace {

/// Whether all results of a small problem are those of the CPU operators in float32.
std::pair<bool, bool> small_case_right(BenchSession& session, const LocalSizes& sizes, bool documents) {
  AttentionShape shape = sizes.attention;
  shape.batch = std::min<std::int64_t>(shape.batch, 2);
  shape.sequence = std::min<std::int64_t>(shape.sequence, 96);
  if (shape.keys > 0) shape.keys = 2 * shape.sequence;
  struct Found {
    std::vector<float> out, query, key, value;
  };
  const auto run = [&](Ops& ops, Device& device, Stream& stream, DType compute) {
    Workload work = workload_of(sizes, shape, documents);
    work.compute = compute;
    ops.prepare(work);
    Operands memory(device, stream, 11, sizes.compute);
    const AttentionCase which(memory, shape, compute, documents);
    which.forward(ops, stream);
    which.backward(ops, stream);
    const auto read = [&](const AttentionCase::Part& part) { return to_host(device, stream, part.matrix); };
    return Found{read(which.out), read(which.dquery), read(which.dkey), read(which.dvalue)};
  };
  const std::unique_ptr<Ops> tested = session.backend.make_ops(), plain = make_cpu_ops(1);
  const std::unique_ptr<Device> host = make_cpu_device();
  const std::unique_ptr<Stream> host_stream = host->make_stream();
  const Found found = run(*tested, session.device, session.stream, sizes.compute);
  const Found expected = run(*plain, *host, *host_stream, DType::kF32);
  const double tolerance = 2 * tolerance_of(sizes.compute);
  return {agree(found.out, expected.out, tolerance), agree(found.query, expected.query, tolerance) &&
                                                         agree(found.key, expected.key, tolerance) &&
                                                         agree(found.value, expected.value, tolerance)};
}

}  // namespace

PartResult bench_attention(BenchSession& session) {
  PartResult result{"",
                    ResultTable({{"pass", "pass"},
                                 {"batch", "batch"},
                                 {"queries", "queries"},
                                 {"keys", "keys"},
                                 {"heads", "heads"},
                                 {"kv_heads", "key heads"},
                                 {"head_size", "head size"},
                                 {"time_us", "time us"},
                                 {"tflops", "TFLOP/s", 2},
                                 {"percent_of_peak", "% of peak"},
                                 {"correct", "correct"}}),
                    {},
                    {}};
  const LocalSizes sizes(session);
  const bool documents = session.deck.data.mask_documents;
  result.title =
      fmt::format("causal attention, {}{}", name_of(sizes.compute), documents ? ", documents apart" : "");
  AttentionShape shape = sizes.attention;
  const double flops_a_pair = 4.0 * static_cast<double>(shape.layout.query());
  shape.batch =
      rows_within(session.limits, shape.batch, shape.sequence * shape.layout.packed(), 0.0, result.notes);
  const double flops_a_row =
      flops_a_pair * static_cast<double>(shape.batch) * static_cast<double>(shape.key_rows());
  shape.sequence = rows_within(session.limits, shape.sequence, 2 * shape.batch * shape.layout.packed(),
                               flops_a_row, result.notes);
  if (shape.keys > 0 && shape.sequence < sizes.attention.sequence) shape.keys = 2 * shape.sequence;

  const std::unique_ptr<Ops> ops = session.backend.make_ops();
  ops->prepare(workload_of(sizes, shape, documents));
  Operands memory(session.device, session.stream, 5, sizes.compute);
  const AttentionCase which(memory, shape, sizes.compute, documents);
  const auto small = small_case_right(session, sizes, documents);
  Stopwatch stopwatch = session.stopwatch();
  const auto measure = [&](const char* pass, double flops, bool correct, const std::function<void()>& run) {
    correct = session.everywhere(correct);
    const Timing timing = stopwatch.time(run);
    const double tflops = flops / timing.ms / 1e9;
    nlohmann::json row = {{"pass", pass},
                          {"batch", shape.batch},
                          {"queries", shape.sequence},
                          {"keys", shape.key_rows()},
                          {"heads", shape.layout.heads},
                          {"kv_heads", shape.layout.kv_heads},
                          {"head_size", shape.layout.head_size},
                          {"time_us", timing.ms * 1e3},
                          {"tflops", tflops},
                          {"correct", correct}};
    if (sizes.compute == DType::kBF16 && session.device.peak_flops() > 0)
      row["percent_of_peak"] = 100 * tflops * 1e12 / session.device.peak_flops();
    result.table.add(std::move(row));
  };
  const double forward_flops = flops_a_pair * which.pairs();
  const auto forward = [&] { which.forward(*ops, session.stream); };
  const auto backward = [&] { which.backward(*ops, session.stream); };
  forward();
  measure("forward", forward_flops, small.first && which.forward_right(session.device, session.stream),
          forward);
  backward();
  measure("backward", 2.5 * forward_flops,
          small.second && which.backward_right(session.device, session.stream), backward);
  result.notes.push_back(
      "FLOPs of the pairs that see one another alone: 4 a pair and element of a query in the forward pass, "
      "10 "
      "in the backward pass; correct: rows of these results against sums in float64, and all results of a "
      "small problem against the CPU operators");
  return result;
}

}  // namespace octet
