#pragma once

#include <vector>

#include "octet/model/chunk.h"
#include "octet/parallel/pipeline_schedule.h"

namespace octet {

/// Which buffers the micro-batches of a rank take.
struct RankBuffers {
  std::vector<std::vector<Place>> places;  ///< [chunk][micro-batch]
  std::vector<int> slots;                  ///< of each chunk: micro-batches held at once, at least 1
  StreamBuffers stream;
};

/// Walks a rank's actions and gives every micro-batch its buffers for as long as it needs them: activations
/// from the arrival of the input to the end of the backward pass, an output until it is sent, a gradient from
/// its arrival (with the head: from the forward pass) until it is passed back.
RankBuffers plan_buffers(const PipelineSchedule& schedule, int rank);

/// The queues that a rank's actions run on, each in list order: computations, messages of activations,
/// messages of gradients.
enum class ActionQueue { kCompute, kForwardMessages, kBackwardMessages };
constexpr int kActionQueues = 3;
ActionQueue queue_of(ActionKind kind);

/// For each action of a rank's list, the actions of other queues, as numbers in the list, that it waits for:
/// a computation for its message, a message for its computation, and both for the last user of the buffer
/// that they write. All stand before it in the list.
std::vector<std::vector<int>> awaited_actions(const PipelineSchedule& schedule, int rank);

}  // namespace octet
