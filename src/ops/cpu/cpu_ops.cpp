#include "cpu_ops.h"

#include <algorithm>

#include "attention_scratch.h"
#include "blas.h"
#include "matmul_blocks.h"

namespace octet {

CpuOps::CpuOps(int threads) {
  openblas_set_num_threads(std::max(1, threads));
}

void CpuOps::prepare(const Workload& workload) {
  if (workload.compute == DType::kBF16) matmul_scratch_.resize(cpu::kMatmulScratch);
  attention_scratch_.resize(cpu::attention_scratch_size(workload.attention));
}

std::int64_t CpuOps::workspace_bytes() const {
  return static_cast<std::int64_t>((matmul_scratch_.size() + attention_scratch_.size()) * sizeof(float));
}

std::unique_ptr<Ops> make_cpu_ops(int threads) {
  return std::make_unique<CpuOps>(threads);
}

}  // namespace octet
