#include "attention_forward.h"

#include <algorithm>
#include <limits>

#include "../../runtime/cuda/cuda_check.h"
#include "attention_forward_kernel.cuh"
#include "tensor_maps.h"

namespace octet::hopper {
namespace {

/// Of keys and values that are worked on together: about a third of an H200's cache, which keeps some of them
/// in two places.
constexpr std::int64_t kSectionBytes = 16 << 20;

/// Key heads [first, first + count) that query heads attend with, `group` each in their order; group 0: not
/// evenly.
struct KeyHeads {
  int first, count, group;
};

KeyHeads key_heads_of(const HeadLayout& layout) {
  const auto key_of = [&](int query) { return (query + layout.head_offset) / layout.group; };
  const int first = key_of(0), count = key_of(layout.heads - 1) - first + 1;
  if (layout.heads % count != 0) return {first, count, 0};
  const int group = layout.heads / count;
  for (int query = 0; query < layout.heads; ++query) {
    if (key_of(query) - first != query / group) return {first, count, 0};
  }
  return {first, count, group};
}

// How many tiles the kernel takes, every one of which asks for one more.
template <int kHead>
unsigned launch(cudaStream_t stream, forward::Problem problem, int multiprocessors) {
  using P = forward::Plan<kHead>;
  const int chunks = (problem.sequence + forward::kRows - 1) / forward::kRows;
  problem.query_tiles = (chunks + P::kGroups - 1) / P::kGroups;
  const std::int64_t pair_bytes = std::int64_t{problem.keys} * kHead * 4;
  problem.section =
      static_cast<int>(std::clamp(kSectionBytes / pair_bytes, std::int64_t{1}, std::int64_t{problem.pairs}));
  const auto kernel = forward::attention_forward_kernel<kHead>;
  OCTET_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, P::kSharedBytes));
  const int tiles = problem.pairs * problem.group * problem.query_tiles;
  const int grid = std::min(multiprocessors, tiles);
  kernel<<<static_cast<unsigned>(grid), P::kThreads, P::kSharedBytes, stream>>>(problem);
  OCTET_CUDA_LAUNCH("attention_forward_kernel");
  return static_cast<unsigned>(tiles);
}

}  // namespace

AttentionForward::AttentionForward() {
  int device = 0, major = 0, minor = 0;
  OCTET_CUDA(cudaGetDevice(&device));
  OCTET_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  OCTET_CUDA(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
  if (major != 9 || minor != 0) return;
  OCTET_CUDA(cudaDeviceGetAttribute(&multiprocessors_, cudaDevAttrMultiProcessorCount, device));
  unsigned* counter = nullptr;
  OCTET_CUDA(cudaMalloc(&counter, sizeof *counter));
  taken_.reset(counter);
  OCTET_CUDA(cudaMemset(counter, 0, sizeof *counter));
  OCTET_CUDA(cudaDeviceSynchronize());  // other streams do not wait for the default one
}

bool AttentionForward::takes(const AttentionShape& shape, const AttentionOperands& operands,
                             const SampleRows& out) const {
  const HeadLayout& layout = shape.layout;
  constexpr std::int64_t kMost = std::numeric_limits<int>::max() / 2;
  if (multiprocessors_ == 0 || (layout.head_size != 64 && layout.head_size != 128)) return false;
  if (operands.dtype != DType::kBF16 || operands.document_starts || !(shape.scale > 0.0f)) return false;
  if (shape.key_rows() > kMost || shape.batch * layout.heads * shape.sequence / forward::kRows > kMost)
    return false;
  for (const SampleRows& rows : {operands.query, operands.key, operands.value, out}) {
    if (!copyable(rows, shape.batch)) return false;
  }
  return key_heads_of(layout).group > 0;
}

void AttentionForward::run(cudaStream_t stream, const AttentionShape& shape,
                           const AttentionOperands& operands, const SampleRows& out, Tensor statistics) {
  const HeadLayout& layout = shape.layout;
  const KeyHeads heads = key_heads_of(layout);
  const std::int64_t keys = shape.key_rows(), size = layout.head_size;
  const auto map_of = [&](SampleRows rows, std::int64_t count, int first_head, int head_count, int box_rows) {
    rows.data = static_cast<std::byte*>(rows.data) + first_head * size * 2;
    return sample_map(rows, shape.batch, count, head_count * size, box_rows);
  };
  forward::Problem problem{};
  problem.query = map_of(operands.query, shape.sequence, 0, layout.heads, 64);
  problem.key = map_of(operands.key, keys, heads.first, heads.count, 64);
  problem.value = map_of(operands.value, keys, heads.first, heads.count, 64);
  problem.out = map_of(out, shape.sequence, 0, layout.heads, 16);
  problem.statistics = statistics.as<float>();
  problem.scale = shape.scale;
  problem.sequence = static_cast<int>(shape.sequence);
  problem.keys = static_cast<int>(keys);
  problem.kv_heads = heads.count;
  problem.group = heads.group;
  problem.pairs = static_cast<int>(shape.batch) * heads.count;
  problem.taken = taken_.get();
  problem.taken_before = taken_before_;
  if (size == 64) {
    taken_before_ += launch<64>(stream, problem, multiprocessors_);
  } else {
    taken_before_ += launch<128>(stream, problem, multiprocessors_);
  }
}

}  // namespace octet::hopper
