// Document masks as cuDNN's graphs read them: a limit for every key instead of a start for every query. Moves
// 4 bytes a key; the starts of a sample stay in cache.
#include "attention_problem.cuh"
#include "drivers.h"

namespace octet::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void key_limits_kernel(const std::int32_t* document_starts, std::int64_t sequence,
                                  std::int64_t keys, std::int32_t* limits, std::int64_t stride) {
  const std::int64_t key = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (key >= keys) return;
  Problem sample{};
  sample.sequence = sequence;
  sample.starts = document_starts;
  limits[blockIdx.y * stride + key] =
      static_cast<std::int32_t>(keys - sequence + queries_that_begin_by(sample, blockIdx.y, key));
}

}  // namespace

void document_key_limits(cudaStream_t stream, const AttentionShape& shape, Tensor document_starts,
                         std::int32_t* limits, std::int64_t stride) {
  const dim3 grid(grid_size(divide_up(shape.key_rows(), kThreads)), static_cast<unsigned>(shape.batch));
  key_limits_kernel<<<grid, kThreads, 0, stream>>>(document_starts.as<std::int32_t>(), shape.sequence,
                                                   shape.key_rows(), limits, stride);
  OCTET_CUDA_LAUNCH("document_key_limits");
}

}  // namespace octet::cuda
