#include <cublasLt.h>
#include <cuda_runtime_api.h>
#include <cudnn.h>
#include <fmt/format.h>
#include <nccl.h>

#include <algorithm>

#include "cuda_check.h"
#include "cuda_stream.h"
#include "octet/base/error.h"
#include "octet/runtime/device.h"

namespace octet {
namespace {

class CudaStream final : public Stream {
 public:
  CudaStream(int ordinal, bool high_priority) : ordinal_(ordinal) {
    OCTET_CUDA(cudaSetDevice(ordinal_));
    int lowest = 0, highest = 0;
    OCTET_CUDA(cudaDeviceGetStreamPriorityRange(&lowest, &highest));
    OCTET_CUDA(
        cudaStreamCreateWithPriority(&handle_, cudaStreamNonBlocking, high_priority ? highest : lowest));
  }
  ~CudaStream() override { static_cast<void>(cudaStreamDestroy(handle_)); }
  CudaStream(const CudaStream&) = delete;
  CudaStream& operator=(const CudaStream&) = delete;

  void synchronize() override {
    OCTET_CUDA(cudaSetDevice(ordinal_));
    OCTET_CUDA(cudaStreamSynchronize(handle_));
  }
  cudaStream_t handle() const { return handle_; }

 private:
  int ordinal_;
  cudaStream_t handle_ = nullptr;
};

class CudaEvent final : public Event {
 public:
  CudaEvent(int ordinal, bool timed) : ordinal_(ordinal) {
    OCTET_CUDA(cudaSetDevice(ordinal_));
    OCTET_CUDA(cudaEventCreateWithFlags(&handle_, timed ? cudaEventDefault : cudaEventDisableTiming));
  }
  ~CudaEvent() override { static_cast<void>(cudaEventDestroy(handle_)); }
  CudaEvent(const CudaEvent&) = delete;
  CudaEvent& operator=(const CudaEvent&) = delete;

  void record(Stream& stream) override {
    OCTET_CUDA(cudaSetDevice(ordinal_));
    OCTET_CUDA(cudaEventRecord(handle_, native(stream)));
  }
  void block(Stream& stream) override {
    OCTET_CUDA(cudaSetDevice(ordinal_));
    OCTET_CUDA(cudaStreamWaitEvent(native(stream), handle_, 0));
  }
  void synchronize() override {
    OCTET_CUDA(cudaSetDevice(ordinal_));
    OCTET_CUDA(cudaEventSynchronize(handle_));
  }
  double milliseconds_since(const Event& earlier) const override {
    const auto* from = dynamic_cast<const CudaEvent*>(&earlier);
    OCTET_ASSERT(from != nullptr);
    float milliseconds = 0.0f;
    OCTET_CUDA(cudaEventElapsedTime(&milliseconds, from->handle_, handle_));
    return milliseconds;
  }

 private:
  int ordinal_;
  cudaEvent_t handle_ = nullptr;
};

// Small and empty requests still get memory of their own, so that data() is never null.
constexpr std::int64_t kSmallestAllocation = 256;

class CudaBuffer final : public Buffer {
 public:
  CudaBuffer(int ordinal, std::int64_t bytes, std::string_view purpose) {
    OCTET_CUDA(cudaSetDevice(ordinal));
    const std::size_t size = static_cast<std::size_t>(std::max(bytes, kSmallestAllocation));
    const cudaError_t status = cudaMalloc(&data_, size);
    if (status != cudaSuccess) {
      static_cast<void>(cudaGetLastError());
      std::size_t available = 0, total = 0;
      static_cast<void>(cudaMemGetInfo(&available, &total));
      fail(ErrorKind::kDevice,
           "cannot allocate {:.2f} GiB of GPU memory for {}: {} ({:.2f} of {:.2f} GiB are free)",
           static_cast<double>(bytes) / kGiB, purpose, cudaGetErrorString(status),
           static_cast<double>(available) / kGiB, static_cast<double>(total) / kGiB);
    }
    bytes_ = bytes;
    // Our streams do not wait for the null stream, so the zeros must be in place before the memory is handed
    // out.
    OCTET_CUDA(cudaMemset(data_, 0, size));
    OCTET_CUDA(cudaStreamSynchronize(nullptr));
  }
  ~CudaBuffer() override { static_cast<void>(cudaFree(data_)); }

 private:
  static constexpr double kGiB = 1024.0 * 1024.0 * 1024.0;
};

class CudaHostBuffer final : public Buffer {
 public:
  CudaHostBuffer(int ordinal, std::int64_t bytes, std::string_view purpose) {
    OCTET_CUDA(cudaSetDevice(ordinal));
    const std::size_t size = static_cast<std::size_t>(std::max(bytes, kSmallestAllocation));
    const cudaError_t status = cudaHostAlloc(&data_, size, cudaHostAllocDefault);
    if (status != cudaSuccess) {
      static_cast<void>(cudaGetLastError());
      fail(ErrorKind::kDevice, "cannot allocate {} bytes of page-locked host memory for {}: {}", bytes,
           purpose, cudaGetErrorString(status));
    }
    std::fill_n(static_cast<unsigned char*>(data_), size, static_cast<unsigned char>(0));
    bytes_ = bytes;
  }
  ~CudaHostBuffer() override { static_cast<void>(cudaFreeHost(data_)); }
};

// Dense bf16 rate of the tensor cores from the number of multiprocessors, with the boost clock that the
// vendor's data sheets count with: 312e12 for an A100, 989e12 for an H100 SXM or H200.
double tensor_core_flops(const cudaDeviceProp& properties, double clock) {
  const int architecture = properties.major * 10 + properties.minor;
  const double multiprocessors = properties.multiProcessorCount;
  if (architecture == 80) return multiprocessors * 2048.0 * std::min(clock, 1.41e9);
  if (architecture == 90) return multiprocessors * 4096.0 * std::min(clock, 1.83e9);
  return 0.0;
}

class CudaDevice final : public Device {
 public:
  explicit CudaDevice(int ordinal) : ordinal_(ordinal) {
    OCTET_CUDA(cudaSetDevice(ordinal_));
    OCTET_CUDA(cudaGetDeviceProperties(&properties_, ordinal_));
    if (properties_.major < 8) {
      fail(ErrorKind::kDevice, "{} has compute capability {}.{}; 8.0 (A100) or newer is needed",
           properties_.name, properties_.major, properties_.minor);
    }
    int kilohertz = 0;
    OCTET_CUDA(cudaDeviceGetAttribute(&kilohertz, cudaDevAttrClockRate, ordinal_));
    peak_flops_ = tensor_core_flops(properties_, 1e3 * kilohertz);
  }

  DeviceKind kind() const override { return DeviceKind::kCuda; }
  std::string name() const override { return properties_.name; }
  std::string identity() const override {
    std::string text = "GPU-";
    for (int i = 0; i < 16; ++i) {
      if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
      text += fmt::format("{:02x}", static_cast<unsigned char>(properties_.uuid.bytes[i]));
    }
    return text;
  }
  std::string pci_address() const override {
    return fmt::format("{:04x}:{:02x}:{:02x}.0", static_cast<unsigned>(properties_.pciDomainID),
                       static_cast<unsigned>(properties_.pciBusID),
                       static_cast<unsigned>(properties_.pciDeviceID));
  }
  std::int64_t memory_total() const override { return memory().total; }
  std::int64_t memory_used() const override {
    const Memory now = memory();
    return now.total - now.available;
  }
  double peak_flops() const override { return peak_flops_; }
  int compute_capability() const override { return 10 * properties_.major + properties_.minor; }

  std::unique_ptr<Buffer> allocate(std::int64_t bytes, std::string_view purpose) override {
    return std::make_unique<CudaBuffer>(ordinal_, bytes, purpose);
  }
  std::unique_ptr<Buffer> allocate_host(std::int64_t bytes, std::string_view purpose) override {
    return std::make_unique<CudaHostBuffer>(ordinal_, bytes, purpose);
  }
  std::unique_ptr<Stream> make_stream(bool high_priority) override {
    return std::make_unique<CudaStream>(ordinal_, high_priority);
  }
  std::unique_ptr<Event> make_event(bool timed) override {
    return std::make_unique<CudaEvent>(ordinal_, timed);
  }

  void copy(Stream& stream, void* to, const void* from, std::int64_t bytes) override {
    if (bytes == 0) return;
    OCTET_CUDA(cudaSetDevice(ordinal_));
    OCTET_CUDA(cudaMemcpyAsync(to, from, static_cast<std::size_t>(bytes), cudaMemcpyDefault, native(stream)));
    if (is_pageable(to) || is_pageable(from)) OCTET_CUDA(cudaStreamSynchronize(native(stream)));
  }
  void zero(Stream& stream, void* data, std::int64_t bytes) override {
    if (bytes == 0) return;
    OCTET_CUDA(cudaSetDevice(ordinal_));
    OCTET_CUDA(cudaMemsetAsync(data, 0, static_cast<std::size_t>(bytes), native(stream)));
  }

  int ordinal() const { return ordinal_; }

 private:
  struct Memory {
    std::int64_t available, total;
  };
  Memory memory() const {
    std::size_t available = 0, total = 0;
    OCTET_CUDA(cudaSetDevice(ordinal_));
    OCTET_CUDA(cudaMemGetInfo(&available, &total));
    return {static_cast<std::int64_t>(available), static_cast<std::int64_t>(total)};
  }
  // A copy from pageable memory may return while the driver's staging is still under way.
  static bool is_pageable(const void* pointer) {
    cudaPointerAttributes attributes{};
    OCTET_CUDA(cudaPointerGetAttributes(&attributes, pointer));
    return attributes.type == cudaMemoryTypeUnregistered;
  }

  int ordinal_;
  cudaDeviceProp properties_{};
  double peak_flops_ = 0.0;
};

std::string three_part(int version, int major_unit, int minor_unit) {
  return fmt::format("{}.{}.{}", version / major_unit, version % major_unit / minor_unit,
                     version % minor_unit);
}

}  // namespace

cudaStream_t native(Stream& stream) {
  auto* cuda = dynamic_cast<CudaStream*>(&stream);
  OCTET_ASSERT(cuda != nullptr);
  return cuda->handle();
}

int ordinal_of(const Device& device) {
  const auto* cuda = dynamic_cast<const CudaDevice*>(&device);
  OCTET_ASSERT(cuda != nullptr);
  return cuda->ordinal();
}

int cuda_device_count() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    return 0;
  }
  return count;
}

std::unique_ptr<Device> make_cuda_device(int ordinal) {
  const int count = cuda_device_count();
  if (ordinal < 0 || ordinal >= count) {
    fail(ErrorKind::kDevice, "there is no CUDA device {}: this process sees {} of them", ordinal, count);
  }
  return std::make_unique<CudaDevice>(ordinal);
}

std::string cuda_versions() {
  int runtime = 0, driver = 0, nccl = 0;
  static_cast<void>(cudaRuntimeGetVersion(&runtime));
  static_cast<void>(cudaDriverGetVersion(&driver));
  static_cast<void>(ncclGetVersion(&nccl));
  return fmt::format(
      "CUDA {}.{} (driver {}.{}), cuBLASLt {}, cuDNN {}, NCCL {}", runtime / 1000, runtime % 1000 / 10,
      driver / 1000, driver % 1000 / 10, three_part(static_cast<int>(cublasLtGetVersion()), 10000, 100),
      three_part(static_cast<int>(cudnnGetVersion()), 10000, 100), three_part(nccl, 10000, 100));
}

}  // namespace octet
