#include "progress_bar.h"

#include <fmt/format.h>
#include <unistd.h>
#include <cmath>

#include <algorithm>
#include <cstdio>

namespace octet {
namespace {

constexpr std::chrono::milliseconds kRedraw{100};  ///< on a terminal
constexpr std::chrono::milliseconds kLine{5000};   ///< elsewhere
constexpr int kWidth = 30;

std::string clock_text(double seconds) {
  const auto whole = std::llround(seconds);
  return fmt::format("{}:{:02}:{:02}", whole / 3600, whole / 60 % 60, whole % 60);
}

}  // namespace

ProgressBar::ProgressBar(std::int64_t total_bytes, bool shown)
    : total_(std::max<std::int64_t>(1, total_bytes)),
      shown_(shown),
      terminal_(isatty(STDERR_FILENO) == 1),
      start_(Clock::now()),
      last_(start_) {}

ProgressBar::~ProgressBar() {
  if (drawn_) std::fputs("\r\033[K", stderr);
}

double ProgressBar::seconds() const {
  return std::chrono::duration<double>(Clock::now() - start_).count();
}

void ProgressBar::update(std::int64_t done_bytes) {
  if (!shown_ || Clock::now() - last_ < (terminal_ ? kRedraw : kLine)) return;
  last_ = Clock::now();
  const double fraction = std::min(1.0, static_cast<double>(done_bytes) / static_cast<double>(total_));
  const double speed = static_cast<double>(done_bytes) / seconds();
  const double left = speed > 0 ? static_cast<double>(total_ - done_bytes) / speed : 0.0;
  const std::string numbers = fmt::format("{:5.1f} %  {:.1f} of {:.1f} MB  {:.1f} MB/s  ETA {}",
                                          100.0 * fraction, static_cast<double>(done_bytes) / 1e6,
                                          static_cast<double>(total_) / 1e6, speed / 1e6, clock_text(left));
  if (terminal_) {
    const int full = static_cast<int>(fraction * kWidth);
    std::fputs(fmt::format("\r[{:=<{}}{:{}}] {}\033[K", "", full, "", kWidth - full, numbers).c_str(),
               stderr);
    std::fflush(stderr);
    drawn_ = true;
  } else {
    std::fputs((numbers + "\n").c_str(), stderr);
  }
}

}  // namespace octet
