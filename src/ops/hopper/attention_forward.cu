#include "attention_forward.h"

#include <algorithm>
#include <limits>

#include "../../runtime/cuda/cuda_check.h"
#include "../attention_heads.h"
#include "attention_forward_kernel.cuh"
#include "hopper_gpu.h"
#include "tensor_maps.h"

namespace octet::hopper {
namespace {

/// Of keys and values that are worked on together: about a third of an H200's cache, which keeps some of them
/// in two places.
constexpr std::int64_t kSectionBytes = 16 << 20;

// How many numbers the kernel takes from the counter: each of its tiles asks for one more.
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

AttentionForward::AttentionForward() : multiprocessors_(hopper_multiprocessors()) {
  if (multiprocessors_ > 0) taken_ = make_work_counter();
}

bool AttentionForward::takes(const AttentionShape& shape) const {
  const HeadLayout& layout = shape.layout;
  constexpr std::int64_t kMost = std::numeric_limits<int>::max() / 2;
  if (multiprocessors_ == 0 || (layout.head_size != 64 && layout.head_size != 128)) return false;
  const std::int64_t chunks = (shape.sequence + forward::kRows - 1) / forward::kRows;
  if (shape.key_rows() > kMost || shape.batch * layout.heads * chunks > kMost) return false;
  return shape.scale > 0.0f && key_heads_of(layout).group > 0;
}

bool AttentionForward::takes(const AttentionShape& shape, const AttentionOperands& operands,
                             const SampleRows& out) const {
  if (operands.dtype != DType::kBF16 || operands.document_starts || !takes(shape)) return false;
  for (const SampleRows& rows : {operands.query, operands.key, operands.value, out}) {
    if (!rows_begin_at_16_bytes(rows, shape.batch)) return false;
  }
  return true;
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
