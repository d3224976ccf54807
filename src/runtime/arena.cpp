#include "octet/runtime/arena.h"

namespace octet {

namespace {
constexpr std::int64_t kAlignment = 256;
}

int Arena::reserve(DType dtype, std::int64_t rows, std::int64_t cols) {
  OCTET_ASSERT(!memory_ && rows >= 0 && cols >= 0);
  slots_.push_back({dtype, rows, cols, bytes_});
  const std::int64_t bytes = rows * cols * size_of(dtype);
  bytes_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
  return static_cast<int>(slots_.size()) - 1;
}

void Arena::commit(Device& device) {
  memory_ = device.allocate(bytes_ > 0 ? bytes_ : kAlignment, purpose_);
}

Tensor Arena::tensor(int handle) const {
  OCTET_ASSERT(memory_ != nullptr);
  const Slot& slot = slots_.at(static_cast<std::size_t>(handle));
  return {static_cast<std::byte*>(memory_->data()) + slot.offset, slot.dtype, slot.rows, slot.cols};
}

}  // namespace octet
