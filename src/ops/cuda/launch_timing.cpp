#include "launch_timing.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "../../runtime/cuda/cuda_check.h"
#include "handle.h"

namespace octet::cuda {
namespace {

constexpr std::size_t kFinalists = 8;
constexpr double kNear = 1.3;                // finalists take at most so much of the fastest first time
constexpr double kClearly = 0.99;            // of the first way's time
constexpr int kRounds = 9;                   // of all finalists in turn
constexpr double kSampleMicroseconds = 200;  // short work is repeated to fill as much
constexpr int kMostRepeats = 50;

using EventHandle = Handle<cudaEvent_t, cudaEventDestroy>;

EventHandle make_event() {
  cudaEvent_t event = nullptr;
  OCTET_CUDA(cudaEventCreate(&event));
  return EventHandle(event);
}

struct Way {
  std::size_t number = 0;
  EventHandle begin = make_event(), end = make_event();
  std::vector<double> times = {};  // of one launch, microseconds

  // Queues `repeats` launches between the events.
  bool queue(cudaStream_t stream, int repeats, const std::function<bool(std::size_t)>& launch) const {
    OCTET_CUDA(cudaEventRecord(begin.get(), stream));
    for (int i = 0; i < repeats; ++i) {
      if (!launch(number)) return false;
    }
    OCTET_CUDA(cudaEventRecord(end.get(), stream));
    return true;
  }
  double read(int repeats) const {
    float milliseconds = 0.0f;
    OCTET_CUDA(cudaEventElapsedTime(&milliseconds, begin.get(), end.get()));
    return 1e3 * static_cast<double>(milliseconds) / repeats;
  }
  double median() const {
    std::vector<double> sorted = times;
    std::sort(sorted.begin(), sorted.end());
    return sorted[sorted.size() / 2];
  }
};

}  // namespace

std::optional<FastestLaunch> find_fastest(cudaStream_t stream, std::size_t count,
                                          const std::function<bool(std::size_t)>& launch) {
  std::vector<Way> ways;
  for (std::size_t number = 0; number < count; ++number) {
    if (!launch(number)) continue;  // loads its code
    Way way{number};
    if (!way.queue(stream, 1, launch)) continue;
    OCTET_CUDA(cudaStreamSynchronize(stream));
    way.times.push_back(way.read(1));
    ways.push_back(std::move(way));
  }
  if (ways.empty()) return std::nullopt;
  // The first of them stays in the race whatever its first time.
  std::stable_sort(ways.begin() + 1, ways.end(),
                   [](const Way& a, const Way& b) { return a.times[0] < b.times[0]; });
  double best = ways[0].times[0];
  for (const Way& way : ways) best = std::min(best, way.times[0]);
  const auto slow =
      std::find_if(ways.begin() + 1, ways.end(), [&](const Way& way) { return way.times[0] > kNear * best; });
  ways.erase(slow, ways.end());
  if (ways.size() > kFinalists) ways.erase(ways.begin() + kFinalists, ways.end());

  const int repeats = static_cast<int>(
      std::clamp(std::ceil(kSampleMicroseconds / std::max(best, 0.1)), 1.0, double{kMostRepeats}));
  for (Way& way : ways) way.times.clear();
  for (int round = 0; round < kRounds; ++round) {
    for (const Way& way : ways) OCTET_ASSERT(way.queue(stream, repeats, launch));
    OCTET_CUDA(cudaStreamSynchronize(stream));
    for (Way& way : ways) way.times.push_back(way.read(repeats));
  }
  const auto fastest = std::min_element(ways.begin(), ways.end(),
                                        [](const Way& a, const Way& b) { return a.median() < b.median(); });
  const Way& chosen = fastest->median() < kClearly * ways[0].median() ? *fastest : ways[0];
  return FastestLaunch{chosen.number, chosen.median()};
}

}  // namespace octet::cuda
