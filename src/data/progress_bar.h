#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace octet {

/// Shows on standard error how far work on a known number of bytes is, how fast it goes and when it ends: a
/// bar in place on a terminal, a line every few seconds elsewhere.
class ProgressBar {
 public:
  ProgressBar(std::int64_t total_bytes, bool shown);
  ~ProgressBar();  ///< wipes the bar
  void update(std::int64_t done_bytes);
  double seconds() const;

 private:
  using Clock = std::chrono::steady_clock;
  std::int64_t total_;
  bool shown_, terminal_;
  bool drawn_ = false;
  Clock::time_point start_, last_;
};

}  // namespace octet
