// Initial values and the boxes of state that checkpoints and tests see.
#include "octet/base/rng.h"
#include "octet/parallel/parameter_store.h"

namespace octet {

void ParameterStore::initialise(Stream& stream, std::uint64_t seed) {
  for (int bucket = 0; bucket < static_cast<int>(states_.size()); ++bucket) {
    if (!held(bucket)) continue;
    const auto [begin, end] = optimizer_range(bucket);
    for (const PlacedBox& placed : layout_.boxes(bucket, begin, end)) {
      const ParameterRow& row = layout_.table().rows()[static_cast<std::size_t>(placed.row)];
      const Tensor values = state(bucket)
                                .master.range(placed.offset - begin, placed.box.size())
                                .reshape(placed.box.rows, placed.box.cols);
      if (row.deviation > 0.0f) {
        ops_.fill_normal(stream, values, row.deviation, key_of(seed, row.name),
                         placed.box.row * row.cols + placed.box.col, row.cols);
      } else {
        ops_.fill(stream, values, row.constant);
      }
    }
  }
  publish(stream);
}

std::vector<ParameterStore::StateBox> ParameterStore::state_boxes(bool saving) const {
  std::vector<StateBox> result;
  for (int bucket = 0; bucket < static_cast<int>(states_.size()); ++bucket) {
    if (!held(bucket) || (saving && !speaks(bucket))) continue;
    const auto [base, unused] = optimizer_range(bucket);
    const auto [begin, end] = saving ? owned_range(bucket) : optimizer_range(bucket);
    const BucketState& own = state(bucket);
    for (const PlacedBox& placed : layout_.boxes(bucket, begin, end)) {
      if (saving && placed.replicated && ranks_.tensor.rank() != 0) continue;
      const ParameterRow& row = layout_.table().rows()[static_cast<std::size_t>(placed.row)];
      const std::int64_t at = placed.offset - base, size = placed.box.size();
      result.push_back(
          {"parameters/" + row.name, row.rows, row.cols, placed.box, own.master.range(at, size)});
      result.push_back(
          {"first_moment/" + row.name, row.rows, row.cols, placed.box, own.first_moment.range(at, size)});
      result.push_back(
          {"second_moment/" + row.name, row.rows, row.cols, placed.box, own.second_moment.range(at, size)});
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
      result.push_back({"gradients/" + row.name, row.rows, row.cols, placed.box, memory});
    }
  }
  return result;
}

std::vector<ParameterStore::Replica> ParameterStore::replicas() const {
  std::vector<Replica> result;
  for (int bucket = 0; bucket < static_cast<int>(states_.size()); ++bucket) {
    if (!held(bucket)) continue;
    const BucketState& own = state(bucket);
    const auto [begin, end] = optimizer_range(bucket);
    if (!slotted(bucket)) {
      for (const PlacedBox& placed : layout_.boxes(bucket, 0, layout_.bucket(bucket).size)) {
        const std::string& name = layout_.table().rows()[static_cast<std::size_t>(placed.row)].name;
        result.push_back({name + " (as computed with)",
                          own.parameters.range(placed.offset, placed.box.size()), !shared(bucket),
                          !shared(bucket), placed.replicated, shared(bucket)});
      }
    }
    for (const PlacedBox& placed : layout_.boxes(bucket, begin, end)) {
      const std::string& name = layout_.table().rows()[static_cast<std::size_t>(placed.row)].name;
      const std::int64_t at = placed.offset - begin, size = placed.box.size();
      const auto add = [&](const char* kind, Tensor memory) {
        const bool whole = !stage_.shards_optimizer();
        result.push_back({kind + name, memory.range(at, size), whole && !shared(bucket), !shared(bucket),
                          placed.replicated, whole && shared(bucket)});
      };
      add("parameters/", own.master);
      add("first_moment/", own.first_moment);
      add("second_moment/", own.second_moment);
    }
  }
  return result;
}

}  // namespace octet
