#pragma once

#include <cuda_runtime_api.h>

#include "octet/runtime/device.h"

namespace octet {

/// The CUDA stream behind a stream that a CUDA device made.
cudaStream_t native(Stream& stream);

/// The CUDA ordinal of a device that make_cuda_device made.
int ordinal_of(const Device& device);

}  // namespace octet
