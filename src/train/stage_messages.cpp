#include "octet/train/stage_messages.h"

#include <utility>

namespace octet {

StageMessages::StageMessages(Device& device, const StagePlan& plan, std::unique_ptr<Communicator> activations,
                             std::unique_ptr<Communicator> gradients, StreamTimer& timer)
    : plan_(plan),
      activations_(std::move(activations)),
      gradients_(std::move(gradients)),
      timer_(timer),
      activation_stream_(device.make_stream(true)),
      gradient_stream_(device.make_stream(true)),
      finished_(device.make_event()) {
  for (const Chunk& chunk : plan.chunks) {
    std::vector<Slot>& slots = slots_.emplace_back();
    for (int i = 0; i < chunk.in_flight; ++i) slots.push_back({device.make_event(), device.make_event()});
  }
  for (int i = 0; i < plan.buffers.outputs; ++i)
    output_buffers_.push_back({device.make_event(), device.make_event()});
  for (int i = 0; i < plan.buffers.gradients; ++i)
    gradient_buffers_.push_back({device.make_event(), device.make_event(), device.make_event()});
}

const Place& StageMessages::place(const Action& action) const {
  return plan_.places[static_cast<std::size_t>(action.chunk)][static_cast<std::size_t>(action.micro_batch)];
}

StageMessages::Slot& StageMessages::slot(const Action& action) {
  return slots_[static_cast<std::size_t>(action.chunk)].at(static_cast<std::size_t>(place(action).slot));
}

StageMessages::Output& StageMessages::output(const Action& action) {
  return output_buffers_.at(static_cast<std::size_t>(place(action).output));
}

StageMessages::Gradient& StageMessages::gradient(const Action& action) {
  return gradient_buffers_.at(static_cast<std::size_t>(place(action).gradient));
}

void StageMessages::wait(Stream& compute, Event& event) {
  timer_.begin(compute);
  event.block(compute);
  timer_.end(compute);
}

void StageMessages::begin(Stream& compute, const Action& action) {
  if (plan_.schedule.stages == 1) return;
  if (action.kind == ActionKind::kForward) {
    if (!chunk(action).embeds) wait(compute, *slot(action).arrived);
  } else if (action.kind != ActionKind::kBackwardWeight) {
    if (!chunk(action).head) wait(compute, *gradient(action).arrived);
  }
}

void StageMessages::make_room(Stream& compute, const Action& forward) {
  if (plan_.schedule.stages == 1) return;
  wait(compute, chunk(forward).head ? *gradient(forward).released : *output(forward).sent);
}

void StageMessages::end(Stream& compute, const Action& action) {
  if (plan_.schedule.stages == 1) return;
  switch (action.kind) {
    case ActionKind::kForward:
      if (!chunk(action).head) output(action).computed->record(compute);
      break;
    case ActionKind::kBackward:
    case ActionKind::kBackwardInput:
      // The first stage passes no gradient on: it is done with the buffer.
      (chunk(action).embeds ? gradient(action).released : gradient(action).computed)->record(compute);
      if (action.kind == ActionKind::kBackward) slot(action).released->record(compute);
      break;
    case ActionKind::kBackwardWeight:
      slot(action).released->record(compute);
      break;
    default:
      break;
  }
}

void StageMessages::pass(Stream& compute, const Action& message, Tensor values, int peer) {
  // On CPUs the message takes its time here and now; on GPUs these marks stand side by side.
  timer_.begin(compute);
  switch (message.kind) {
    case ActionKind::kSendForward:
      output(message).computed->block(*activation_stream_);
      activations_->send(*activation_stream_, values, peer);
      output(message).sent->record(*activation_stream_);
      break;
    case ActionKind::kReceiveForward:
      slot(message).released->block(*activation_stream_);
      activations_->receive(*activation_stream_, values, peer);
      slot(message).arrived->record(*activation_stream_);
      break;
    case ActionKind::kSendBackward:
      gradient(message).computed->block(*gradient_stream_);
      gradients_->send(*gradient_stream_, values, peer);
      gradient(message).released->record(*gradient_stream_);
      break;
    case ActionKind::kReceiveBackward:
      gradient(message).released->block(*gradient_stream_);
      gradients_->receive(*gradient_stream_, values, peer);
      gradient(message).arrived->record(*gradient_stream_);
      break;
    default:
      break;
  }
  timer_.end(compute);
}

void StageMessages::finish(Stream& compute) {
  if (plan_.schedule.stages == 1) return;
  for (Stream* stream : {activation_stream_.get(), gradient_stream_.get()}) {
    finished_->record(*stream);
    wait(compute, *finished_);
  }
}

}  // namespace octet
