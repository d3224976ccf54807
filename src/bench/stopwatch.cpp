#include "octet/bench/stopwatch.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace octet {

namespace {

constexpr double kShortestSampleMs = 1.0;
constexpr int kFewestSamples = 3, kMostSamples = 15, kMostRuns = 200;

}  // namespace

Stopwatch::Stopwatch(Device& device, Stream& stream, MPI_Comm ranks, double seconds)
    : device_(device),
      stream_(stream),
      ranks_(ranks),
      seconds_(seconds),
      begin_(device_.make_event(true)),
      end_(device_.make_event(true)) {}

double Stopwatch::over_ranks(double value, MPI_Op op) const {
  MPI_Allreduce(MPI_IN_PLACE, &value, 1, MPI_DOUBLE, op, ranks_);
  return value;
}

double Stopwatch::sample(const std::function<void()>& work, int runs) {
  MPI_Barrier(ranks_);
  begin_->record(stream_);
  for (int run = 0; run < runs; ++run) work();
  end_->record(stream_);
  end_->synchronize();
  return end_->milliseconds_since(*begin_);
}

Timing Stopwatch::time(const std::function<void()>& work) {
  sample(work, 2);
  const double once = std::max(over_ranks(sample(work, 1), MPI_MAX), 1e-3);
  const double most_ms = seconds_ * 1e3;
  Timing timing;
  timing.runs = static_cast<int>(std::clamp(std::ceil(kShortestSampleMs / once), 1.0, double{kMostRuns}));
  timing.samples = static_cast<int>(
      std::clamp(most_ms / (once * timing.runs), double{kFewestSamples}, double{kMostSamples}));
  std::vector<double> times;
  for (int i = 0; i < timing.samples; ++i) times.push_back(sample(work, timing.runs) / timing.runs);
  const auto middle = times.begin() + timing.samples / 2;
  std::nth_element(times.begin(), middle, times.end());
  timing.ms = over_ranks(*middle, MPI_MAX);
  timing.fastest_ms = over_ranks(*middle, MPI_MIN);
  return timing;
}

}  // namespace octet
