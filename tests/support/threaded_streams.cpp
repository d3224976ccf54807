#include "support/threaded_streams.h"

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <thread>
#include <utility>

namespace octet::test {
namespace {

using Work = std::function<void()>;
using Clock = std::chrono::steady_clock;

/// A point in a stream's work that is reached once.
class Mark {
 public:
  void reach() {
    const std::lock_guard lock(mutex_);
    reached_ = true;
    time_ = Clock::now();
    changed_.notify_all();
  }
  void wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return reached_; });
  }
  Clock::time_point time() const { return time_; }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool reached_ = false;
  Clock::time_point time_;
};

class ThreadedStream final : public Stream {
 public:
  explicit ThreadedStream(std::uint64_t seed) : random_(seed), thread_([this] { work(); }) {}
  ~ThreadedStream() override {
    run({});
    thread_.join();
  }
  void run(Work work) {
    const std::lock_guard lock(mutex_);
    queue_.push_back(std::move(work));
    changed_.notify_all();
  }
  void synchronize() override {
    Mark mark;
    run([&] { mark.reach(); });
    mark.wait();
  }

 private:
  void work() {
    while (true) {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return !queue_.empty(); });
      const Work next = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      if (!next) return;
      // Now and then far behind: what is not held by an event overtakes.
      if (random_() % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random_() % 400));
      next();
    }
  }

  std::mt19937_64 random_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Work> queue_;
  std::thread thread_;  ///< last: begins when all else is there
};

void queue(Stream& stream, Work work) {
  dynamic_cast<ThreadedStream&>(stream).run(std::move(work));
}

class ThreadedEvent final : public Event {
 public:
  void record(Stream& stream) override {
    mark_ = std::make_shared<Mark>();
    queue(stream, [mark = mark_] { mark->reach(); });
  }
  void block(Stream& stream) override {
    if (mark_) queue(stream, [mark = mark_] { mark->wait(); });
  }
  void synchronize() override {
    if (mark_) mark_->wait();
  }
  double milliseconds_since(const Event& earlier) const override {
    const auto& start = dynamic_cast<const ThreadedEvent&>(earlier);
    return std::chrono::duration<double, std::milli>(mark_->time() - start.mark_->time()).count();
  }

 private:
  std::shared_ptr<Mark> mark_;
};

class ThreadedDevice final : public Device {
 public:
  ThreadedDevice(std::unique_ptr<Device> cpu, std::uint64_t seed) : cpu_(std::move(cpu)), random_(seed) {}

  DeviceKind kind() const override { return cpu_->kind(); }
  std::string name() const override { return cpu_->name(); }
  std::string identity() const override { return cpu_->identity(); }
  std::string pci_address() const override { return cpu_->pci_address(); }
  std::int64_t memory_total() const override { return cpu_->memory_total(); }
  std::int64_t memory_used() const override { return cpu_->memory_used(); }
  double peak_flops() const override { return cpu_->peak_flops(); }
  int compute_capability() const override { return cpu_->compute_capability(); }

  std::unique_ptr<Buffer> allocate(std::int64_t bytes, std::string_view purpose) override {
    return known(cpu_->allocate(bytes, purpose));
  }
  std::unique_ptr<Buffer> allocate_host(std::int64_t bytes, std::string_view purpose) override {
    return known(cpu_->allocate_host(bytes, purpose));
  }
  std::unique_ptr<Stream> make_stream(bool) override { return std::make_unique<ThreadedStream>(random_()); }
  std::unique_ptr<Event> make_event(bool) override { return std::make_unique<ThreadedEvent>(); }

  void copy(Stream& stream, void* to, const void* from, std::int64_t bytes) override {
    queue(stream, [=] { std::memmove(to, from, static_cast<std::size_t>(bytes)); });
    if (!is_known(to) || !is_known(from)) stream.synchronize();
  }
  void zero(Stream& stream, void* data, std::int64_t bytes) override {
    queue(stream, [=] { std::memset(data, 0, static_cast<std::size_t>(bytes)); });
  }

 private:
  std::unique_ptr<Buffer> known(std::unique_ptr<Buffer> buffer) {
    const auto* begin = static_cast<const std::byte*>(buffer->data());
    ranges_[begin] = begin + buffer->bytes();
    return buffer;
  }
  /// Ranges are never forgotten: tests give memory back with the device.
  bool is_known(const void* data) const {
    const auto* at = static_cast<const std::byte*>(data);
    const auto next = ranges_.upper_bound(at);
    return next != ranges_.begin() && at < std::prev(next)->second;
  }

  std::unique_ptr<Device> cpu_;
  std::mt19937_64 random_;
  std::map<const std::byte*, const std::byte*> ranges_;
};

/// Queues a call of a method of `inner`, whose other arguments are copied.
template <typename Inner, typename... Parameters, typename... Arguments>
void later(Inner& inner, Stream& stream, void (Inner::*method)(Stream&, Parameters...),
           const Arguments&... arguments) {
  queue(stream, [&inner, &stream, method, ... copies = arguments] { (inner.*method)(stream, copies...); });
}

class ThreadedCommunicator final : public Communicator {
 public:
  explicit ThreadedCommunicator(std::unique_ptr<Communicator> cpu) : cpu_(std::move(cpu)) {}

  int rank() const override { return cpu_->rank(); }
  int size() const override { return cpu_->size(); }
  const std::string& name() const override { return cpu_->name(); }
  void all_reduce(Stream& s, Tensor values, ReduceOp op) override {
    later(*cpu_, s, &Communicator::all_reduce, values, op);
  }
  void reduce_scatter(Stream& s, Tensor in, Tensor out) override {
    later(*cpu_, s, &Communicator::reduce_scatter, in, out);
  }
  void all_gather(Stream& s, Tensor in, Tensor out) override {
    later(*cpu_, s, &Communicator::all_gather, in, out);
  }
  void all_to_all(Stream& s, Tensor in, Tensor out) override {
    later(*cpu_, s, &Communicator::all_to_all, in, out);
  }
  void send(Stream& s, Tensor values, int to) override { later(*cpu_, s, &Communicator::send, values, to); }
  void receive(Stream& s, Tensor values, int from) override {
    later(*cpu_, s, &Communicator::receive, values, from);
  }

 private:
  std::unique_ptr<Communicator> cpu_;
};

class ThreadedOps final : public Ops {
 public:
  explicit ThreadedOps(std::unique_ptr<Ops> cpu) : cpu_(std::move(cpu)) {}

  void prepare(const Workload& workload) override { cpu_->prepare(workload); }
  std::int64_t workspace_bytes() const override { return cpu_->workspace_bytes(); }
  void matmul(Stream& s, const Matmul& a) override { later(*cpu_, s, &Ops::matmul, a); }
  void largest_magnitude(Stream& s, Tensor x, Tensor largest) override {
    later(*cpu_, s, &Ops::largest_magnitude, x, largest);
  }
  void quantize(Stream& s, const Quantize& a) override { later(*cpu_, s, &Ops::quantize, a); }
  void transpose_codes(Stream& s, Tensor from, Tensor to) override {
    later(*cpu_, s, &Ops::transpose_codes, from, to);
  }
  void remember_largest(Stream& s, Tensor seen, Tensor history, Tensor largest,
                        const StepScalars* scalars) override {
    later(*cpu_, s, &Ops::remember_largest, seen, history, largest, scalars);
  }
  void norm_forward(Stream& s, const NormForward& a) override { later(*cpu_, s, &Ops::norm_forward, a); }
  void norm_backward(Stream& s, const NormBackward& a) override { later(*cpu_, s, &Ops::norm_backward, a); }
  void rope(Stream& s, const HeadLayout& layout, Tensor qkv, Tensor positions, Tensor cos_sin,
            bool inverse) override {
    later(*cpu_, s, &Ops::rope, layout, qkv, positions, cos_sin, inverse);
  }
  void head_norm_forward(Stream& s, const HeadLayout& layout, float epsilon, Tensor in, Tensor q, Tensor k,
                         Tensor out, Tensor rstd) override {
    later(*cpu_, s, &Ops::head_norm_forward, layout, epsilon, in, q, k, out, rstd);
  }
  void head_norm_backward(Stream& s, const HeadLayout& layout, Tensor in, Tensor rstd, Tensor q, Tensor k,
                          Tensor dqkv, Tensor dq, Tensor dk, bool accumulate) override {
    later(*cpu_, s, &Ops::head_norm_backward, layout, in, rstd, q, k, dqkv, dq, dk, accumulate);
  }
  void attention_forward(Stream& s, const AttentionShape& shape, const AttentionOperands& operands,
                         SampleRows out, Tensor statistics) override {
    queue(s, [=, this, &s] { cpu_->attention_forward(s, shape, operands, out, statistics); });
  }
  void attention_backward(Stream& s, const AttentionShape& shape, const AttentionOperands& operands,
                          SampleRows out, Tensor statistics, SampleRows dout, SampleRows dquery,
                          SampleRows dkey, SampleRows dvalue) override {
    queue(s, [=, this, &s] {
      cpu_->attention_backward(s, shape, operands, out, statistics, dout, dquery, dkey, dvalue);
    });
  }
  void coded_activation(Stream& s, const CodedActivation& a) override {
    later(*cpu_, s, &Ops::coded_activation, a);
  }
  void coded_activation_backward(Stream& s, const CodedActivationBackward& a) override {
    later(*cpu_, s, &Ops::coded_activation_backward, a);
  }
  void swiglu_forward(Stream& s, Tensor in, Tensor out, Tensor largest) override {
    later(*cpu_, s, &Ops::swiglu_forward, in, out, largest);
  }
  void swiglu_backward(Stream& s, Tensor in, Tensor dout, Tensor largest) override {
    later(*cpu_, s, &Ops::swiglu_backward, in, dout, largest);
  }
  void gelu_forward(Stream& s, Tensor in, Tensor out, Tensor largest) override {
    later(*cpu_, s, &Ops::gelu_forward, in, out, largest);
  }
  void gelu_backward(Stream& s, Tensor in, Tensor dout, Tensor largest) override {
    later(*cpu_, s, &Ops::gelu_backward, in, dout, largest);
  }
  void embedding_forward(Stream& s, Tensor ids, Tensor table, std::int64_t first, Tensor positions,
                         Tensor position_table, Tensor out) override {
    later(*cpu_, s, &Ops::embedding_forward, ids, table, first, positions, position_table, out);
  }
  void embedding_backward(Stream& s, Tensor ids, Tensor order, Tensor dout, std::int64_t first,
                          Tensor dtable) override {
    later(*cpu_, s, &Ops::embedding_backward, ids, order, dout, first, dtable);
  }
  void bias_backward(Stream& s, Tensor dy, Tensor dbias, bool accumulate) override {
    later(*cpu_, s, &Ops::bias_backward, dy, dbias, accumulate);
  }
  void cross_entropy_partial(Stream& s, Tensor logits, std::int64_t first, std::int64_t valid, Tensor targets,
                             Tensor partial) override {
    later(*cpu_, s, &Ops::cross_entropy_partial, logits, first, valid, targets, partial);
  }
  void cross_entropy_finish(Stream& s, Tensor logits, std::int64_t first, std::int64_t valid, Tensor targets,
                            Tensor partials, double weight, bool gradient, StepScalars* scalars) override {
    later(*cpu_, s, &Ops::cross_entropy_finish, logits, first, valid, targets, partials, weight, gradient,
          scalars);
  }
  void cross_entropy(Stream& s, Tensor logits, std::int64_t valid, Tensor targets, Tensor partial,
                     bool gradient, StepScalars* scalars) override {
    later(*cpu_, s, &Ops::cross_entropy, logits, valid, targets, partial, gradient, scalars);
  }
  void add_square(Stream& s, Tensor x, StepScalars* scalars) override {
    later(*cpu_, s, &Ops::add_square, x, scalars);
  }
  void finish_step(Stream& s, StepScalars* scalars, Tensor rates, float clip, float beta1,
                   float beta2) override {
    later(*cpu_, s, &Ops::finish_step, scalars, rates, clip, beta1, beta2);
  }
  void adamw(Stream& s, const Adamw& a, const StepScalars* scalars) override {
    later(*cpu_, s, &Ops::adamw, a, scalars);
  }
  void widen_state(Stream& s, const NarrowState& state, Tensor values) override {
    later(*cpu_, s, &Ops::widen_state, state, values);
  }
  void narrow_state(Stream& s, Tensor values, const NarrowState& state) override {
    later(*cpu_, s, &Ops::narrow_state, values, state);
  }
  void cast(Stream& s, Tensor from, Tensor to) override { later(*cpu_, s, &Ops::cast, from, to); }
  void copy_rows(Stream& s, DType dtype, std::int64_t batch, std::int64_t rows, std::int64_t columns,
                 const SampleRows& from, const SampleRows& to, bool add) override {
    later(*cpu_, s, &Ops::copy_rows, dtype, batch, rows, columns, from, to, add);
  }
  void add(Stream& s, Tensor from, Tensor to) override { later(*cpu_, s, &Ops::add, from, to); }
  void fill_normal(Stream& s, Tensor values, float deviation, std::uint64_t key, std::int64_t first,
                   std::int64_t stride) override {
    later(*cpu_, s, &Ops::fill_normal, values, deviation, key, first, stride);
  }
  void fill(Stream& s, Tensor values, float value) override { later(*cpu_, s, &Ops::fill, values, value); }

 private:
  std::unique_ptr<Ops> cpu_;
};

}  // namespace

std::unique_ptr<Device> make_threaded_device(std::unique_ptr<Device> cpu, std::uint64_t seed) {
  return std::make_unique<ThreadedDevice>(std::move(cpu), seed);
}

std::unique_ptr<Ops> make_threaded_ops(std::unique_ptr<Ops> cpu) {
  return std::make_unique<ThreadedOps>(std::move(cpu));
}

std::unique_ptr<Communicator> make_threaded_communicator(std::unique_ptr<Communicator> cpu) {
  return std::make_unique<ThreadedCommunicator>(std::move(cpu));
}

}  // namespace octet::test
