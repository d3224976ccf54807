#pragma once

#include <memory>
#include <vector>

#include "octet/comm/communicator.h"
#include "octet/parallel/pipeline_schedule.h"
#include "octet/runtime/stream_timer.h"
#include "octet/train/stage_plan.h"

namespace octet {

/// Messages between pipeline stages, beside the compute stream: activations on one stream and communicator,
/// gradients on another, each in list order (Transfer::kStreams). Computations and messages wait by events
/// for one another and for the last user of the buffers that they write, so that a send never holds its stage
/// up unless the buffer is needed again. CPU streams run at once: there a message is passed where it is
/// listed.
class StageMessages {
 public:
  /// The timer adds up how long the compute stream stands still. `plan` outlives this.
  StageMessages(Device& device, const StagePlan& plan, std::unique_ptr<Communicator> activations,
                std::unique_ptr<Communicator> gradients, StreamTimer& timer);

  /// Before a computation is queued: it waits for its message.
  void begin(Stream& compute, const Action& action);
  /// Before a forward pass queues its output, or with the head its gradient: waits until the buffer is free.
  void make_room(Stream& compute, const Action& forward);
  /// After a computation was queued: its message may go, and what it used may be overwritten.
  void end(Stream& compute, const Action& action);
  /// Queues a message with rank `peer` of the pipeline.
  void pass(Stream& compute, const Action& message, Tensor values, int peer);
  /// What is queued on the compute stream next waits for all messages so far.
  void finish(Stream& compute);

  /// For messages outside a step's list, on the compute stream.
  Communicator& activations() { return *activations_; }

 private:
  struct Slot {  ///< where an input arrives, with the activations of its micro-batch
    std::unique_ptr<Event> arrived, released;
  };
  struct Output {
    std::unique_ptr<Event> computed, sent;
  };
  struct Gradient {
    std::unique_ptr<Event> arrived, computed, released;
  };
  const Chunk& chunk(const Action& action) const {
    return plan_.chunks[static_cast<std::size_t>(action.chunk)];
  }
  const Place& place(const Action& action) const;
  Slot& slot(const Action& action);
  Output& output(const Action& action);
  Gradient& gradient(const Action& action);
  void wait(Stream& compute, Event& event);

  const StagePlan& plan_;
  std::unique_ptr<Communicator> activations_, gradients_;
  StreamTimer& timer_;
  std::unique_ptr<Stream> activation_stream_, gradient_stream_;
  std::unique_ptr<Event> finished_;
  std::vector<std::vector<Slot>> slots_;  ///< [chunk][slot]
  std::vector<Output> output_buffers_;
  std::vector<Gradient> gradient_buffers_;
};

}  // namespace octet
