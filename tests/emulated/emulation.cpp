#include <setjmp.h>
#include <ucontext.h>

#include <cstdlib>
#include <deque>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "cuda_emulation.h"

#include "octet/base/error.h"

namespace emulation {

Here here;

namespace {

constexpr int kWarp = 32;
constexpr std::size_t kStack = 256 * 1024;

/// Where threads wait for one another. Those that have returned no longer count.
struct Barrier {
  int members = 0, arrived = 0;
  Event generation = 0;

  void wait() {
    const Event seen = generation;
    ++arrived;
    release_if_complete();
    wait_for_change(generation, seen);
  }
  void leave() {
    --members;
    if (arrived > 0) release_if_complete();
  }

 private:
  void release_if_complete() {
    if (members > 0 && arrived < members) return;
    arrived = 0;
    ++generation;
  }
};

struct Warp {
  Barrier barrier;
  alignas(16) std::byte shown[2][kWarp][kShownBytes];
};

/// A stack on which one thread after another runs until one has to wait. It is entered with a context, and
/// left and resumed by jumps, which make no system call.
struct Fiber {
  jmp_buf place;
  std::unique_ptr<std::byte[]> stack{new std::byte[kStack]};
  const Event* waits_for = nullptr;
  Event seen = 0;
  bool done = false;
  Here here;
};

/// Kept between launches.
std::deque<Fiber>& fibers() {
  static std::deque<Fiber> all;
  return all;
}

}  // namespace

/// What the threads of a block share.
class Block {
 public:
  Block(const Here& place, Barrier& cluster, std::size_t shared)
      : place_(place), cluster_(&cluster), shared_((shared + sizeof(double) - 1) / sizeof(double)) {
    place_.owner = this;
    running_ = count();
    barrier_.members = running_;
    cluster.members += running_;
    warps_.resize(static_cast<std::size_t>((running_ + kWarp - 1) / kWarp));
    for (int i = 0; i < running_; ++i) ++warps_[static_cast<std::size_t>(i / kWarp)].barrier.members;
  }

  int count() const { return static_cast<int>(place_.threads.x * place_.threads.y * place_.threads.z); }
  Here thread(unsigned index) const {
    Here result = place_;
    const dim3& n = place_.threads;
    result.thread = dim3(index % n.x, index / n.x % n.y, index / (n.x * n.y));
    result.lane = static_cast<int>(index % kWarp);
    return result;
  }
  /// The present thread has returned.
  void leave() {
    --running_;
    warp().barrier.leave();
    barrier_.leave();
    cluster_->leave();
  }
  bool is_running() const { return running_ > 0; }

  void block_barrier() { barrier_.wait(); }
  void cluster_barrier() { cluster_->wait(); }
  void named_barrier(int number, int threads) {
    Barrier& barrier = named_[number];
    if (barrier.arrived > 0 && barrier.members != threads) {
      stop(fmt::format("barrier {} waits for {} threads, and also for {}", number, barrier.members, threads));
    }
    barrier.members = threads;
    barrier.wait();
  }
  const void* exchange(const void* value, std::size_t bytes, int lane) {
    Warp& own = warp();
    const std::size_t turn = own.barrier.generation % 2;
    std::memcpy(own.shown[turn][here.lane], value, bytes);
    own.barrier.wait();
    return own.shown[turn][lane];
  }
  std::byte* shared() { return reinterpret_cast<std::byte*>(shared_.data()); }

 private:
  Warp& warp() { return warps_[static_cast<std::size_t>(thread_in_block() / kWarp)]; }

  Here place_;
  Barrier* cluster_;
  std::vector<double> shared_;  // for its alignment
  Barrier barrier_;
  std::map<int, Barrier> named_;
  std::vector<Warp> warps_;
  int running_ = 0;
};

namespace {

/// Blocks that run at once.
class Grid {
 public:
  Grid(const std::function<void()>& thread, unsigned cluster, std::size_t shared)
      : thread_(thread), cluster_(cluster), shared_(shared) {}

  void add(const Here& place) {
    if (blocks_.empty()) first_ = static_cast<int>(place.block.x);
    if (blocks_.size() % cluster_ == 0) clusters_.emplace_back();
    blocks_.emplace_back(place, clusters_.back(), shared_);
  }
  void run();
  void body();
  void wait_for_change(const Event& event, Event seen) {
    Fiber& self = *running_;
    self.waits_for = &event;
    self.seen = seen;
    self.here = here;
    if (_setjmp(self.place) == 0) _longjmp(main_, 1);
    here = self.here;
  }
  [[noreturn]] void stop(const std::string& reason) {
    stopped_ = reason;
    if (running_ != nullptr) _longjmp(main_, 1);
    check();
    std::abort();
  }

  unsigned cluster() const { return cluster_; }
  std::size_t shared_bytes() const { return shared_; }
  /// By its number in the launch.
  Block& block(int number) { return blocks_[static_cast<std::size_t>(number - first_)]; }
  std::vector<std::function<void()>>& at_last() { return at_last_; }

 private:
  void start(Fiber& fiber);
  void resume(Fiber& fiber);
  bool step();
  /// A fiber has come back.
  void check() {
    running_ = nullptr;
    if (!stopped_.empty()) octet::fail(octet::ErrorKind::kDevice, "emulated kernel: {}", stopped_);
  }

  const std::function<void()>& thread_;
  unsigned cluster_;
  std::size_t shared_;
  int first_ = 0;  ///< number of the first block
  std::deque<Barrier> clusters_;
  std::deque<Block> blocks_;
  std::size_t next_block_ = 0, used_ = 0;
  int next_ = 0;
  std::vector<std::function<void()>> at_last_;
  std::string stopped_;
  jmp_buf main_;
  Fiber* running_ = nullptr;
};

Grid* current = nullptr;
std::uint64_t launches = 0;

void enter() {
  current->body();
}

void Grid::body() {
  while (next_block_ < blocks_.size()) {
    Block& block = blocks_[next_block_];
    here = block.thread(static_cast<unsigned>(next_++));
    if (next_ == block.count()) ++next_block_, next_ = 0;
    thread_();
    here.owner->leave();
  }
  running_->done = true;
  _longjmp(main_, 1);
}

/// Runs a fiber until it waits or is done.
void Grid::resume(Fiber& fiber) {
  running_ = &fiber;
  if (_setjmp(main_) == 0) _longjmp(fiber.place, 1);
  check();
}

void Grid::start(Fiber& fiber) {
  running_ = &fiber;
  fiber.done = false;
  ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = fiber.stack.get();
  context.uc_stack.ss_size = kStack;
  makecontext(&context, enter, 0);
  if (_setjmp(main_) == 0) setcontext(&context);
  check();
}

/// Resumes every fiber that can go on; whether there was one.
bool Grid::step() {
  bool moved = false;
  for (std::size_t i = 0; i < used_; ++i) {
    Fiber& fiber = fibers()[i];
    if (fiber.done || *fiber.waits_for == fiber.seen) continue;
    resume(fiber);
    moved = true;
  }
  return moved;
}

void Grid::run() {
  current = this;
  // Threads start in order, each on a fiber of its own once those before wait.
  while (next_block_ < blocks_.size()) {
    if (used_ == fibers().size()) fibers().emplace_back();
    start(fibers()[used_++]);
  }
  for (;;) {
    if (step()) continue;
    if (at_last_.empty()) break;
    // The latest first: what is awaited has often been asked for first.
    const std::function<void()> event = std::move(at_last_.back());
    at_last_.pop_back();
    event();
    check();
  }
  for (std::size_t i = 0; i < used_; ++i) {
    const Fiber& fiber = fibers()[i];
    if (fiber.done) continue;
    octet::fail(octet::ErrorKind::kDevice, "emulated kernel: thread {} of block {} waits for ever",
                fiber.here.thread.x, fiber.here.block.x);
  }
}

}  // namespace

void wait_for_change(const Event& event, Event seen) {
  current->wait_for_change(event, seen);
}
void* dynamic_shared() {
  return here.owner->shared();
}
void block_barrier() {
  here.owner->block_barrier();
}
void cluster_barrier() {
  here.owner->cluster_barrier();
}
void named_barrier(int barrier, int threads) {
  here.owner->named_barrier(barrier, threads);
}
const void* exchange(const void* value, std::size_t bytes, int lane) {
  return here.owner->exchange(value, bytes, lane);
}
int thread_in_block() {
  const dim3 &t = here.thread, &n = here.threads;
  return static_cast<int>(t.x + n.x * (t.y + n.y * t.z));
}
int rank_in_cluster() {
  return static_cast<int>(here.block.x % current->cluster());
}
int block_of_cluster(int rank) {
  return static_cast<int>(here.block.x) - rank_in_cluster() + rank;
}
std::byte* shared_of(int block) {
  return current->block(block).shared();
}
std::size_t shared_bytes() {
  return current->shared_bytes();
}
bool is_running(int block) {
  return current->block(block).is_running();
}
void at_last(std::function<void()> event) {
  current->at_last().push_back(std::move(event));
}
std::uint64_t launch_number() {
  return launches;
}
void stop(const std::string& reason) {
  current->stop(reason);
}

void Launch::run(const std::function<void()>& thread) const {
  // What a GPU refuses to launch.
  if (threads_.x * threads_.y * threads_.z > 1024 || threads_.z > 64 || blocks_.y > 65535 ||
      blocks_.z > 65535 || blocks_.x % cluster_ != 0) {
    octet::fail(octet::ErrorKind::kDevice, "a launch of {} x {} x {} blocks of {} x {} x {} threads",
                blocks_.x, blocks_.y, blocks_.z, threads_.x, threads_.y, threads_.z);
  }
  ++launches;
  Here place;
  place.blocks = blocks_;
  place.threads = threads_;
  Grid together(thread, cluster_, shared_);
  for (unsigned z = 0; z < blocks_.z; ++z) {
    for (unsigned y = 0; y < blocks_.y; ++y) {
      for (unsigned x = 0; x < blocks_.x; ++x) {
        place.block = dim3(x, y, z);
        if (cluster_ > 1) {
          together.add(place);
          continue;
        }
        Grid alone(thread, cluster_, shared_);
        alone.add(place);
        alone.run();
      }
    }
  }
  if (cluster_ > 1) together.run();
}

}  // namespace emulation
