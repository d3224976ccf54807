#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "octet/base/tensor.h"
#include "octet/runtime/device.h"

namespace octet {

/// Memory of one class (parameters, gradients, optimizer, activations, …): tensors are reserved first, then
/// one allocation holds them all. Nothing is freed before the arena is.
class Arena {
 public:
  explicit Arena(std::string purpose) : purpose_(std::move(purpose)) {}

  /// A handle of [rows, cols]; the tensor can be had after commit().
  int reserve(DType dtype, std::int64_t rows, std::int64_t cols);
  /// Allocates all that was reserved, zeroed. Throws Error(kDevice) naming purpose and size.
  void commit(Device& device);
  Tensor tensor(int handle) const;

  const std::string& purpose() const { return purpose_; }
  std::int64_t bytes() const { return bytes_; }

 private:
  struct Slot {
    DType dtype;
    std::int64_t rows, cols, offset;
  };
  std::string purpose_;
  std::vector<Slot> slots_;
  std::int64_t bytes_ = 0;
  std::unique_ptr<Buffer> memory_;
};

}  // namespace octet
