#pragma once

#include <cuda_runtime_api.h>

#include "octet/base/error.h"

namespace octet {

inline void check_cuda(cudaError_t status, const char* expression, const char* file, int line) {
  if (status == cudaSuccess) return;
  static_cast<void>(cudaGetLastError());  // a launch error would otherwise be reported again by the next call
  fail(ErrorKind::kDevice, "CUDA: {} ({}) in {} at {}:{}", cudaGetErrorString(status),
       cudaGetErrorName(status), expression, file, line);
}

}  // namespace octet

/// Throws Error(kDevice) with the expression, the reason and the place when a CUDA runtime call fails.
#define OCTET_CUDA(expression) ::octet::check_cuda((expression), #expression, __FILE__, __LINE__)
/// The same for the kernel launch just made.
#define OCTET_CUDA_LAUNCH(name) ::octet::check_cuda(cudaGetLastError(), "launch of " name, __FILE__, __LINE__)
