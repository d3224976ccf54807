#include <algorithm>

#include "octet/parallel/pipeline_simulator.h"

namespace octet {

namespace {

/// Counts what a rank holds and remembers the peaks.
class MemoryCount {
 public:
  MemoryCount(const PipelineSchedule& schedule, int rank) : schedule_(schedule), rank_(rank) {
    now_.chunks.resize(static_cast<std::size_t>(schedule.chunks));
    peak_ = now_;
  }

  void take(const Action& action) {
    begin(action);
    raise(peak_.chunks[static_cast<std::size_t>(action.chunk)], chunk(action));
    raise(peak_.together, now_.together);
    peak_.received_activations = std::max(peak_.received_activations, now_.received_activations);
    peak_.received_gradients = std::max(peak_.received_gradients, now_.received_gradients);
    peak_.unsent_activations = std::max(peak_.unsent_activations, now_.unsent_activations);
    peak_.unsent_gradients = std::max(peak_.unsent_gradients, now_.unsent_gradients);
    end(action);
  }
  const RankMemory& peak() const { return peak_; }

 private:
  StageMemory& chunk(const Action& action) { return now_.chunks[static_cast<std::size_t>(action.chunk)]; }
  void change(int StageMemory::*count, const Action& action, int by) {
    chunk(action).*count += by;
    now_.together.*count += by;
  }
  bool has_below(const Action& action) const {
    return schedule_.stages > 1 && schedule_.virtual_stage(rank_, action.chunk) > 0;
  }
  bool has_above(const Action& action) const {
    return schedule_.stages > 1 &&
           schedule_.virtual_stage(rank_, action.chunk) < schedule_.virtual_stages() - 1;
  }

  /// What an action takes.
  void begin(const Action& action) {
    switch (action.kind) {
      case ActionKind::kForward:
        change(&StageMemory::activations, action, 1);
        change(&StageMemory::before_backward, action, 1);
        if (has_above(action)) ++now_.unsent_activations;
        break;
      case ActionKind::kBackwardInput:
        change(&StageMemory::deferred_weights, action, 1);
        [[fallthrough]];
      case ActionKind::kBackward:
        if (has_below(action)) ++now_.unsent_gradients;
        break;
      case ActionKind::kReceiveForward:
        ++now_.received_activations;
        break;
      case ActionKind::kReceiveBackward:
        ++now_.received_gradients;
        break;
      default:
        break;
    }
  }

  /// What an action gives back.
  void end(const Action& action) {
    switch (action.kind) {
      case ActionKind::kForward:
        if (has_below(action)) --now_.received_activations;
        break;
      case ActionKind::kBackward:
        change(&StageMemory::activations, action, -1);
        [[fallthrough]];
      case ActionKind::kBackwardInput:
        change(&StageMemory::before_backward, action, -1);
        if (has_above(action)) --now_.received_gradients;
        break;
      case ActionKind::kBackwardWeight:
        change(&StageMemory::activations, action, -1);
        change(&StageMemory::deferred_weights, action, -1);
        break;
      case ActionKind::kSendForward:
        --now_.unsent_activations;
        break;
      case ActionKind::kSendBackward:
        --now_.unsent_gradients;
        break;
      default:
        break;
    }
  }
  static void raise(StageMemory& peak, const StageMemory& now) {
    peak.activations = std::max(peak.activations, now.activations);
    peak.before_backward = std::max(peak.before_backward, now.before_backward);
    peak.deferred_weights = std::max(peak.deferred_weights, now.deferred_weights);
  }

  const PipelineSchedule& schedule_;
  int rank_;
  RankMemory now_, peak_;
};

}  // namespace

std::vector<RankMemory> memory_need(const PipelineSchedule& schedule) {
  check_ranges(schedule);
  std::vector<RankMemory> need;
  for (int rank = 0; rank < schedule.stages; ++rank) {
    MemoryCount count(schedule, rank);
    for (const Action& action : schedule.ranks[static_cast<std::size_t>(rank)]) count.take(action);
    need.push_back(count.peak());
  }
  return need;
}

}  // namespace octet
