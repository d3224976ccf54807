#include "octet/parallel/parameter_store.h"

#include <algorithm>

#include "octet/base/rng.h"

namespace octet {

namespace {

/// Of each run, the blocks of codes in those before it; at the end, in all.
std::vector<std::int64_t> moment_blocks(const std::vector<PlacedRun>& runs) {
  std::vector<std::int64_t> first = {0};
  for (const PlacedRun& run : runs)
    first.push_back(first.back() + ParameterRun{.begin = run.begin}.block(run.size - 1) + 1);
  return first;
}

}  // namespace

ParameterStore::ParameterStore(Device& device, Ops& ops, const BucketLayout& layout, ZeroStage stage,
                               DType compute, OptimizerFormat format, int micro_batches,
                               const StoreRanks& ranks, StreamTimer& timer, bool overlaps_update)
    : device_(device),
      ops_(ops),
      layout_(layout),
      stage_(stage),
      format_(format),
      micro_batches_(micro_batches),
      ranks_(ranks),
      timer_(timer),
      reduce_stream_(device.make_stream(true)),
      gather_stream_(device.make_stream(true)),
      update_stream_(overlaps_update ? device.make_stream() : nullptr),
      ready_(device.make_event()) {
  OCTET_ASSERT(!format.split_masters || compute == DType::kBF16);
  reserve(compute);
}

/// Staging buffers and slots: blocks take turns in two, so that one is on the wire while the other is at
/// work; embeddings and an untied head, the largest buckets and never open at once, share a third. A tied
/// embedding has it alone: it is open from the embedding to the end.
int ParameterStore::place_of(int bucket) const {
  const bool edge = bucket == 0 || layout_.bucket(bucket).entries.front().local.rows > 1;
  const bool block = bucket > 0 && bucket + 1 < static_cast<int>(layout_.buckets().size());
  if (edge && !block) return 2;
  int turn = 0;
  for (int other = 1; other < bucket; ++other) turn += held(other) ? 1 : 0;
  return turn % 2;
}

void ParameterStore::reserve(DType compute) {
  struct Handles {
    int parameters, gradients, slice, master, first, second, resident, first_scale, second_scale;
    int codes, scales, largest;
  };
  std::vector<Handles> handles;
  std::int64_t largest_slice = 0;
  std::vector<std::int64_t> place_size(3, 0), slot_size(3, 0), slot_codes(3, 0), slot_scales(3, 0);
  const int count = static_cast<int>(layout_.buckets().size());
  bool any_staged = false, any_slotted = false;
  for (int bucket = 0; bucket < count; ++bucket) {
    const std::int64_t size = layout_.bucket(bucket).size;
    const auto [begin, end] = optimizer_range(bucket);
    Handles h{};
    if (!held(bucket)) {
      handles.push_back(h);
      continue;
    }
    h.parameters = slotted(bucket) ? -1 : parameters_.reserve(compute, 1, gathered_size(bucket));
    if (coded(bucket)) {
      const auto matrices = static_cast<std::int64_t>(layout_.matrices(bucket).size());
      h.largest = parameters_.reserve(DType::kF32, 1, matrices);
      h.codes = slotted(bucket) ? -1 : parameters_.reserve(DType::kE4M3, 1, size);
      h.scales = slotted(bucket) ? -1 : parameters_.reserve(DType::kF32, 1, matrices * kScaleSpacing);
    }
    h.gradients = staged(bucket) ? -1 : gradients_.reserve(DType::kF32, 1, size);
    h.slice = staged(bucket) ? gradients_.reserve(DType::kF32, 1, slice(bucket)) : -1;
    const bool codes = format_.moments == DType::kI8;
    const std::int64_t blocks = codes ? moment_blocks(layout_.runs(bucket, begin, end)).back() : 0;
    h.master = optimizer_.reserve(format_.split_masters ? DType::kI16 : DType::kF32, 1, end - begin);
    h.resident =
        format_.split_masters && rounded(bucket) ? optimizer_.reserve(DType::kBF16, 1, end - begin) : -1;
    h.first = optimizer_.reserve(format_.moments, 1, end - begin);
    h.second = optimizer_.reserve(codes ? DType::kU8 : format_.moments, 1, end - begin);
    h.first_scale = codes ? optimizer_.reserve(DType::kF32, 1, blocks) : -1;
    h.second_scale = codes ? optimizer_.reserve(DType::kF32, 1, blocks) : -1;
    handles.push_back(h);
    largest_slice = std::max(largest_slice, slice(bucket));
    any_staged = any_staged || staged(bucket);
    any_slotted = any_slotted || slotted(bucket);
    const auto reach = [place = static_cast<std::size_t>(place_of(bucket))](auto& sizes, std::int64_t to) {
      sizes[place] = std::max(sizes[place], to);
    };
    reach(place_size, size);
    reach(slot_size, gathered_size(bucket));
    if (coded(bucket)) {
      reach(slot_codes, size);
      reach(slot_scales, static_cast<std::int64_t>(layout_.matrices(bucket).size()) * kScaleSpacing);
    }
  }
  if (any_slotted) {
    for (std::size_t place = 0; place < slot_size.size(); ++place) {
      Slot& slot = slots_.emplace_back();
      slot.handle = parameters_.reserve(compute, 1, slot_size[place]);
      slot.codes = parameters_.reserve(DType::kE4M3, 1, slot_codes[place]);
      slot.scales = parameters_.reserve(DType::kF32, 1, slot_scales[place]);
      slot.gathered = device_.make_event();
      slot.released = device_.make_event();
    }
  }
  if (any_staged) {
    for (const std::int64_t size : place_size) {
      stagings_.push_back({gradients_.reserve(DType::kF32, 1, size), device_.make_event()});
    }
    if (micro_batches_ > 1) incoming_ = gradients_.reserve(DType::kF32, 1, largest_slice);
  }
  parameters_.commit(device_);
  gradients_.commit(device_);
  optimizer_.commit(device_);

  for (int bucket = 0; bucket < count; ++bucket) {
    const Handles& h = handles[static_cast<std::size_t>(bucket)];
    BucketState state;
    state.gathered = device_.make_event();
    state.reduced = device_.make_event();
    state.updated = device_.make_event();
    if (!held(bucket)) {
      states_.push_back(std::move(state));
      continue;
    }
    state.place = place_of(bucket);
    const auto place = static_cast<std::size_t>(state.place);
    const std::int64_t size = layout_.bucket(bucket).size;
    state.parameters = parameters_.tensor(slotted(bucket) ? slots_[place].handle : h.parameters)
                           .range(0, gathered_size(bucket));
    if (coded(bucket)) {
      state.matrices = layout_.matrices(bucket);
      state.codes = parameters_.tensor(slotted(bucket) ? slots_[place].codes : h.codes).range(0, size);
      state.scales = parameters_.tensor(slotted(bucket) ? slots_[place].scales : h.scales);
      state.largest = parameters_.tensor(h.largest);
    }
    if (staged(bucket)) {
      state.gradients = gradients_.tensor(stagings_[place].handle).range(0, size);
      state.gradient_slice = gradients_.tensor(h.slice);
    } else {
      state.gradients = gradients_.tensor(h.gradients);
    }
    state.master = optimizer_.tensor(h.master);
    state.first_moment = optimizer_.tensor(h.first);
    state.second_moment = optimizer_.tensor(h.second);
    const auto [begin, end] = optimizer_range(bucket);
    if (h.resident >= 0) {
      state.resident = optimizer_.tensor(h.resident);
    } else if (!rounded(bucket)) {
      state.resident = state.parameters.range(begin, end - begin);
    }
    state.runs = layout_.runs(bucket, begin, end);
    state.first_blocks = moment_blocks(state.runs);
    if (h.first_scale >= 0) {
      state.first_scale = optimizer_.tensor(h.first_scale);
      state.second_scale = optimizer_.tensor(h.second_scale);
    }
    states_.push_back(std::move(state));
  }
}

std::vector<std::pair<std::string, std::int64_t>> ParameterStore::memory() const {
  return {{"parameters", parameters_.bytes()},
          {"gradients", gradients_.bytes()},
          {"optimizer state", optimizer_.bytes()}};
}

std::pair<std::int64_t, std::int64_t> ParameterStore::owned_range(int bucket) const {
  const int rank = gradient_ranks(bucket).rank();
  return {slice(bucket) * rank, slice(bucket) * (rank + 1)};
}

std::pair<std::int64_t, std::int64_t> ParameterStore::optimizer_range(int bucket) const {
  if (stage_.shards_optimizer()) return owned_range(bucket);
  return {0, layout_.bucket(bucket).size};
}

Tensor ParameterStore::reduced_gradient(int bucket) const {
  if (staged(bucket)) return state(bucket).gradient_slice;
  const auto [begin, end] = optimizer_range(bucket);
  return state(bucket).gradients.range(begin, end - begin);
}

Tensor ParameterStore::gradient(int first, int last) {
  return view(state(layout_.bucket_of(first)).gradients, first, last);
}

void ParameterStore::begin_step(Stream& stream) {
  // Two stages add to a shared embedding, each only where it works; what they do not touch must be zero.
  if (!shared(0) || !held(0)) return;
  await_update(stream, 0);
  ops_.fill(stream, state(0).gradients, 0.0f);
}

bool ParameterStore::accumulates(int bucket) const {
  return shared(bucket) || (!staged(bucket) && micro_batch_ > 0);
}

void ParameterStore::begin_backward(Stream& stream, int bucket, bool reads, bool writes) {
  if (reads) use(stream, bucket, bucket - 1);
  if (!writes) return;
  if (!staged(bucket)) return await_update(stream, bucket);
  timer_.begin(stream);
  stagings_[static_cast<std::size_t>(state(bucket).place)].free->block(stream);
  timer_.end(stream);
  // Gaps hold what another bucket left in this buffer, which must not count in the gradient's norm.
  for (const auto& [begin, end] : layout_.gaps(bucket))
    ops_.fill(stream, state(bucket).gradients.range(begin, end - begin), 0.0f);
}

void ParameterStore::reduce_whole(Stream& reduce, int bucket) {
  BucketState& own = state(bucket);
  if (stage_.shards_optimizer()) {
    const auto [begin, end] = owned_range(bucket);
    const Tensor to = own.gradients.range(begin, end - begin);
    gradient_ranks(bucket).reduce_scatter(reduce, own.gradients, to);
    reduce_copies(reduce, bucket, to);
  } else {
    gradient_ranks(bucket).all_reduce(reduce, own.gradients, ReduceOp::kSum);
  }
  own.reduced->record(reduce);
}

void ParameterStore::reduce_copies(Stream& reduce, int bucket, Tensor slice) {
  if (!shared(bucket) && ranks_.copies.size() > 1) ranks_.copies.all_reduce(reduce, slice, ReduceOp::kSum);
}

void ParameterStore::finish_backward(Stream& stream, int bucket) {
  if ((group_size(bucket) == 1 && ranks_.copies.size() == 1) || shared(bucket)) return;
  if (!staged(bucket) && micro_batch_ + 1 < micro_batches_) return;
  BucketState& own = state(bucket);
  Stream& reduce = *reduce_stream_;
  ready_->record(stream);
  ready_->block(reduce);
  if (!staged(bucket)) return reduce_whole(reduce, bucket);
  const bool add = micro_batch_ > 0;
  const Tensor to = add ? gradients_.tensor(incoming_).range(0, slice(bucket)) : own.gradient_slice;
  await_update(reduce, bucket);
  gradient_ranks(bucket).reduce_scatter(reduce, own.gradients, to);
  reduce_copies(reduce, bucket, to);
  if (add) ops_.add(reduce, to, own.gradient_slice);
  stagings_[static_cast<std::size_t>(own.place)].free->record(reduce);
  own.reduced->record(reduce);
}

void ParameterStore::finish_gradients(Stream& stream, StepScalars* scalars) {
  const int count = static_cast<int>(states_.size());
  if (shared(0) && held(0)) {
    ready_->record(stream);
    ready_->block(*reduce_stream_);
    reduce_whole(*reduce_stream_, 0);
  }
  timer_.begin(stream);
  for (int bucket = 0; bucket < count; ++bucket) state(bucket).reduced->block(stream);
  timer_.end(stream);
  const bool first_of_tensor = ranks_.tensor.rank() == 0;
  for (int bucket = 0; bucket < count; ++bucket) {
    if (!held(bucket)) continue;
    const auto [begin, end] = optimizer_range(bucket);
    const auto [owned_begin, owned_end] = owned_range(bucket);
    const Tensor gradient = reduced_gradient(bucket);
    if (ranks_.tensor.size() > 1) {
      for (const Region& region : layout_.regions(bucket, begin, end)) {
        if (!region.replicated) continue;
        // A gradient that every rank computed whole is taken from one, so that all copies stay bitwise equal.
        const Tensor part = gradient.range(region.begin - begin, region.size());
        if (!region.partial && !first_of_tensor) ops_.fill(stream, part, 0.0f);
        timer_.begin(stream);
        ranks_.tensor.all_reduce(stream, part, ReduceOp::kSum);
        timer_.end(stream);
      }
    }
    if (!speaks(bucket)) continue;
    if (first_of_tensor) {
      ops_.add_square(stream, gradient.range(owned_begin - begin, owned_end - owned_begin), scalars);
      continue;
    }
    for (const Region& region : layout_.regions(bucket, owned_begin, owned_end)) {
      if (!region.replicated)
        ops_.add_square(stream, gradient.range(region.begin - begin, region.size()), scalars);
    }
  }
}

void ParameterStore::update_bucket(Stream& stream, int bucket, const AdamwSettings& settings,
                                   const StepScalars* scalars) {
  const BucketState& own = state(bucket);
  const auto [begin, end] = optimizer_range(bucket);
  const Tensor gradient = reduced_gradient(bucket);
  const auto adamw = [&](std::int64_t at, std::int64_t size, bool decay) {
    return Adamw{own.master.range(at, size),
                 own.first_moment.range(at, size),
                 own.second_moment.range(at, size),
                 gradient.range(at, size),
                 own.resident ? own.resident.range(at, size) : Tensor{},
                 settings.beta1,
                 settings.beta2,
                 settings.epsilon,
                 decay ? settings.weight_decay : 0.0f};
  };
  if (format_.moments == DType::kF32) {
    for (const Region& region : layout_.regions(bucket, begin, end))
      ops_.adamw(stream, adamw(region.begin - begin, region.size(), region.decay), scalars);
    return;
  }
  for (std::size_t i = 0; i < own.runs.size(); ++i) {
    const PlacedRun& run = own.runs[i];
    const ParameterRow& row = layout_.table().rows()[static_cast<std::size_t>(run.row)];
    const Box& box = run.local.box;
    Adamw args = adamw(run.offset - begin, run.size, row.decay);
    args.run = {key_of(settings.seed, "moments/" + row.name), box.row * row.cols + box.col, box.cols,
                row.cols, run.begin};
    if (format_.moments == DType::kI8) {
      const std::int64_t blocks = own.first_blocks[i + 1] - own.first_blocks[i];
      args.first_scale = own.first_scale.range(own.first_blocks[i], blocks);
      args.second_scale = own.second_scale.range(own.first_blocks[i], blocks);
    }
    ops_.adamw(stream, args, scalars);
  }
}

void ParameterStore::update(Stream& stream, const AdamwSettings& settings, const StepScalars* scalars) {
  ++version_;
  Stream& updates = update_stream_ ? *update_stream_ : stream;
  if (update_stream_) {
    ready_->record(stream);
    ready_->block(updates);
  }
  for (int bucket = 0; bucket < static_cast<int>(states_.size()); ++bucket) {
    if (!held(bucket)) continue;
    update_bucket(updates, bucket, settings, scalars);
    if (update_stream_) state(bucket).updated->record(updates);
    gather(updates, bucket);
  }
  if (slots_.empty()) return;
  drop_slots(stream);
  // What the next step begins with.
  const int count = static_cast<int>(states_.size());
  for (int bucket = 0, fetched = 0; bucket < count && fetched < 2; ++bucket) {
    if (!held(bucket) || !slotted(bucket)) continue;
    fetch(bucket);
    ++fetched;
  }
}

}  // namespace octet
