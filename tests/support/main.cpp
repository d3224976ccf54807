#include <gtest/gtest.h>

#include "support/gpu_skips.h"

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  return octet::exit_code(RUN_ALL_TESTS());
}
