// Stands in for the CUDA backend (src/runtime/cuda, src/ops/cuda, src/comm/nccl) in a build without it.
#include "octet/base/error.h"
#include "octet/comm/communicator.h"
#include "octet/ops/ops.h"
#include "octet/runtime/device.h"
#include "octet/runtime/topology.h"

namespace octet {
namespace {

[[noreturn]] void no_cuda(const char* what) {
  fail(ErrorKind::kDevice,
       "{}: this octet was built without CUDA; use run.device = cpu, or build where nvcc is found", what);
}

}  // namespace

int cuda_device_count() {
  return 0;
}

std::string cuda_versions() {
  return "built without CUDA";
}

std::unique_ptr<Device> make_cuda_device(int) {
  no_cuda("no CUDA device");
}

std::unique_ptr<Ops> make_cuda_ops(Device&, const CudaOpsOptions&) {
  no_cuda("no CUDA operators");
}

std::vector<std::vector<GpuLink>> gpu_links(const std::vector<std::string>&) {
  return {};
}

std::unique_ptr<Communicator> make_nccl_communicator(MPI_Comm, Device&, std::string,
                                                     const CommunicatorSettings&) {
  no_cuda("no NCCL communicator");
}

}  // namespace octet
