#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>

#include "octet/base/error.h"
#include "octet/runtime/device.h"

namespace octet {
namespace {

constexpr std::int64_t kAlignment = 256;

using ByteCount = std::atomic<std::int64_t>;

class CpuBuffer : public Buffer {
 public:
  /// Refuses more than the host's memory `limit`, since an overcommitting kernel would grant it and kill us
  /// later. `used` outlives the device when the buffer does.
  CpuBuffer(std::int64_t bytes, std::string_view purpose, std::int64_t limit, std::shared_ptr<ByteCount> used)
      : used_(std::move(used)) {
    OCTET_ASSERT(bytes >= 0);
    const std::int64_t padded = std::max<std::int64_t>(1, (bytes + kAlignment - 1) / kAlignment) * kAlignment;
    if (bytes <= limit) data_ = std::aligned_alloc(kAlignment, static_cast<std::size_t>(padded));
    if (data_ == nullptr) {
      fail(ErrorKind::kDevice, "the host cannot give {} bytes ({:.2f} GiB) of its {} bytes for {}", bytes,
           static_cast<double>(bytes) / (1 << 30), limit, purpose);
    }
    std::memset(data_, 0, static_cast<std::size_t>(padded));
    bytes_ = bytes;
    *used_ += bytes_;
  }
  ~CpuBuffer() override {
    *used_ -= bytes_;
    std::free(data_);
  }
  CpuBuffer(const CpuBuffer&) = delete;
  CpuBuffer& operator=(const CpuBuffer&) = delete;

 private:
  std::shared_ptr<ByteCount> used_;
};

class CpuStream : public Stream {
 public:
  void synchronize() override {}
};

class CpuEvent : public Event {
 public:
  void record(Stream&) override { time_ = std::chrono::steady_clock::now(); }
  void block(Stream&) override {}
  void synchronize() override {}
  double milliseconds_since(const Event& earlier) const override {
    const auto& start = dynamic_cast<const CpuEvent&>(earlier).time_;
    return std::chrono::duration<double, std::milli>(time_ - start).count();
  }

 private:
  std::chrono::steady_clock::time_point time_;
};

/// What follows the first "key ... :" of a /proc file, without the blanks around it; empty when there is
/// none.
std::string proc_value(const char* path, std::string_view key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    const std::size_t colon = line.find(':');
    if (!line.starts_with(key) || colon == std::string::npos) continue;
    const std::size_t begin = line.find_first_not_of(" \t", colon + 1);
    return begin == std::string::npos ? "" : line.substr(begin, line.find_last_not_of(" \t") + 1 - begin);
  }
  return "";
}

std::int64_t host_memory() {
  return std::atoll(proc_value("/proc/meminfo", "MemTotal").c_str()) * 1024;
}

class CpuDevice : public Device {
 public:
  DeviceKind kind() const override { return DeviceKind::kCpu; }
  std::string name() const override {
    const std::string model = proc_value("/proc/cpuinfo", "model name");
    return model.empty() ? "CPU" : model;
  }
  std::string identity() const override { return ""; }
  std::string pci_address() const override { return ""; }
  std::int64_t memory_total() const override { return memory_total_; }
  std::int64_t memory_used() const override { return *used_; }
  double peak_flops() const override { return 0.0; }
  int compute_capability() const override { return 0; }

  std::unique_ptr<Buffer> allocate(std::int64_t bytes, std::string_view purpose) override {
    return std::make_unique<CpuBuffer>(bytes, purpose, memory_total_, used_);
  }
  std::unique_ptr<Buffer> allocate_host(std::int64_t bytes, std::string_view purpose) override {
    return std::make_unique<CpuBuffer>(bytes, purpose, memory_total_, std::make_shared<ByteCount>(0));
  }
  std::unique_ptr<Stream> make_stream(bool) override { return std::make_unique<CpuStream>(); }
  std::unique_ptr<Event> make_event(bool) override { return std::make_unique<CpuEvent>(); }

  void copy(Stream&, void* to, const void* from, std::int64_t bytes) override {
    if (bytes > 0) std::memmove(to, from, static_cast<std::size_t>(bytes));
  }
  void zero(Stream&, void* data, std::int64_t bytes) override {
    if (bytes > 0) std::memset(data, 0, static_cast<std::size_t>(bytes));
  }

 private:
  std::int64_t memory_total_ = host_memory();
  std::shared_ptr<ByteCount> used_ = std::make_shared<ByteCount>(0);
};

}  // namespace

std::unique_ptr<Device> make_cpu_device() {
  return std::make_unique<CpuDevice>();
}

}  // namespace octet
