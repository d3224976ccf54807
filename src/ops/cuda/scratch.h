#pragma once

#include <cstdint>
#include <memory>

#include "octet/runtime/device.h"

namespace octet::cuda {

/// Device memory for the intermediate results of one operation at a time. All operations that use it run on
/// one stream, so that each is done with it before the next begins.
class Scratch {
 public:
  Scratch(Device& device, int multiprocessors, int block_shared_bytes)
      : device_(&device), multiprocessors_(multiprocessors), block_shared_bytes_(block_shared_bytes) {}

  /// At least `bytes`, aligned to 256. Grows, and then waits for the device, only for sizes that were not
  /// reserved ahead.
  void* reserve(std::int64_t bytes);
  std::int64_t bytes() const { return buffer_ ? buffer_->bytes() : 0; }
  int multiprocessors() const { return multiprocessors_; }
  /// Shared memory that a block may have if it asks for it. A multiprocessor has 1 KiB more.
  int block_shared_bytes() const { return block_shared_bytes_; }

 private:
  Device* device_;
  int multiprocessors_, block_shared_bytes_;
  std::unique_ptr<Buffer> buffer_;
};

}  // namespace octet::cuda
