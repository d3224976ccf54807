#pragma once

#include <array>
#include <memory>
#include <utility>
#include <vector>

#include "octet/runtime/device.h"

namespace octet {

/// Adds up the time that a stream spends between begin() and end(), by events, so the host waits for nothing.
/// Switched on for the steps that are logged; otherwise a no-op. The last two sums can be read, since results
/// are read one step late.
class StreamTimer {
 public:
  explicit StreamTimer(Device& device) : device_(device) {}

  /// Starts a new sum and returns its number; `on` says whether anything is measured for it.
  int restart(bool on);
  void begin(Stream& stream);
  void end(Stream& stream);
  /// Milliseconds of one of the last two sums. The stream must have passed its last mark.
  double milliseconds(int sum) const;

 private:
  struct Sum {
    std::vector<std::pair<std::unique_ptr<Event>, std::unique_ptr<Event>>> marks;
    std::size_t used = 0;
    int number = -1;
  };
  Sum& present() { return sums_[static_cast<std::size_t>(number_) % sums_.size()]; }

  Device& device_;
  bool on_ = false;
  int number_ = 0;
  std::array<Sum, 2> sums_;
};

}  // namespace octet
