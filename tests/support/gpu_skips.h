#pragma once

#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <string_view>

namespace octet {

/// GPU tests (Cuda in their name) that this run skipped.
inline int skipped_gpu_tests() {
  const testing::UnitTest& all = *testing::UnitTest::GetInstance();
  int skipped = 0;
  for (int s = 0; s < all.total_test_suite_count(); ++s) {
    const testing::TestSuite& suite = *all.GetTestSuite(s);
    for (int t = 0; t < suite.total_test_count(); ++t) {
      const testing::TestInfo& test = *suite.GetTestInfo(t);
      const bool gpu = std::string_view(suite.name()).find("Cuda") != std::string_view::npos ||
                       std::string_view(test.name()).find("Cuda") != std::string_view::npos;
      if (gpu && test.should_run() && test.result()->Skipped()) ++skipped;
    }
  }
  return skipped;
}

/// The exit code of a test program: OCTET_REQUIRE_GPU=1 turns the skip of a GPU test into a failure.
inline int exit_code(int result) {
  const char* required = std::getenv("OCTET_REQUIRE_GPU");
  const int skipped = skipped_gpu_tests();
  if (skipped > 0 && required != nullptr && std::string_view(required) == "1") {
    std::fprintf(stderr, "OCTET_REQUIRE_GPU=1, but %d GPU tests were skipped\n", skipped);
    return 1;
  }
  return result;
}

}  // namespace octet
