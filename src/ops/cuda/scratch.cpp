#include "scratch.h"

#include "../../runtime/cuda/cuda_check.h"

namespace octet::cuda {

void* Scratch::reserve(std::int64_t bytes) {
  if (bytes > this->bytes()) {
    OCTET_CUDA(cudaDeviceSynchronize());  // queued work may still use the old memory
    buffer_.reset();
    buffer_ = device_->allocate(bytes, "operator workspace");
  }
  return buffer_ ? buffer_->data() : nullptr;
}

}  // namespace octet::cuda
