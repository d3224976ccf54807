#include "hopper_gpu.h"

#include <cuda_runtime.h>

#include "../../runtime/cuda/cuda_check.h"

namespace octet::hopper {

int hopper_multiprocessors() {
  int device = 0, major = 0, minor = 0, multiprocessors = 0;
  OCTET_CUDA(cudaGetDevice(&device));
  OCTET_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  OCTET_CUDA(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
  if (major != 9 || minor != 0) return 0;
  OCTET_CUDA(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
  return multiprocessors;
}

void FreeCounter::operator()(unsigned* counter) const {
  cudaFree(counter);
}

WorkCounter make_work_counter() {
  unsigned* memory = nullptr;
  OCTET_CUDA(cudaMalloc(&memory, sizeof *memory));
  WorkCounter counter(memory);
  OCTET_CUDA(cudaMemset(memory, 0, sizeof *memory));
  OCTET_CUDA(cudaDeviceSynchronize());  // other streams do not wait for the default one
  return counter;
}

}  // namespace octet::hopper
