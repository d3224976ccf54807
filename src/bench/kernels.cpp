#include <algorithm>

#include "kernel_set.h"
#include "octet/bench/session.h"

namespace octet {

namespace {

constexpr std::int64_t kSmallTokens = 48, kSmallLogitsRows = 5, kSmallTable = 256, kSmallElements = 3 << 10;

/// Of each kernel: whether a small instance, with the model's widths, gives what the CPU operators give in
/// float32 from the same numbers.
std::vector<bool> small_instances_right(BenchSession& session, const LocalSizes& sizes) {
  KernelCounts counts;
  counts.tokens = counts.norm_tokens = kSmallTokens;
  counts.logits_rows = kSmallLogitsRows;
  counts.table_rows = kSmallTable;
  counts.elements = kSmallElements;
  AttentionShape attention = sizes.attention;
  attention.batch = 1;
  attention.sequence = kSmallTokens;
  attention.keys = 0;
  const auto prepared = [&](std::unique_ptr<Ops> ops, DType compute) {
    Workload work = workload_of(sizes, attention, false);
    work.compute = compute;
    work.tokens = std::max(work.tokens, kSmallTokens);
    ops->prepare(work);
    return ops;
  };
  const std::unique_ptr<Device> host = make_cpu_device();
  const std::unique_ptr<Stream> host_stream = host->make_stream();
  const std::unique_ptr<Ops> tested = prepared(session.backend.make_ops(), sizes.compute),
                             plain = prepared(make_cpu_ops(1), DType::kF32);
  Operands own(session.device, session.stream, 13, sizes.compute),
      other(*host, *host_stream, 13, sizes.compute);
  const std::vector<Kernel> kernels = make_kernels(*tested, own, sizes, counts, sizes.compute);
  const std::vector<Kernel> references = make_kernels(*plain, other, sizes, counts, DType::kF32);
  std::vector<bool> right;
  for (std::size_t i = 0; i < kernels.size(); ++i) {
    kernels[i].run();
    references[i].run();
    const auto found = results_of(own, kernels[i]), expected = results_of(other, references[i]);
    bool good = true;
    for (std::size_t r = 0; r < found.size(); ++r) {
      const bool scalars = r == kernels[i].results.size();
      const DType type = scalars ? DType::kF32 : kernels[i].results[r].accuracy;
      good = agree(found[r], expected[r], tolerance_of(type)) && good;
    }
    right.push_back(session.everywhere(good));
  }
  return right;
}

/// The copy from device memory to device memory that kernels are compared with.
class Copy {
 public:
  Copy(BenchSession& session, Operands& memory)
      : session_(session),
        from_(memory.random(DType::kF32, 1, session.limits.copy_bytes / 4)),
        to_(memory.zeros(DType::kF32, 1, session.limits.copy_bytes / 4)) {}
  double bytes() const { return 2.0 * static_cast<double>(from_.bytes()); }
  void run() { session_.device.copy(session_.stream, to_.data, from_.data, from_.bytes()); }
  bool right() const {
    return to_host(session_.device, session_.stream, to_) == to_host(session_.device, session_.stream, from_);
  }

 private:
  BenchSession& session_;
  Tensor from_, to_;
};

}  // namespace

PartResult bench_kernels(BenchSession& session) {
  PartResult result{"",
                    ResultTable({{"kernel", "kernel"},
                                 {"mb", "moved MB", 2},
                                 {"time_us", "time us"},
                                 {"gb_s", "GB/s"},
                                 {"percent_of_copy", "% of copy", 0},
                                 {"correct", "correct"}}),
                    {},
                    {}};
  const LocalSizes sizes(session);
  const BenchLimits& limits = session.limits;
  KernelCounts counts;
  const std::int64_t widest = std::max({sizes.inner, sizes.heads.packed(), sizes.shape.hidden});
  counts.tokens = rows_within(limits, sizes.tokens, widest, 0.0, result.notes);
  counts.norm_tokens = rows_within(limits, sizes.norm_tokens, widest, 0.0, result.notes);
  counts.logits_rows = rows_within(limits, sizes.logits_rows, sizes.vocabulary_rows, 0.0, result.notes);
  counts.table_rows = rows_within(limits, sizes.vocabulary_rows, sizes.shape.hidden, 0.0, result.notes);
  counts.elements = limits.copy_bytes / 16;
  result.title =
      fmt::format("operators bound by memory, {} tokens, {}", counts.tokens, name_of(sizes.compute));

  const std::vector<bool> right = small_instances_right(session, sizes);
  Stopwatch stopwatch = session.stopwatch();
  double copy_rate = 0.0;
  const auto measure = [&](const char* name, double bytes, bool correct, const std::function<void()>& run) {
    const Timing timing = stopwatch.time(run);
    const double rate = bytes / timing.ms / 1e6;
    if (copy_rate == 0.0) copy_rate = rate;
    result.table.add({{"kernel", name},
                      {"mb", bytes / 1e6},
                      {"time_us", timing.ms * 1e3},
                      {"gb_s", rate},
                      {"percent_of_copy", 100 * rate / copy_rate},
                      {"correct", correct}});
  };
  {
    Operands memory(session.device, session.stream, 17, DType::kF32);
    Copy copy(session, memory);
    copy.run();
    const bool copied = session.everywhere(copy.right());
    measure("copy", copy.bytes(), copied, [&] { copy.run(); });
  }
  const std::unique_ptr<Ops> ops = session.backend.make_ops();
  AttentionShape attention = sizes.attention;
  attention.batch = 1;
  attention.sequence = std::min<std::int64_t>(attention.sequence, 64);
  attention.keys = 0;
  ops->prepare(workload_of(sizes, attention, false));
  Operands memory(session.device, session.stream, 17, sizes.compute);
  const std::vector<Kernel> kernels = make_kernels(*ops, memory, sizes, counts, sizes.compute);
  for (std::size_t i = 0; i < kernels.size(); ++i)
    measure(kernels[i].name, kernels[i].bytes, right[i], kernels[i].run);
  result.notes.push_back(
      "moved: what an operator must read and write once; copy: of device memory to device memory, read and "
      "written; correct: a small instance of the same widths against the CPU operators");
  return result;
}

}  // namespace octet
