// How parameters come to the layers: gathered after an update, or into slots for use.
#include <algorithm>

#include "octet/parallel/parameter_store.h"

namespace octet {

Tensor ParameterStore::view(Tensor flat, int first, int last) const {
  const BucketEntry& begin = layout_.entry(first);
  std::int64_t rows = 0, cols = 0;
  for (int row = first; row <= last; ++row) {
    const LocalParameter& local = layout_.entry(row).local;
    const bool vector = layout_.table().rows()[static_cast<std::size_t>(row)].rows == 1;
    OCTET_ASSERT(row == first || layout_.table().rows()[static_cast<std::size_t>(row)].follows);
    rows = vector ? 1 : rows + local.rows;
    cols = vector ? cols + local.cols : local.cols;
  }
  const std::int64_t left_out = layout_.bucket(layout_.bucket_of(first)).size - flat.size();
  return flat.range(begin.offset - left_out, rows * cols).reshape(rows, cols);
}

Tensor ParameterStore::parameter(int first, int last) {
  return view(state(layout_.bucket_of(first)).parameters, first, last);
}

LinearWeight ParameterStore::weight(int first, int last) {
  const int bucket = layout_.bucket_of(first);
  if (!coded(bucket)) return {parameter(first, last)};
  const BucketState& own = state(bucket);
  const auto matrix = std::find_if(own.matrices.begin(), own.matrices.end(),
                                   [&](const PlacedMatrix& placed) { return placed.row == first; });
  OCTET_ASSERT(matrix != own.matrices.end());
  const std::int64_t number = matrix - own.matrices.begin();
  return {view(own.codes, first, last), own.scales.range(number * kScaleSpacing, 1),
          own.largest.range(number, 1)};
}

void ParameterStore::begin_forward(Stream& stream, int bucket) {
  use(stream, bucket, bucket + 1);
}

void ParameterStore::use(Stream& stream, int bucket, int next) {
  if (slotted(bucket)) {
    // All that reads the bucket before this one is queued.
    if (in_use_ >= 0 && in_use_ != bucket) slot_of(in_use_).released->record(stream);
    in_use_ = bucket;
    fetch(bucket);
    // The backward pass needs no embedding.
    const bool fetches = next > 0 && next < static_cast<int>(states_.size()) && held(next) && slotted(next);
    if (fetches && state(next).place != state(bucket).place) fetch(next);
  }
  if (!slotted(bucket)) await_update(stream, bucket);
  if (!gathers(bucket)) return;
  timer_.begin(stream);
  (slotted(bucket) ? slot_of(bucket).gathered : state(bucket).gathered)->block(stream);
  timer_.end(stream);
}

void ParameterStore::fetch(int bucket) {
  Slot& slot = slot_of(bucket);
  if (slot.holds == bucket) return;
  slot.holds = bucket;
  Stream& gather = *gather_stream_;
  // Every slot is released after an update was queued, so waiting for its last reader is waiting for the
  // masters too, unless they are updated on another stream.
  slot.released->block(gather);
  await_update(gather, bucket);
  collect(gather, bucket);
  slot.gathered->record(gather);
}

void ParameterStore::collect(Stream& gather, int bucket) {
  if (coded(bucket)) collect_codes(gather, bucket);
  const BucketState& own = state(bucket);
  Communicator& ranks = parameter_ranks(bucket);
  const std::int64_t size = own.parameters.size() / group_size(bucket), begin = slice(bucket) - size;
  Tensor part;
  if (own.resident) {
    part = own.resident.range(begin, size);
  } else {
    part = own.parameters.range(size * ranks.rank(), size);
    ops_.cast(gather, own.master.range(begin, size), part);
  }
  ranks.all_gather(gather, part, own.parameters);
}

std::int64_t ParameterStore::gathered_part(int bucket) const {
  if (!coded(bucket)) return slice(bucket);
  const PlacedMatrix last = layout_.matrices(bucket).back();
  return std::min(slice(bucket), layout_.bucket(bucket).size - (last.offset + last.size));
}

std::pair<std::int64_t, std::int64_t> ParameterStore::own_run(int bucket, std::size_t number) const {
  const PlacedMatrix& matrix = state(bucket).matrices[number];
  const auto [begin, end] = owned_range(bucket);
  const std::int64_t first = std::clamp(matrix.offset, begin, end);
  const std::int64_t last = std::clamp(matrix.offset + matrix.size, begin, end);
  return {first - begin, last - first};
}

void ParameterStore::measure_matrices(Stream& gather, int bucket) {
  BucketState& own = state(bucket);
  if (own.measured == version_) return;
  own.measured = version_;
  const Tensor& part = own.resident ? own.resident : own.master;
  ops_.fill(gather, own.largest, 0.0f);
  for (std::size_t i = 0; i < own.matrices.size(); ++i) {
    const auto [first, size] = own_run(bucket, i);
    if (size > 0) {
      ops_.largest_magnitude(gather, part.range(first, size),
                             own.largest.range(static_cast<std::int64_t>(i), 1));
    }
  }
  parameter_ranks(bucket).all_reduce(gather, own.largest, ReduceOp::kMax);
}

void ParameterStore::collect_codes(Stream& gather, int bucket) {
  measure_matrices(gather, bucket);
  const BucketState& own = state(bucket);
  const Tensor& part = own.resident ? own.resident : own.master;
  const auto [begin, end] = owned_range(bucket);
  const Tensor codes = own.codes.range(begin, end - begin);
  const std::size_t count = own.matrices.size(), before = static_cast<std::size_t>(bucket - 1) * count;
  OCTET_ASSERT(scaled_for_.empty() || scaled_for_.size() == (layout_.buckets().size() - 2) * count);
  for (std::size_t i = 0; i < count; ++i) {
    const auto number = static_cast<std::int64_t>(i);
    const auto [first, size] = own_run(bucket, i);
    Quantize args;
    args.from = part.range(first, size);
    args.largest = scaled_for_.empty() ? own.largest.range(number, 1) : scaled_for_.at(before + i);
    args.codes = codes.range(first, size);
    args.scales.values = own.scales.range(number * kScaleSpacing, 1);
    ops_.quantize(gather, args);
  }
  parameter_ranks(bucket).all_gather(gather, codes, own.codes);
}

void ParameterStore::drop_slots(Stream& stream) {
  for (Slot& slot : slots_) {
    slot.holds = -1;
    slot.released->record(stream);
  }
  in_use_ = -1;
  // Both stages of a shared embedding gather it at the same point of a step.
  if (shared(0) && held(0) && slotted(0)) fetch(0);
}

void ParameterStore::settle(Stream& stream) {
  for (int bucket = 0; bucket < static_cast<int>(states_.size()); ++bucket) {
    if (!held(bucket)) continue;
    await_update(stream, bucket);
    if (!slotted(bucket)) state(bucket).gathered->block(stream);
  }
}

void ParameterStore::gather(Stream& stream, int bucket) {
  if (!gathers(bucket) || slotted(bucket)) return;
  ready_->record(stream);
  ready_->block(*gather_stream_);
  collect(*gather_stream_, bucket);
  state(bucket).gathered->record(*gather_stream_);
}

void ParameterStore::publish(Stream& stream) {
  ++version_;
  for (int bucket = 0; bucket < static_cast<int>(states_.size()); ++bucket) {
    if (!held(bucket) || slotted(bucket)) continue;
    if (!format_.split_masters && !rounded(bucket))
      ops_.cast(stream, state(bucket).master, state(bucket).resident);
    gather(stream, bucket);
  }
  if (!slots_.empty()) drop_slots(stream);
}

}  // namespace octet
