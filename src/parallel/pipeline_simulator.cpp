#include "octet/parallel/pipeline_simulator.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "octet/base/error.h"
#include "pipeline_cost.h"

namespace octet {

namespace {

constexpr double kNotSent = -1;

class Simulation {
 public:
  Simulation(const PipelineSchedule& schedule, const std::vector<StageCost>& costs, Transfer transfer)
      : schedule_(schedule),
        costs_(costs),
        transfer_(transfer),
        clock_(schedule.ranks.size(), 0.0),
        arrival_(static_cast<std::size_t>(2 * schedule.virtual_stages() * schedule.micro_batches), kNotSent) {
    timeline_.ranks.resize(schedule.ranks.size());
  }

  PipelineTimeline run() {
    if (transfer_ == Transfer::kStreams) {
      timeline_.ranks = simulate_streams(schedule_, costs_);
      for (int rank = 0; rank < schedule_.stages; ++rank) {
        for (const TimedAction& timed : timeline_.ranks[static_cast<std::size_t>(rank)])
          clock(rank) = std::max(clock(rank), timed.end);
      }
    } else {
      run_in_list_order();
    }
    timeline_.makespan = *std::max_element(clock_.begin(), clock_.end());
    for (int rank = 0; rank < schedule_.stages; ++rank) {
      const double busy = work(rank);
      timeline_.bubble.push_back(timeline_.makespan > 0 ? 1 - busy / timeline_.makespan : 0);
    }
    timeline_.memory = memory_need(schedule_);
    return std::move(timeline_);
  }

 private:
  void run_in_list_order() {
    bool progress = true;
    while (progress) {
      progress = false;
      for (int rank = 0; rank < schedule_.stages; ++rank) {
        while (step(rank)) progress = true;
      }
    }
    for (int rank = 0; rank < schedule_.stages; ++rank) {
      if (next(rank)) refuse_deadlock(rank);
    }
  }
  /// What a rank does next, if anything.
  std::optional<Action> next(int rank) const {
    const auto number = timeline_.ranks[static_cast<std::size_t>(rank)].size();
    const std::vector<Action>& list = schedule_.ranks[static_cast<std::size_t>(rank)];
    if (number == list.size()) return std::nullopt;
    return list[number];
  }
  const StageCost& cost(int stage) const {
    return costs_.size() == 1 ? costs_[0] : costs_[static_cast<std::size_t>(stage)];
  }
  double computing_time(int rank, const Action& action) const {
    return octet::computing_time(cost(schedule_.virtual_stage(rank, action.chunk)), action.kind);
  }
  double work(int rank) const {
    double sum = 0;
    for (const Action& action : schedule_.ranks[static_cast<std::size_t>(rank)]) {
      sum += computing_time(rank, action);
    }
    return sum;
  }
  std::size_t message_number(int rank, const Action& action) const {
    return static_cast<std::size_t>(octet::message_number(schedule_, rank, action));
  }
  double& clock(int rank) { return clock_[static_cast<std::size_t>(rank)]; }
  void finish(int rank, const Action& action, double end) {
    timeline_.ranks[static_cast<std::size_t>(rank)].push_back({action, clock(rank), end});
    clock(rank) = end;
  }

  /// One action of this rank, and with rendezvous the other end's; false where it has to wait.
  bool step(int rank) {
    const std::optional<Action> action = next(rank);
    if (!action) return false;
    if (!is_message(action->kind)) {
      finish(rank, *action, clock(rank) + computing_time(rank, *action));
      return true;
    }
    const std::size_t number = message_number(rank, *action);
    const double transfer = cost(schedule_.boundary(rank, *action)).transfer;
    if (transfer_ == Transfer::kRendezvous) {
      const int peer = schedule_.peer(rank, *action);
      const std::optional<Action> other = next(peer);
      if (!other || !is_message(other->kind) || message_number(peer, *other) != number) return false;
      const double end = std::max(clock(rank), clock(peer)) + transfer;
      finish(rank, *action, end);
      finish(peer, *other, end);
      return true;
    }
    if (is_send(action->kind)) {
      arrival_[number] = clock(rank) + transfer;
      finish(rank, *action, clock(rank));
      return true;
    }
    if (arrival_[number] == kNotSent) return false;
    finish(rank, *action, std::max(clock(rank), arrival_[number]));
    return true;
  }

  /// Follows who waits for whom from a rank that stands still, and names those in the circle, or those on the
  /// way to a rank that has ended.
  [[noreturn]] void refuse_deadlock(int rank) const {
    std::vector<int> way;
    while (next(rank) && std::find(way.begin(), way.end(), rank) == way.end()) {
      way.push_back(rank);
      rank = schedule_.peer(rank, *next(rank));
    }
    way.erase(way.begin(), std::find(way.begin(), way.end(), next(rank) ? rank : way.front()));
    std::string text;
    for (const int waiting : way) {
      const Action action = *next(waiting);
      const int peer = schedule_.peer(waiting, action);
      text += fmt::format("{}rank {} waits at {} for rank {}{}", text.empty() ? "" : "; ", waiting,
                          describe(action), peer, next(peer) ? "" : ", which has ended");
    }
    fail(ErrorKind::kUsage, "schedule {} deadlocks with {}: {}", schedule_.name,
         transfer_ == Transfer::kRendezvous ? "sends that wait for their receives" : "buffered sends", text);
  }

  const PipelineSchedule& schedule_;
  const std::vector<StageCost>& costs_;
  Transfer transfer_;
  std::vector<double> clock_;
  std::vector<double> arrival_;  ///< of each message
  PipelineTimeline timeline_;
};

}  // namespace

PipelineTimeline simulate(const PipelineSchedule& schedule, const std::vector<StageCost>& costs,
                          Transfer transfer) {
  check_ranges(schedule);
  OCTET_ASSERT(costs.size() == 1 || costs.size() == static_cast<std::size_t>(schedule.virtual_stages()));
  return Simulation(schedule, costs, transfer).run();
}

}  // namespace octet
