#pragma once

#include "octet/parallel/pipeline_simulator.h"

namespace octet {

/// How long a computation of a virtual stage takes; 0 for messages.
inline double computing_time(const StageCost& cost, ActionKind kind) {
  switch (kind) {
    case ActionKind::kForward:
      return cost.forward;
    case ActionKind::kBackward:
      return cost.backward_input + cost.backward_weight;
    case ActionKind::kBackwardInput:
      return cost.backward_input;
    case ActionKind::kBackwardWeight:
      return cost.backward_weight;
    default:
      return 0;
  }
}

/// The same number at both ends of a message.
inline int message_number(const PipelineSchedule& schedule, int rank, const Action& action) {
  const int way = is_forward_message(action.kind) ? 0 : 1;
  return (way * schedule.virtual_stages() + schedule.boundary(rank, action)) * schedule.micro_batches +
         action.micro_batch;
}

/// The actions of each rank with Transfer::kStreams, in list order.
std::vector<std::vector<TimedAction>> simulate_streams(const PipelineSchedule& schedule,
                                                       const std::vector<StageCost>& costs);

}  // namespace octet
