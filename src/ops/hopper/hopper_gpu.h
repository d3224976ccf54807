#pragma once

#include <memory>

namespace octet::hopper {

/// Multiprocessors of the current device where its compute capability is 9.0; of GPUs of another kind 0.
int hopper_multiprocessors();

struct FreeCounter {
  void operator()(unsigned* counter) const;
};
/// In device memory: work that kernels took so far. They run on one stream, and are each told what all
/// earlier ones took, so that it is never set back.
using WorkCounter = std::unique_ptr<unsigned, FreeCounter>;
/// Of the current device. At 0 for every stream.
WorkCounter make_work_counter();

}  // namespace octet::hopper
