#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdlib>
#include <deque>
#include <memory>
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
  std::uint64_t generation = 0;

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
  const Barrier* waits_for = nullptr;
  std::uint64_t generation = 0;
  bool done = false;
  Here here;
};

class Block {
 public:
  Block(dim3 block, dim3 blocks, dim3 threads, std::size_t shared, const std::function<void()>& thread)
      : thread_(thread), shared_(shared) {
    place_.block = block;
    place_.blocks = blocks;
    place_.threads = threads;
    count_ = static_cast<int>(threads.x * threads.y * threads.z);
    barrier_.members = count_;
    warps_.resize(static_cast<std::size_t>((count_ + kWarp - 1) / kWarp));
    for (int i = 0; i < count_; ++i) ++warps_[static_cast<std::size_t>(i / kWarp)].barrier.members;
  }

  void run();
  void body();
  void start(Fiber& fiber);
  void resume(Fiber& fiber);
  void block_barrier() { wait(barrier_); }
  const void* exchange(const void* value, std::size_t bytes, int lane);
  void* shared() { return shared_.data(); }

 private:
  Warp& warp() {
    const dim3 &t = here.thread, &n = here.threads;
    return warps_[(t.x + n.x * (t.y + n.y * t.z)) / kWarp];
  }
  void wait(Barrier& barrier) {
    Fiber& self = *running_;
    self.generation = barrier.generation;
    self.waits_for = &barrier;
    ++barrier.arrived;
    barrier.release_if_complete();
    self.here = here;
    if (_setjmp(self.place) == 0) _longjmp(main_, 1);
    here = self.here;
  }
  static void leave(Barrier& barrier) {
    --barrier.members;
    if (barrier.arrived > 0) barrier.release_if_complete();
  }

  const std::function<void()>& thread_;
  std::vector<double> shared_;  // aligned to 8; kernels ask for float
  Here place_;
  Barrier barrier_;
  std::vector<Warp> warps_;
  int count_ = 0, next_ = 0;
  jmp_buf main_;
  Fiber* running_ = nullptr;
};

Block* current = nullptr;

/// Kept between launches.
std::deque<Fiber>& fibers() {
  static std::deque<Fiber> all;
  return all;
}

void enter() {
  current->body();
}

void Block::body() {
  while (next_ < count_) {
    const auto index = static_cast<unsigned>(next_++);
    here = place_;
    here.thread = dim3(index % here.threads.x, index / here.threads.x % here.threads.y,
                       index / (here.threads.x * here.threads.y));
    here.lane = static_cast<int>(index % kWarp);
    thread_();
    leave(warp().barrier);
    leave(barrier_);
  }
  running_->done = true;
  _longjmp(main_, 1);
}

/// Runs a fiber until it waits or is done.
void Block::resume(Fiber& fiber) {
  running_ = &fiber;
  if (_setjmp(main_) == 0) _longjmp(fiber.place, 1);
}

void Block::start(Fiber& fiber) {
  running_ = &fiber;
  fiber.done = false;
  ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = fiber.stack.get();
  context.uc_stack.ss_size = kStack;
  makecontext(&context, enter, 0);
  if (_setjmp(main_) == 0) setcontext(&context);
}

void Block::run() {
  current = this;
  // Threads start in order, each on a fiber of its own once those before wait.
  std::size_t used = 0;
  while (next_ < count_) {
    if (used == fibers().size()) fibers().emplace_back();
    start(fibers()[used++]);
  }
  for (bool moved = true; moved;) {
    moved = false;
    for (std::size_t i = 0; i < used; ++i) {
      Fiber& fiber = fibers()[i];
      if (fiber.done || fiber.waits_for->generation == fiber.generation) continue;
      resume(fiber);
      moved = true;
    }
  }
  for (std::size_t i = 0; i < used; ++i) {
    if (!fibers()[i].done) std::abort();  // a barrier that not all threads reach
  }
}

const void* Block::exchange(const void* value, std::size_t bytes, int lane) {
  Warp& own = warp();
  const std::size_t turn = own.barrier.generation % 2;
  std::memcpy(own.shown[turn][here.lane], value, bytes);
  wait(own.barrier);
  return own.shown[turn][lane];
}

}  // namespace

void* dynamic_shared() {
  return current->shared();
}
void block_barrier() {
  current->block_barrier();
}
const void* exchange(const void* value, std::size_t bytes, int lane) {
  return current->exchange(value, bytes, lane);
}

void Launch::run(const std::function<void()>& thread) const {
  // What a GPU refuses to launch.
  if (threads_.x * threads_.y * threads_.z > 1024 || threads_.z > 64 || blocks_.y > 65535 ||
      blocks_.z > 65535) {
    octet::fail(octet::ErrorKind::kDevice, "a launch of {} x {} x {} blocks of {} x {} x {} threads",
                blocks_.x, blocks_.y, blocks_.z, threads_.x, threads_.y, threads_.z);
  }
  for (unsigned z = 0; z < blocks_.z; ++z) {
    for (unsigned y = 0; y < blocks_.y; ++y) {
      for (unsigned x = 0; x < blocks_.x; ++x) Block(dim3(x, y, z), blocks_, threads_, shared_, thread).run();
    }
  }
}

}  // namespace emulation
