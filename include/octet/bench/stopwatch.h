#pragma once

#include <mpi.h>

#include <functional>

#include "octet/runtime/device.h"

namespace octet {

/// What one run of some work took.
struct Timing {
  double ms = 0.0;          ///< median of the samples, of the slowest rank
  double fastest_ms = 0.0;  ///< median of the samples, of the fastest rank
  int samples = 0;
  int runs = 0;  ///< in a sample, one directly behind the other
};

/// Times work on a stream by events, so that the host's own work does not count. Collective over `ranks`: all
/// run the work equally often, as collectives need, and begin each sample together.
class Stopwatch {
 public:
  /// `seconds`: about what one measurement may take, warm-up apart.
  Stopwatch(Device& device, Stream& stream, MPI_Comm ranks, double seconds);

  /// Two runs to warm up, one more to see how long it takes, then 3 to 15 samples of as many runs as make a
  /// sample long against the clock.
  Timing time(const std::function<void()>& work);

 private:
  /// Milliseconds that `runs` runs take.
  double sample(const std::function<void()>& work, int runs);
  double over_ranks(double value, MPI_Op op) const;

  Device& device_;
  Stream& stream_;
  MPI_Comm ranks_;
  double seconds_;
  std::unique_ptr<Event> begin_, end_;
};

}  // namespace octet
