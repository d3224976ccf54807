// `octet bench` from the outside.
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "system/run_command.h"

namespace octet {
namespace {

testing::AssertionResult says(const CommandResult& result, const std::string& part) {
  if (result.output.find(part) != std::string::npos) return testing::AssertionSuccess();
  return testing::AssertionFailure() << "`" << part << "` is not in:\n" << result.output;
}

const std::string kTiny = std::string(OCTET_SOURCE_DIR) +
                          "/inputs/shapes/tiny.cfg --set model.layers=1 --set batch.sequence=32"
                          " --set run.device=cpu --set precision.compute=fp32 ";

TEST(BenchCommand, AllPartsRunAndLeaveOneFile) {
  const TemporaryFolder folder;
  const CommandResult result =
      run_octet_ranks(2, "bench " + kTiny + "--set run.directory=" + (folder / "run") +
                             " --max-bytes 128K --io-mib 1 --seconds 0.0001");
  ASSERT_EQ(result.code, 0) << result.output;
  EXPECT_TRUE(says(result, "all results are correct"));
  const auto json = nlohmann::json::parse(std::ifstream(folder / "run/bench.json"));
  EXPECT_EQ(json["format"], "octet-bench");
  EXPECT_EQ(json["ranks"], 2);
  EXPECT_EQ(json["deck"]["model.layers"], "1");
  EXPECT_TRUE(json["correct"].get<bool>());
  for (const char* part : {"comm", "matmul", "attention", "kernels", "io", "step"}) {
    ASSERT_TRUE(json["parts"].contains(part)) << part;
    EXPECT_FALSE(json["parts"][part]["rows"].empty()) << part;
    for (const auto& row : json["parts"][part]["rows"]) {
      for (const auto& [key, heading] : json["parts"][part]["columns"].items())
        EXPECT_TRUE(row.contains(key)) << part << ": " << row;
    }
  }
}

TEST(BenchCommand, OnlyThePartsNamedRun) {
  const TemporaryFolder folder;
  const CommandResult result = run_octet("bench attention kernels " + kTiny + "--seconds 0.0001 --json " +
                                         (folder / "deep/found.json"));
  ASSERT_EQ(result.code, 0) << result.output;
  const auto json = nlohmann::json::parse(std::ifstream(folder / "deep/found.json"));
  EXPECT_EQ(json["parts"].size(), 2u);
  EXPECT_TRUE(says(result, "% of copy"));
}

TEST(BenchCommand, BadUsageIsNamed) {
  const auto refused = [](const std::string& arguments, const std::string& message) {
    const CommandResult result = run_octet("bench " + arguments);
    EXPECT_EQ(result.code, 2) << result.output;
    EXPECT_TRUE(says(result, message));
  };
  refused("atention " + kTiny, "atention is neither a part nor a deck file; did you mean attention?");
  refused("comm", "needs at least one deck file");
  refused(kTiny + "--max-byte 1M", "did you mean --max-bytes?");
  refused(kTiny + "--max-bytes 1T", "--max-bytes 1T is no size");
  refused(kTiny + "--json /proc/nowhere/found.json", "/proc/nowhere/found.json cannot be written");
}

}  // namespace
}  // namespace octet
