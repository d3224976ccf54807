#include "octet/bench/session.h"

#include <limits>

namespace octet {

BenchLimits default_limits(DeviceKind kind) {
  constexpr std::int64_t kMiB = 1 << 20;
  BenchLimits limits;
  const bool gpu = kind == DeviceKind::kCuda;
  limits.max_bytes = gpu ? 1024 * kMiB : 4 * kMiB;
  limits.io_bytes = gpu ? 1024 * kMiB : 16 * kMiB;
  limits.seconds = gpu ? 0.2 : 0.02;
  limits.flops = gpu ? std::numeric_limits<double>::infinity() : 1e8;
  limits.elements = gpu ? std::numeric_limits<std::int64_t>::max() : 4 * kMiB;
  limits.copy_bytes = gpu ? 1024 * kMiB : 16 * kMiB;
  limits.steps = gpu ? 7 : 3;
  return limits;
}

bool BenchSession::everywhere(bool here) const {
  int all = here ? 1 : 0;
  MPI_Allreduce(MPI_IN_PLACE, &all, 1, MPI_INT, MPI_MIN, world.ranks());
  return all != 0;
}

const std::vector<BenchPart>& bench_parts() {
  static const std::vector<BenchPart> all = {
      {"comm", "collectives and messages over each axis of the layout", bench_comm},
      {"matmul", "the matrix products of a layer and the head", bench_matmul},
      {"attention", "forward and backward pass of attention", bench_attention},
      {"kernels", "the operators that memory bandwidth bounds", bench_kernels},
      {"io", "reading tokens, writing and reading checkpoints, against the raw disk", bench_io},
      {"step", "one training step by phases", bench_step},
  };
  return all;
}

}  // namespace octet
