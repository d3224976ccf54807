#pragma once

#include <vector>

#include "octet/parallel/pipeline_schedule.h"

namespace octet {

/// Times of one micro-batch in one virtual stage, in any unit.
struct StageCost {
  double forward = 1, backward_input = 1, backward_weight = 1;
  double transfer = 0;  ///< of a message over the boundary to the next virtual stage, and back
};

/// How a message passes; see PipelineSchedule.
enum class Transfer {
  kBuffered,    ///< a send takes no time; the message is there `transfer` later
  kRendezvous,  ///< both ends wait for one another, then for `transfer`
  /// As the engine runs it on GPUs: each rank has a queue of computations, one of activations sent and
  /// received, and one of gradients. A queue takes its actions in list order; a message holds its own queue
  /// up until the other end is there; actions wait for those of other queues that awaited_actions names.
  kStreams,
};

struct TimedAction {
  Action action;
  double start = 0;  ///< when the rank (kStreams: the queue) came to it: waiting is inside
  double end = 0;
};

/// Peaks, in micro-batches.
struct StageMemory {
  int activations = 0;       ///< forward begun, last part of backward not finished
  int before_backward = 0;   ///< forward begun, gradient of the input not finished
  int deferred_weights = 0;  ///< (input, output gradient) pairs held from kBackwardInput to kBackwardWeight
};

struct RankMemory {
  std::vector<StageMemory> chunks;  ///< peak of each
  StageMemory together;             ///< peaks of the sums over chunks
  /// Buffers over all chunks: messages received that their computation has not finished with, and outputs
  /// from the beginning of their computation to the end of their send action, which need not stand right
  /// behind it. All are rings with the generators' schedules: used and sent in the order in which they came.
  int received_activations = 0, received_gradients = 0;
  int unsent_activations = 0, unsent_gradients = 0;
};

struct PipelineTimeline {
  std::vector<std::vector<TimedAction>> ranks;
  double makespan = 0;         ///< until the last rank has ended
  std::vector<double> bubble;  ///< of each rank: share of the makespan in which it does not compute
  std::vector<RankMemory> memory;
};

/// What each rank must hold; follows from the order of actions alone, whatever they cost.
std::vector<RankMemory> memory_need(const PipelineSchedule& schedule);

/// Executes a schedule on a clock. `costs` has an element for each virtual stage, or one for all. kBackward
/// takes backward_input + backward_weight. Throws Error(kUsage) where actions are out of range, and on a
/// deadlock, with the ranks that wait for one another and what they wait at. Whether the list makes sense
/// otherwise is validate's matter. The actions of a rank are in list order.
PipelineTimeline simulate(const PipelineSchedule& schedule, const std::vector<StageCost>& costs,
                          Transfer transfer = Transfer::kBuffered);

}  // namespace octet
