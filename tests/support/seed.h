#pragma once

#include <cstdint>
#include <cstdlib>
#include <random>
#include <string>

namespace octet::test {

/// The seed of a test's random inputs: the same in every run, so that a failure is repeatable and a green
/// commit stays green. OCTET_TEST_SEED=N takes another one and OCTET_TEST_SEED=random a new one each time.
inline std::uint64_t test_seed() {
  const char* const wish = std::getenv("OCTET_TEST_SEED");
  if (wish == nullptr) return 1;
  return std::string(wish) == "random" ? std::random_device{}() : std::strtoull(wish, nullptr, 10);
}

}  // namespace octet::test
