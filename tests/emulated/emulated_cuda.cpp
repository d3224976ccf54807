// A "CUDA device" of host memory, on which CudaOps runs as on a GPU: octet's own kernels under
// cuda_emulation.h, products by the CPU operators and their epilogues by kernels of their own, attention by
// the plain kernels; products by octet's own kernels where they are asked for. What is defined here takes the
// place of the library's definitions of the same names.
#include "../../src/ops/cuda/cudnn_attention.h"
#include "../../src/ops/cuda/matmul_plans.h"
#include "../../src/runtime/cuda/cuda_stream.h"
#include "octet/runtime/device.h"
#include "tensor_map.h"

namespace octet {
namespace {

class EmulatedDevice final : public Device {
 public:
  DeviceKind kind() const override { return DeviceKind::kCuda; }
  std::string name() const override { return "emulated GPU"; }
  std::string identity() const override { return "emulated"; }
  std::string pci_address() const override { return ""; }
  std::int64_t memory_total() const override { return host_->memory_total(); }
  std::int64_t memory_used() const override { return host_->memory_used(); }
  double peak_flops() const override { return 0.0; }
  int compute_capability() const override { return 90; }
  std::unique_ptr<Buffer> allocate(std::int64_t bytes, std::string_view purpose) override {
    return host_->allocate(bytes, purpose);
  }
  std::unique_ptr<Buffer> allocate_host(std::int64_t bytes, std::string_view purpose) override {
    return host_->allocate_host(bytes, purpose);
  }
  std::unique_ptr<Stream> make_stream(bool high_priority) override {
    return host_->make_stream(high_priority);
  }
  std::unique_ptr<Event> make_event(bool timed) override { return host_->make_event(timed); }
  void copy(Stream& stream, void* to, const void* from, std::int64_t bytes) override {
    host_->copy(stream, to, from, bytes);
  }
  void zero(Stream& stream, void* data, std::int64_t bytes) override { host_->zero(stream, data, bytes); }

 private:
  std::unique_ptr<Device> host_ = make_cpu_device();
};

}  // namespace

int cuda_device_count() {
  return 1;
}
std::unique_ptr<Device> make_cuda_device(int) {
  return std::make_unique<EmulatedDevice>();
}
std::string cuda_versions() {
  return "CUDA kernels emulated on the CPU";
}
cudaStream_t native(Stream&) {
  return nullptr;
}
int ordinal_of(const Device&) {
  return 0;
}

namespace cuda {

MatmulPlans::MatmulPlans(Scratch& scratch, const std::string&, int, const CudaOpsOptions& options)
    : scratch_(&scratch), workspace_(0), cache_(options.matmul_plans) {
  always_own_ = options.own_products == OwnKernels::kAlways;
  if (always_own_) own_ = std::make_unique<hopper::Products>();
}

void MatmulPlans::time_products(cudaStream_t) {}

bool MatmulPlans::prefers_own(const Matmul& args) const {
  return own_ && own_->takes(args);
}

void MatmulPlans::run_library(cudaStream_t stream, const Matmul& args) {
  if (args.epilogue != Epilogue::kNone) return run_apart(stream, args);
  const std::unique_ptr<Ops> ops = make_cpu_ops(1);
  Workload workload;
  workload.compute = DType::kBF16;
  ops->prepare(workload);
  ops->matmul(*make_cpu_device()->make_stream(), args);
}

CudnnAttention::CudnnAttention(Scratch& scratch, bool deterministic)
    : scratch_(&scratch), deterministic_(deterministic) {}
std::int64_t CudnnAttention::workspace_bytes(const AttentionShape&, bool) {
  return 0;
}
bool CudnnAttention::forward(cudaStream_t, const AttentionShape&, const AttentionOperands&, SampleRows,
                             Tensor) {
  return false;
}
bool CudnnAttention::backward(cudaStream_t, const AttentionShape&, const AttentionOperands&, SampleRows,
                              Tensor, SampleRows, SampleRows, SampleRows, SampleRows) {
  return false;
}

}  // namespace cuda
}  // namespace octet

extern "C" {
cudaError_t cudaSetDevice(int) {
  return cudaSuccess;
}
cudaError_t cudaGetLastError() {
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr name, int) {
  switch (name) {
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = 227 * 1024;
      break;
    case cudaDevAttrComputeCapabilityMajor:
      *value = 9;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = 0;
      break;
    default:
      *value = 4;  // multiprocessors, to which some grids are cut
  }
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* memory, int value, std::size_t bytes, cudaStream_t) {
  std::memset(memory, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaMalloc(void** memory, std::size_t bytes) {
  *memory = std::malloc(bytes);
  return cudaSuccess;
}
cudaError_t cudaFree(void* memory) {
  std::free(memory);
  return cudaSuccess;
}
cudaError_t cudaMemset(void* memory, int value, std::size_t bytes) {
  return cudaMemsetAsync(memory, value, bytes, nullptr);
}
cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, const void*, const cudaLaunchConfig_t*) {
  *clusters = 2;
  return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  *function = reinterpret_cast<void*>(&emulation::encode_tensor_map);
  *found = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
}
