#pragma once

#include "instructions.cuh"

namespace octet::hopper {

/// Which piece of work comes next: blocks take them in rising order, so that one that starts late does less,
/// and that what a piece waits for was taken before it. One thread of a block asks for the next piece while
/// one is at work; all that work on it read the number, in two places by turns.
class Tickets {
 public:
  static constexpr int kBytes = 40;  ///< of shared memory, from a multiple of 8 on

  __device__ explicit Tickets(std::uint32_t at) : known_(at), read_(at + 16), numbers_(at + 32) {}

  /// By one thread, before barriers_ready(). readers: warps that call next<true>(), and threads that call
  /// next<false>().
  __device__ static void init(std::uint32_t at, int readers) {
    for (int turn = 0; turn < 2; ++turn) {
      barrier_init(at + 8 * turn, 1);
      barrier_init(at + 16 + 8 * turn, readers);
    }
  }

  /// Of one thread of the block, which is a reader. taken: in global memory, 0 at first. next() gives
  /// order(ticket).
  template <typename Order>
  __device__ void ask(unsigned* taken, Order order) {
    wait(read_ + 8 * turn_, parity_ ^ 1);
    store_word(numbers_ + 4 * turn_, order(static_cast<int>(atomicAdd(taken, 1u))));
    arrive(known_ + 8 * turn_);
  }
  __device__ void ask(unsigned* taken) {
    ask(taken, [](int ticket) { return ticket; });
  }

  /// The number that was asked for.
  template <bool kWarp>
  __device__ int next() {
    wait(known_ + 8 * turn_, parity_);
    const int number = load_word(numbers_ + 4 * turn_);
    if constexpr (kWarp) __syncwarp();
    if (!kWarp || threadIdx.x % 32 == 0) arrive(read_ + 8 * turn_);
    turn_ ^= 1;
    if (turn_ == 0) parity_ ^= 1;
    return number;
  }

 private:
  std::uint32_t known_, read_, numbers_;
  int turn_ = 0, parity_ = 0;
};

}  // namespace octet::hopper
