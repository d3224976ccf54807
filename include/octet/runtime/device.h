#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "octet/base/tensor.h"

namespace octet {

enum class DeviceKind { kCpu, kCuda };

/// A queue of work in order. A CPU stream runs at once, so its work is complete when the call returns; a CUDA
/// stream runs behind the host.
class Stream {
 public:
  virtual ~Stream() = default;
  /// Blocks the host until all work queued so far is done. Never called inside a training step.
  virtual void synchronize() = 0;
};

/// A point in a stream that other streams, and the host, can wait for.
class Event {
 public:
  virtual ~Event() = default;
  /// Marks the present end of `stream`.
  virtual void record(Stream& stream) = 0;
  /// Lets `stream` go on only after the mark; no effect when nothing was recorded.
  virtual void block(Stream& stream) = 0;
  /// Blocks the host until the mark is reached.
  virtual void synchronize() = 0;
  /// Milliseconds from `earlier` to this mark; both must be reached.
  virtual double milliseconds_since(const Event& earlier) const = 0;
};

/// Owned memory of a device, or page-locked memory of the host. Freed on destruction; never throws then.
class Buffer {
 public:
  virtual ~Buffer() = default;
  void* data() const { return data_; }
  std::int64_t bytes() const { return bytes_; }

 protected:
  void* data_ = nullptr;
  std::int64_t bytes_ = 0;
};

/// Where tensors live and operators run: the CPU, or one CUDA device. One rank has one device.
class Device {
 public:
  virtual ~Device() = default;
  virtual DeviceKind kind() const = 0;
  /// As users know it, such as "NVIDIA H200" or the processor's model name.
  virtual std::string name() const = 0;
  /// A name that tells two devices of one node apart: the UUID of a GPU, empty for the CPU.
  virtual std::string identity() const = 0;
  /// Where a GPU lies on the PCI bus, such as "0000:18:00.0"; empty for the CPU.
  virtual std::string pci_address() const = 0;
  /// Bytes of memory in all, and bytes in use by this process as the driver sees it.
  virtual std::int64_t memory_total() const = 0;
  virtual std::int64_t memory_used() const = 0;
  /// Dense bf16 FLOP/s that MFU is taken against; 0 where unknown.
  virtual double peak_flops() const = 0;
  /// Compute capability of a GPU, such as 90 for 9.0; 0 for the CPU, which multiplies all types.
  virtual int compute_capability() const = 0;

  /// `bytes` of zeroed memory, aligned to 256 bytes. Throws Error(kDevice) that names `purpose` and the size.
  virtual std::unique_ptr<Buffer> allocate(std::int64_t bytes, std::string_view purpose) = 0;
  /// Zeroed host memory that copies to and from the device without staging.
  virtual std::unique_ptr<Buffer> allocate_host(std::int64_t bytes, std::string_view purpose) = 0;
  virtual std::unique_ptr<Stream> make_stream(bool high_priority = false) = 0;
  virtual std::unique_ptr<Event> make_event(bool timed = false) = 0;

  /// Copies between any two of: memory of this device, memory from allocate_host, ordinary host memory.
  /// Queued on the stream; ordinary host memory makes the call wait.
  virtual void copy(Stream& stream, void* to, const void* from, std::int64_t bytes) = 0;
  virtual void zero(Stream& stream, void* data, std::int64_t bytes) = 0;
};

std::unique_ptr<Device> make_cpu_device();

/// CUDA devices that this process may use; 0 without a driver, a device or a CUDA build.
int cuda_device_count();
/// Throws Error(kDevice) saying so in a build without CUDA.
std::unique_ptr<Device> make_cuda_device(int ordinal);
/// CUDA, cuBLAS, cuDNN and NCCL versions in one line; "built without CUDA" otherwise.
std::string cuda_versions();

}  // namespace octet
