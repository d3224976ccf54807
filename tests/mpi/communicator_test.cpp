// Collectives on known messages, over MPI; with Cuda in the name over NCCL, or staged where ranks share GPUs.
#include <gtest/gtest.h>

#include <numeric>

#include "octet/bench/operands.h"
#include "octet/comm/communicator.h"
#include "octet/runtime/device_choice.h"
#include "support/training_support.h"

namespace octet::test {
namespace {

/// Element `index` of rank `rank`: a small whole number, so that sums are exact in bfloat16.
float value_at(int rank, std::int64_t index) {
  return static_cast<float>((index * 7 + rank * 3 + index / 5) % 5) - 2.0f;
}

class CommunicatorTest : public testing::Test {
 protected:
  void open(const char* device) {
    Deck::Run run;
    run.device = device;
    run.share_gpus = true;
    choice_ = open_device(world_, run);
    stream_ = choice_.device->make_stream();
  }
  Device& device() { return *choice_.device; }
  int own() const { return world_.rank(); }
  int size() const { return world_.size(); }

  /// `count` elements of this rank from `first` on.
  Tensor message(Operands& memory, DType type, std::int64_t count) {
    std::vector<float> values(static_cast<std::size_t>(count));
    for (std::int64_t i = 0; i < count; ++i) values[static_cast<std::size_t>(i)] = value_at(own(), i);
    const Tensor tensor = memory.zeros(type, 1, count);
    std::vector<BF16> narrow(values.begin(), values.end());
    const void* const from = type == DType::kBF16 ? static_cast<const void*>(narrow.data()) : values.data();
    device().copy(*stream_, tensor.data, from, tensor.bytes());
    stream_->synchronize();
    return tensor;
  }
  std::vector<float> read(const Tensor& tensor) { return to_host(device(), *stream_, tensor); }

  void collectives_give_what_they_say() {
    const auto ranks = make_communicator(world_.ranks(), device(), choice_.shared, "world");
    for (const DType type : {DType::kF32, DType::kBF16}) {
      for (const std::int64_t part : {1, 3, 1000}) {
        SCOPED_TRACE(fmt::format("{}, parts of {}", name_of(type), part));
        const std::int64_t n = part * size();
        Operands memory(device(), *stream_, 0, type);
        const Tensor in = message(memory, type, n), out = memory.zeros(type, 1, n),
                     slice = memory.zeros(type, 1, part);
        const auto sum_at = [&](std::int64_t i) {
          float sum = 0.0f;
          for (int rank = 0; rank < size(); ++rank) sum += value_at(rank, i);
          return sum;
        };
        ranks->all_to_all(*stream_, in, out);
        std::vector<float> found = read(out);
        for (std::int64_t i = 0; i < n; ++i)
          ASSERT_EQ(found[static_cast<std::size_t>(i)],
                    value_at(static_cast<int>(i / part), own() * part + i % part));
        ranks->all_gather(*stream_, in.range(0, part), out);
        found = read(out);
        for (std::int64_t i = 0; i < n; ++i)
          ASSERT_EQ(found[static_cast<std::size_t>(i)], value_at(static_cast<int>(i / part), i % part));
        ranks->reduce_scatter(*stream_, in, slice);
        found = read(slice);
        for (std::int64_t i = 0; i < part; ++i)
          ASSERT_EQ(found[static_cast<std::size_t>(i)], sum_at(own() * part + i));
        ranks->all_reduce(*stream_, in, ReduceOp::kSum);
        found = read(in);
        for (std::int64_t i = 0; i < n; ++i) ASSERT_EQ(found[static_cast<std::size_t>(i)], sum_at(i));
      }
    }
  }

  World world_{MPI_COMM_WORLD};
  DeviceChoice choice_;
  std::unique_ptr<Stream> stream_;
};

TEST_F(CommunicatorTest, CollectivesGiveWhatTheySay) {
  open("cpu");
  collectives_give_what_they_say();
}

TEST_F(CommunicatorTest, StagedCollectivesGiveWhatTheySay) {
  open("cpu");
  const auto ranks = make_staged_communicator(world_.ranks(), device(), "world");
  Operands memory(device(), *stream_, 0, DType::kF32);
  const std::int64_t part = 5, n = part * size();
  const Tensor in = message(memory, DType::kF32, n), out = memory.zeros(DType::kF32, 1, n);
  ranks->all_to_all(*stream_, in, out);
  const std::vector<float> found = read(out);
  for (std::int64_t i = 0; i < n; ++i)
    ASSERT_EQ(found[static_cast<std::size_t>(i)],
              value_at(static_cast<int>(i / part), own() * part + i % part));
}

TEST_F(CommunicatorTest, CudaCollectivesGiveWhatTheySay) {
  if (gpu_missing()) GTEST_SKIP() << "no CUDA device";
  open("cuda");
  collectives_give_what_they_say();
}

}  // namespace
}  // namespace octet::test
