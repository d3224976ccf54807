#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "octet/bench/stopwatch.h"
#include "octet/bench/table.h"
#include "octet/comm/communicator.h"
#include "octet/config/deck.h"
#include "octet/ops/ops.h"
#include "octet/runtime/device_choice.h"
#include "octet/runtime/world.h"

namespace octet {

/// How large and how long measurements are.
struct BenchLimits {
  std::int64_t max_bytes = 0;   ///< largest message of `comm`
  std::int64_t io_bytes = 0;    ///< of the state that `io` writes, a rank
  double seconds = 0.0;         ///< of one measurement
  double flops = 0.0;           ///< of one product or attention pass: rows are left out above it
  std::int64_t elements = 0;    ///< of one operand: rows are left out above it
  std::int64_t copy_bytes = 0;  ///< of the copy that kernels are compared with
  int steps = 0;                ///< training steps that are measured
};

/// GPUs: whole shapes, messages up to 1 GiB. CPU: what a core does in a fraction of a second.
BenchLimits default_limits(DeviceKind kind);

/// Makes what is measured, so that a test can put a faulty one in its place.
struct BenchBackend {
  std::function<std::unique_ptr<Ops>()> make_ops;
  std::function<std::unique_ptr<Communicator>(MPI_Comm ranks, const std::string& name)> make_communicator;
};

/// What every part of the bench works with. The deck is resolved.
struct BenchSession {
  const World& world;
  const Deck& deck;
  Device& device;
  bool shared_device = false;
  BenchBackend backend;
  BenchLimits limits;
  Stream& stream;

  Stopwatch stopwatch() const { return {device, stream, world.ranks(), limits.seconds}; }
  DType compute() const { return deck.precision.compute == "bf16" ? DType::kBF16 : DType::kF32; }
  /// Collective: whether it is so on every rank.
  bool everywhere(bool here) const;
};

/// What a part found: the same on every rank.
struct PartResult {
  std::string title;  ///< what was measured on what, in one line
  ResultTable table;
  std::vector<std::string> notes, warnings;
};

/// One part of the bench.
struct BenchPart {
  std::string name, summary;
  PartResult (*run)(BenchSession& session);
};

/// All parts, in the order in which they run.
const std::vector<BenchPart>& bench_parts();

PartResult bench_comm(BenchSession& session);
PartResult bench_matmul(BenchSession& session);
PartResult bench_attention(BenchSession& session);
PartResult bench_kernels(BenchSession& session);
PartResult bench_io(BenchSession& session);
PartResult bench_step(BenchSession& session);

}  // namespace octet
