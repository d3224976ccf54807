#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include "octet/base/error.h"
#include "octet/parallel/pipeline_buffers.h"
#include "pipeline_cost.h"

namespace octet {

namespace {

constexpr double kNotDone = -1;

/// One rank's queues, and how far each has come.
struct RankQueues {
  std::array<std::vector<int>, kActionQueues> queues;  ///< numbers of actions in the list
  std::array<std::size_t, kActionQueues> at{};
  std::array<double, kActionQueues> clock{};
  std::vector<std::vector<int>> awaited;
  std::vector<TimedAction> times;
};

class StreamSimulation {
 public:
  StreamSimulation(const PipelineSchedule& schedule, const std::vector<StageCost>& costs)
      : schedule_(schedule), costs_(costs) {
    for (int rank = 0; rank < schedule.stages; ++rank) {
      RankQueues& own = ranks_.emplace_back();
      own.awaited = awaited_actions(schedule, rank);
      const std::vector<Action>& list = schedule.ranks[static_cast<std::size_t>(rank)];
      for (std::size_t i = 0; i < list.size(); ++i) {
        own.queues[static_cast<std::size_t>(queue_of(list[i].kind))].push_back(static_cast<int>(i));
        own.times.push_back({list[i], 0, kNotDone});
      }
    }
  }

  std::vector<std::vector<TimedAction>> run() {
    bool progress = true;
    while (progress) {
      progress = false;
      for (int rank = 0; rank < schedule_.stages; ++rank) {
        for (std::size_t queue = 0; queue < kActionQueues; ++queue) {
          while (step(rank, queue)) progress = true;
        }
      }
    }
    std::string waiting;
    std::vector<std::vector<TimedAction>> result;
    for (int rank = 0; rank < schedule_.stages; ++rank) {
      std::vector<TimedAction>& times = of(rank).times;
      const auto first =
          std::find_if(times.begin(), times.end(), [](const TimedAction& t) { return t.end == kNotDone; });
      if (first != times.end()) {
        waiting +=
            fmt::format("{}rank {} waits at {}", waiting.empty() ? "" : "; ", rank, describe(first->action));
      }
      result.push_back(std::move(times));
    }
    if (waiting.empty()) return result;
    fail(ErrorKind::kUsage, "schedule {} deadlocks with messages on streams of their own: {}", schedule_.name,
         waiting);
  }

 private:
  RankQueues& of(int rank) { return ranks_[static_cast<std::size_t>(rank)]; }
  const StageCost& cost(int stage) const {
    return costs_.size() == 1 ? costs_[0] : costs_[static_cast<std::size_t>(stage)];
  }

  /// The next action of a queue, where nothing that it waits for is open; nullptr otherwise. Its start is set
  /// to when its queue came to it, and `ready` to when it can begin.
  TimedAction* ready(int rank, std::size_t queue, double* ready) {
    RankQueues& own = of(rank);
    if (own.at[queue] == own.queues[queue].size()) return nullptr;
    const auto number = static_cast<std::size_t>(own.queues[queue][own.at[queue]]);
    TimedAction& action = own.times[number];
    *ready = own.clock[queue];
    for (const int other : own.awaited[number]) {
      const double end = own.times[static_cast<std::size_t>(other)].end;
      if (end == kNotDone) return nullptr;
      *ready = std::max(*ready, end);
    }
    action.start = own.clock[queue];
    return &action;
  }
  void finish(int rank, std::size_t queue, TimedAction& action, double end) {
    action.end = of(rank).clock[queue] = end;
    ++of(rank).at[queue];
  }

  bool step(int rank, std::size_t queue) {
    double begin = 0, other_begin = 0;
    TimedAction* own = ready(rank, queue, &begin);
    if (own == nullptr) return false;
    if (!is_message(own->action.kind)) {
      const int stage = schedule_.virtual_stage(rank, own->action.chunk);
      finish(rank, queue, *own, begin + computing_time(cost(stage), own->action.kind));
      return true;
    }
    // Both ends of a message stand in the same queue, and each holds its queue up until the other is there.
    const int peer = schedule_.peer(rank, own->action);
    TimedAction* other = ready(peer, queue, &other_begin);
    if (other == nullptr ||
        message_number(schedule_, peer, other->action) != message_number(schedule_, rank, own->action))
      return false;
    const double end = std::max(begin, other_begin) + cost(schedule_.boundary(rank, own->action)).transfer;
    finish(rank, queue, *own, end);
    finish(peer, queue, *other, end);
    return true;
  }

  const PipelineSchedule& schedule_;
  const std::vector<StageCost>& costs_;
  std::vector<RankQueues> ranks_;
};

}  // namespace

std::vector<std::vector<TimedAction>> simulate_streams(const PipelineSchedule& schedule,
                                                       const std::vector<StageCost>& costs) {
  return StreamSimulation(schedule, costs).run();
}

}  // namespace octet
