#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "octet/base/error.h"
#include "octet/runtime/device.h"

namespace octet {
namespace {

TEST(CpuDevice, MemoryIsAlignedZeroedAndCounted) {
  const std::unique_ptr<Device> device = make_cpu_device();
  for (const std::int64_t bytes : {0, 1, 255, 4097}) {
    const std::unique_ptr<Buffer> buffer = device->allocate(bytes, "a test");
    EXPECT_EQ(buffer->bytes(), bytes);
    EXPECT_EQ(device->memory_used(), bytes);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(buffer->data()) % 256, 0u);
    const auto* const data = static_cast<const unsigned char*>(buffer->data());
    EXPECT_EQ(std::count(data, data + bytes, 0), bytes);
    std::fill_n(static_cast<unsigned char*>(buffer->data()), bytes,
                0xff);  // the next buffer may get this memory
  }
  EXPECT_EQ(device->memory_used(), 0);
}

TEST(CpuDevice, MemoryThatTheHostLacksIsADeviceErrorThatNamesItsPurpose) {
  const std::unique_ptr<Device> device = make_cpu_device();
  try {
    device->allocate(std::int64_t{1} << 60, "the optimizer state");
    FAIL() << "an exbibyte was allocated";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kDevice);
    EXPECT_NE(std::string(error.what()).find("the optimizer state"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("1152921504606846976"), std::string::npos) << error.what();
  }
  EXPECT_EQ(device->memory_used(), 0);
}

TEST(CpuDevice, EventsMeasureTheTimeBetweenThem) {
  const std::unique_ptr<Device> device = make_cpu_device();
  const std::unique_ptr<Stream> stream = device->make_stream();
  const std::unique_ptr<Event> start = device->make_event(true), end = device->make_event(true);
  start->record(*stream);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  end->record(*stream);
  EXPECT_GE(end->milliseconds_since(*start), 20.0);
  EXPECT_LT(end->milliseconds_since(*start), 20000.0);
}

TEST(CpuDevice, DescribesTheHost) {
  const std::unique_ptr<Device> device = make_cpu_device();
  EXPECT_EQ(device->kind(), DeviceKind::kCpu);
  EXPECT_FALSE(device->name().empty());
  EXPECT_GT(device->memory_total(), std::int64_t{1} << 28);
}

}  // namespace
}  // namespace octet
