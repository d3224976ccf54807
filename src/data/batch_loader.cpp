#include "octet/data/batch_loader.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <numeric>
#include <span>
#include <thread>

#include "octet/base/error.h"

namespace octet {
namespace {

/// Writes the numbers 0 ... ids.size() - 1 sorted by id, equal ids in rising order: a counting sort.
void sort_by_id(std::span<const std::int32_t> ids, std::int32_t* order) {
  const std::int32_t largest = ids.empty() ? 0 : *std::max_element(ids.begin(), ids.end());
  std::vector<std::int32_t> place(static_cast<std::size_t>(largest) + 2, 0);
  for (const std::int32_t id : ids) ++place[static_cast<std::size_t>(id) + 1];
  std::partial_sum(place.begin(), place.end(), place.begin());
  for (std::size_t i = 0; i < ids.size(); ++i)
    order[place[static_cast<std::size_t>(ids[i])]++] = static_cast<std::int32_t>(i);
}

}  // namespace

std::int64_t samples_in(const TokenFile& file, std::int64_t sequence) {
  OCTET_ASSERT(sequence > 0);
  return std::max<std::int64_t>(0, file.info().tokens - 1) / sequence;
}

void pack_micro_batch(const BatchCut& cut, const std::vector<SampleArrays>& samples, std::int32_t* packed) {
  const std::int64_t tokens = cut.tokens(), parts = cut.context_size > 1 ? 2 : 1,
                     run = cut.local_sequence() / parts;
  const std::int64_t begins[] = {cut.context_rank * run, (2 * cut.context_size - 1 - cut.context_rank) * run};
  std::int32_t *ids = packed, *targets = packed + tokens, *positions = packed + 2 * tokens,
               *starts = packed + 5 * tokens;
  for (std::size_t j = 0; j < samples.size(); ++j) {
    const SampleArrays& sample = samples[j];
    for (std::int64_t part = 0; part < parts; ++part) {
      const std::int64_t from = begins[part];
      ids = std::copy_n(sample.ids.begin() + from, run, ids);
      targets = std::copy_n(sample.targets.begin() + from, run, targets);
      positions = std::copy_n(sample.positions.begin() + from, run, positions);
      const std::int64_t row =
          part * static_cast<std::int64_t>(samples.size()) + static_cast<std::int64_t>(j);
      std::copy_n(sample.starts.begin() + from, run, starts + row * run);
    }
  }
  sort_by_id({packed, static_cast<std::size_t>(tokens)}, packed + 3 * tokens);
  sort_by_id({packed + 2 * tokens, static_cast<std::size_t>(tokens)}, packed + 4 * tokens);
}

namespace {

/// Positions and starts of a sample that begins at token `begin`, whose documents do not see one another.
void separate_documents(const TokenFile& file, std::int64_t begin, SampleArrays& sample) {
  const std::span<const std::uint64_t> offsets = file.offsets();
  const auto sequence = static_cast<std::int64_t>(sample.ids.size());
  // The first document boundary behind the sample's first token.
  auto boundary = std::upper_bound(offsets.begin(), offsets.end(), static_cast<std::uint64_t>(begin));
  std::int64_t start = 0;
  for (std::int64_t i = 0; i < sequence; ++i) {
    const auto at = static_cast<std::size_t>(i);
    const auto token = static_cast<std::uint64_t>(begin + i);
    if (boundary != offsets.end() && token == *boundary) start = i;
    while (boundary != offsets.end() && *boundary <= token) ++boundary;
    sample.positions[at] = static_cast<std::int32_t>(i - start);
    sample.starts[at] = static_cast<std::int32_t>(start);
    if (boundary != offsets.end() && *boundary == token + 1) sample.targets[at] = -1;
  }
}

SampleArrays read_sample(const TokenFile& file, const BatchCut& cut, std::int64_t number) {
  const auto sequence = static_cast<std::size_t>(cut.sequence);
  SampleArrays sample;
  sample.ids.assign(sequence, 0);
  sample.targets.assign(sequence, -1);
  sample.positions.resize(sequence);
  std::iota(sample.positions.begin(), sample.positions.end(), 0);
  sample.starts.assign(sequence, 0);
  if (number < 0) return sample;
  const std::int64_t begin = number * cut.sequence;
  std::vector<std::int32_t> text(sequence + 1);
  std::vector<std::uint8_t> counts(sequence);  // 1: the target counts in the loss
  file.read(begin, text);
  file.check_range(begin, text, file.info().vocabulary);
  file.read_mask(begin + 1, counts);
  std::copy_n(text.begin(), sequence, sample.ids.begin());
  for (std::size_t i = 0; i < sequence; ++i) sample.targets[i] = counts[i] != 0 ? text[i + 1] : -1;
  if (cut.mask_documents) separate_documents(file, begin, sample);
  return sample;
}

}  // namespace

void fill_micro_batch(const TokenFile& file, const BatchCut& cut, const std::vector<std::int64_t>& samples,
                      std::int32_t* packed) {
  std::vector<SampleArrays> arrays;
  for (const std::int64_t number : samples) arrays.push_back(read_sample(file, cut, number));
  pack_micro_batch(cut, arrays, packed);
}

struct BatchLoader::Impl {
  /// The micro-batches of one step in page-locked memory.
  struct Slot {
    std::unique_ptr<Buffer> memory;
    std::vector<MicroBatch> batches;
  };

  const TokenFile& file;
  const SampleOrder order;
  const BatchCut cut;
  const std::int64_t consumed;
  std::vector<Slot> slots;
  double waited_ms = 0.0;

  std::mutex mutex;  ///< guards what follows
  std::condition_variable changed;
  std::int64_t filled = 0;  ///< steps read
  std::int64_t given = 0;   ///< steps handed out
  bool stop = false;
  std::exception_ptr failure;

  std::thread thread;

  Impl(const TokenFile& tokens, const SampleOrder& sample_order, const BatchCut& batch_cut,
       std::int64_t samples_consumed)
      : file(tokens), order(sample_order), cut(batch_cut), consumed(samples_consumed) {}

  ~Impl() {
    {
      const std::lock_guard lock(mutex);
      stop = true;
    }
    changed.notify_all();
    if (thread.joinable()) thread.join();
  }

  Slot& slot_of(std::int64_t step) {
    return slots[static_cast<std::size_t>(step % static_cast<std::int64_t>(slots.size()))];
  }

  void allocate(std::int64_t count, Device& device) {
    const std::int64_t words = MicroBatch::kArrays * cut.tokens();
    for (std::int64_t s = 0; s < count; ++s) {
      Slot slot;
      slot.memory = device.allocate_host(cut.micro_batches() * words * 4, "token batches");
      const auto* data = static_cast<const std::int32_t*>(slot.memory->data());
      for (std::int64_t i = 0; i < cut.micro_batches(); ++i)
        slot.batches.push_back({data + i * words, cut.tokens()});
      slots.push_back(std::move(slot));
    }
  }

  void fill(std::int64_t step) {
    Slot& slot = slot_of(step);
    std::vector<std::int64_t> samples(static_cast<std::size_t>(cut.micro));
    for (std::int64_t i = 0; i < cut.micro_batches(); ++i) {
      for (std::int64_t j = 0; j < cut.micro; ++j)
        samples[static_cast<std::size_t>(j)] =
            order.sample(consumed + step * cut.global + cut.position(i, j));
      auto* packed = static_cast<std::int32_t*>(slot.memory->data()) + i * MicroBatch::kArrays * cut.tokens();
      fill_micro_batch(file, cut, samples, packed);
    }
  }

  /// Steps whose slots may be filled again: a step stays valid until the second call of next() after its own.
  std::int64_t released() const { return std::max<std::int64_t>(0, given - 2); }

  void read_ahead() {
    try {
      for (;;) {
        std::unique_lock lock(mutex);
        changed.wait(lock,
                     [&] { return stop || filled - released() < static_cast<std::int64_t>(slots.size()); });
        if (stop) return;
        const std::int64_t step = filled;
        lock.unlock();
        fill(step);
        lock.lock();
        ++filled;
        changed.notify_all();
      }
    } catch (...) {
      const std::lock_guard lock(mutex);
      failure = std::current_exception();
      changed.notify_all();
    }
  }
};

BatchLoader::BatchLoader(const TokenFile& file, const SampleOrder& order, const BatchCut& cut,
                         std::int64_t consumed, int ahead, Device& device)
    : impl_(std::make_unique<Impl>(file, order, cut, consumed)) {
  OCTET_ASSERT(cut.sequence > 0 && cut.micro > 0 && cut.global > 0 && consumed >= 0 && ahead >= 2);
  OCTET_ASSERT(cut.global % (cut.micro * cut.data_size) == 0);
  OCTET_ASSERT(order.samples() <= samples_in(file, cut.sequence));
  if (order.samples() < cut.global)
    fail(ErrorKind::kData,
         "{}: {} tokens make {} samples of {} + 1 tokens, fewer than one global batch of {} samples",
         file.path(), file.info().tokens, order.samples(), cut.sequence, cut.global);
  impl_->allocate(ahead + 2, device);
  impl_->thread = std::thread(&Impl::read_ahead, impl_.get());
}

BatchLoader::~BatchLoader() = default;

const std::vector<MicroBatch>& BatchLoader::next() {
  const auto start = std::chrono::steady_clock::now();
  std::unique_lock lock(impl_->mutex);
  const std::int64_t step = impl_->given++;
  impl_->changed.notify_all();
  impl_->changed.wait(lock, [&] { return impl_->filled > step || impl_->failure != nullptr; });
  if (impl_->filled <= step) std::rethrow_exception(impl_->failure);
  impl_->waited_ms =
      std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
  return impl_->slot_of(step).batches;
}

double BatchLoader::waited_ms() const {
  return impl_->waited_ms;
}

}  // namespace octet
