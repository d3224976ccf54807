#include <gtest/gtest.h>

#include <limits>

#include "../src/bench/expected_bandwidth.h"
#include "octet/bench/table.h"

namespace octet {
namespace {

TEST(BenchTable, AWrongResultIsPrintedAndCounted) {
  ResultTable table({{"what", "what"}, {"gb_s", "GB/s", 2}, {"bytes", "bytes"}, {"correct", "correct"}});
  table.add({{"what", "copy"}, {"gb_s", 12.345}, {"bytes", 4096}, {"correct", true}});
  EXPECT_TRUE(table.correct());
  table.add({{"what", "a longer name"}, {"gb_s", std::numeric_limits<double>::infinity()}});
  EXPECT_TRUE(table.correct()) << "a row without a verdict is none that is wrong";
  table.add({{"what", "cast"}, {"correct", false}});
  EXPECT_FALSE(table.correct());
  EXPECT_EQ(table.text(),
            "  what            GB/s  bytes  correct\n"
            "  copy           12.35   4096      yes\n"
            "  a longer name      –      –        –\n"
            "  cast               –      –    WRONG\n");
  const nlohmann::json json = table.json();
  EXPECT_EQ(json["columns"]["gb_s"], "GB/s");
  EXPECT_EQ(json["rows"][0]["gb_s"], 12.345);
  EXPECT_TRUE(json["rows"][1]["gb_s"].is_null()) << "JSON has no infinity";
  EXPECT_TRUE(json["rows"][2]["bytes"].is_null());
}

TEST(ExpectedBandwidth, HoldsForBoardsAndSizesThatWereMeasured) {
  constexpr std::int64_t kMiB = 1 << 20;
  const auto expected = [](const char* device, int ranks, const char* operation, std::int64_t bytes) {
    const auto found = expected_bandwidth(device, ranks, operation, bytes);
    return found ? found->bus_gb_s : 0.0;
  };
  EXPECT_EQ(expected("NVIDIA H200", 2, "all_reduce", 1024 * kMiB), 330);
  EXPECT_EQ(expected("NVIDIA H200", 2, "all_reduce", 512 * kMiB), 218) << "that of 16 MiB is a lower bound";
  EXPECT_EQ(expected("NVIDIA H200", 2, "all_reduce", kMiB), 0) << "small messages were not measured";
  EXPECT_EQ(expected("NVIDIA H100 80GB HBM3", 8, "reduce_scatter", 1024 * kMiB), 349);
  EXPECT_EQ(expected("NVIDIA A100-SXM4-80GB", 8, "all_reduce", 1024 * kMiB), 200);
  EXPECT_EQ(expected("NVIDIA H200", 3, "all_reduce", 1024 * kMiB), 0);
  for (const char* other :
       {"NVIDIA H100 PCIe", "NVIDIA H200 NVL", "NVIDIA A100-PCIE-40GB", "NVIDIA GH200 480GB", "AMD EPYC"})
    EXPECT_EQ(expected(other, 8, "all_reduce", 1024 * kMiB), 0) << other;
}

}  // namespace
}  // namespace octet
