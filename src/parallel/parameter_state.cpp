// Initial values and the boxes of state that checkpoints and tests see.
#include <algorithm>

#include "octet/base/rng.h"
#include "octet/parallel/parameter_store.h"

namespace octet {

void ParameterStore::initialise(Stream& stream, std::uint64_t seed) {
  for (int bucket = 0; bucket < static_cast<int>(states_.size()); ++bucket) {
    if (!held(bucket)) continue;
    const auto [begin, end] = optimizer_range(bucket);
    for (const PlacedBox& placed : layout_.boxes(bucket, begin, end)) {
      const ParameterRow& row = layout_.table().rows()[static_cast<std::size_t>(placed.row)];
      const std::int64_t size = placed.box.size();
      const Tensor flat = format_.split_masters ? staging(bucket, placed.offset, size)
                                                : state(bucket).master.range(placed.offset - begin, size);
      const Tensor values = flat.reshape(placed.box.rows, placed.box.cols);
      if (row.deviation > 0.0f) {
        ops_.fill_normal(stream, values, row.deviation, key_of(seed, row.name),
                         placed.box.row * row.cols + placed.box.col, row.cols);
      } else {
        ops_.fill(stream, values, row.constant);
      }
    }
    if (format_.split_masters) keep_staged(stream, bucket, StateKind::kMaster);
  }
  publish(stream);
}

const Tensor& ParameterStore::stored(int bucket, StateKind kind) const {
  const BucketState& own = state(bucket);
  OCTET_ASSERT(kind != StateKind::kGradient);
  return kind == StateKind::kMaster        ? own.master
         : kind == StateKind::kFirstMoment ? own.first_moment
                                           : own.second_moment;
}

Tensor ParameterStore::staging(int bucket, std::int64_t offset, std::int64_t size) const {
  return reduced_gradient(bucket).range(offset - optimizer_range(bucket).first, size);
}

NarrowState ParameterStore::narrow_state(int bucket, StateKind kind, int row, std::int64_t offset,
                                         std::int64_t size) const {
  const BucketState& own = state(bucket);
  const std::int64_t at = offset - optimizer_range(bucket).first;
  NarrowState result{stored(bucket, kind).range(at, size), {}};
  if (result.stored.dtype == DType::kI16) {
    result.companion = own.resident.range(at, size);
  } else if (format_.moments == DType::kI8) {
    const auto run = std::find_if(own.runs.begin(), own.runs.end(),
                                  [&](const PlacedRun& placed) { return placed.row == row; });
    OCTET_ASSERT(run != own.runs.end());
    result.begin = run->begin + offset - run->offset;
    const ParameterRun whole{.begin = run->begin};
    const std::int64_t first = whole.block(offset - run->offset),
                       last = whole.block(offset - run->offset + size - 1);
    const Tensor& scales = kind == StateKind::kFirstMoment ? own.first_scale : own.second_scale;
    result.companion = scales.range(
        own.first_blocks[static_cast<std::size_t>(run - own.runs.begin())] + first, last - first + 1);
  }
  return result;
}

void ParameterStore::read(Stream& stream, const StateBox& box, float* host) const {
  Tensor values = box.memory;
  if (!values) {
    const std::int64_t size = box.box.size();
    values = staging(box.bucket, box.offset, size);
    const NarrowState state = narrow_state(box.bucket, box.kind, box.row, box.offset, size);
    if (state.stored.dtype == DType::kBF16) {
      ops_.cast(stream, state.stored, values);
    } else {
      ops_.widen_state(stream, state, values);
    }
  }
  device_.copy(stream, host, values.data, values.bytes());
}

void ParameterStore::write(Stream& stream, const std::vector<StateBox>& boxes,
                           const std::vector<const float*>& host) {
  OCTET_ASSERT(boxes.size() == host.size());
  for (std::size_t i = 0; i < boxes.size(); ++i) {
    const StateBox& box = boxes[i];
    const Tensor to = box.memory ? box.memory : staging(box.bucket, box.offset, box.box.size());
    device_.copy(stream, to.data, host[i], to.bytes());
    const bool last =
        i + 1 == boxes.size() || boxes[i + 1].bucket != box.bucket || boxes[i + 1].kind != box.kind;
    if (last && !box.memory) keep_staged(stream, box.bucket, box.kind);
  }
}

void ParameterStore::keep_staged(Stream& stream, int bucket, StateKind kind) {
  for (const PlacedRun& run : state(bucket).runs) {
    const Tensor values = staging(bucket, run.offset, run.size);
    const NarrowState to = narrow_state(bucket, kind, run.row, run.offset, run.size);
    if (to.stored.dtype == DType::kBF16) {
      ops_.cast(stream, values, to.stored);
    } else {
      ops_.narrow_state(stream, values, to);
    }
  }
}

std::vector<ParameterStore::StateBox> ParameterStore::state_boxes(bool saving) const {
  const std::pair<StateKind, const char*> kinds[] = {{StateKind::kMaster, "parameters/"},
                                                     {StateKind::kFirstMoment, "first_moment/"},
                                                     {StateKind::kSecondMoment, "second_moment/"}};
  std::vector<StateBox> result;
  for (int bucket = 0; bucket < static_cast<int>(states_.size()); ++bucket) {
    if (!held(bucket) || (saving && !speaks(bucket))) continue;
    const std::int64_t base = optimizer_range(bucket).first;
    const auto [begin, end] = saving ? owned_range(bucket) : optimizer_range(bucket);
    const std::vector<PlacedBox> boxes = layout_.boxes(bucket, begin, end);
    for (const auto& [kind, prefix] : kinds) {
      const Tensor& memory = stored(bucket, kind);
      for (const PlacedBox& placed : boxes) {
        if (saving && placed.replicated && ranks_.tensor.rank() != 0) continue;
        const ParameterRow& row = layout_.table().rows()[static_cast<std::size_t>(placed.row)];
        const bool plain = memory.dtype == DType::kF32;
        result.push_back({prefix + row.name, row.rows, row.cols, placed.box, kind, bucket, placed.row,
                          placed.offset,
                          plain ? memory.range(placed.offset - base, placed.box.size()) : Tensor{}});
      }
    }
  }
  return result;
}

std::vector<ParameterStore::StateBox> ParameterStore::saved_boxes() const {
  return state_boxes(true);
}

std::vector<ParameterStore::StateBox> ParameterStore::held_boxes() const {
  return state_boxes(false);
}

std::vector<ParameterStore::StateBox> ParameterStore::gradient_boxes() const {
  std::vector<StateBox> result;
  for (int bucket = 0; bucket < static_cast<int>(states_.size()); ++bucket) {
    if (!held(bucket) || !speaks(bucket)) continue;
    const auto [base, unused] = optimizer_range(bucket);
    const auto [begin, end] = owned_range(bucket);
    for (const PlacedBox& placed : layout_.boxes(bucket, begin, end)) {
      if (placed.replicated && ranks_.tensor.rank() != 0) continue;
      const ParameterRow& row = layout_.table().rows()[static_cast<std::size_t>(placed.row)];
      const Tensor memory = reduced_gradient(bucket).range(placed.offset - base, placed.box.size());
      result.push_back({"gradients/" + row.name, row.rows, row.cols, placed.box, StateKind::kGradient, bucket,
                        placed.row, placed.offset, memory});
    }
  }
  return result;
}

std::vector<ParameterStore::Replica> ParameterStore::replicas() const {
  std::vector<Replica> result;
  for (int bucket = 0; bucket < static_cast<int>(states_.size()); ++bucket) {
    if (!held(bucket)) continue;
    const BucketState& own = state(bucket);
    const std::int64_t begin = optimizer_range(bucket).first;
    if (!slotted(bucket)) {
      for (const PlacedBox& placed : layout_.boxes(bucket, 0, layout_.bucket(bucket).size)) {
        const ParameterRow& row = layout_.table().rows()[static_cast<std::size_t>(placed.row)];
        const bool codes = coded(bucket) && row.rows > 1;
        const Tensor& memory = codes ? own.codes : own.parameters;
        const std::int64_t at = placed.offset - (layout_.bucket(bucket).size - memory.size());
        // Codes of replicated key heads have the scale of each tensor rank's own queries.
        result.push_back({row.name + " (as computed with)", memory.range(at, placed.box.size()),
                          !shared(bucket), !shared(bucket), placed.replicated && !codes, shared(bucket)});
      }
    }
    const bool whole = !stage_.shards_optimizer();
    for (std::size_t i = 0; i < own.runs.size(); ++i) {
      const PlacedRun& run = own.runs[i];
      const std::string& name = layout_.table().rows()[static_cast<std::size_t>(run.row)].name;
      const auto add = [&](const std::string& label, const Tensor& memory, std::int64_t at,
                           std::int64_t size) {
        if (!memory) return;
        result.push_back({label, memory.range(at, size), whole && !shared(bucket), !shared(bucket),
                          run.local.replicated, whole && shared(bucket)});
      };
      const std::int64_t at = run.offset - begin;
      add("parameters/" + name, own.master, at, run.size);
      if (rounded(bucket)) add(name + " (master's upper half)", own.resident, at, run.size);
      add("first_moment/" + name, own.first_moment, at, run.size);
      add("second_moment/" + name, own.second_moment, at, run.size);
      const std::int64_t block = own.first_blocks[i], blocks = own.first_blocks[i + 1] - block;
      add("first_moment/" + name + " (scales)", own.first_scale, block, blocks);
      add("second_moment/" + name + " (scales)", own.second_scale, block, blocks);
    }
  }
  return result;
}

}  // namespace octet
