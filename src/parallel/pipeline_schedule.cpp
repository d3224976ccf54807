#include "octet/parallel/pipeline_schedule.h"

#include <algorithm>
#include <utility>

#include "octet/base/error.h"
#include "pipeline_messages.h"

namespace octet {

namespace {

using Lists = std::vector<std::vector<Action>>;

PipelineSchedule empty_schedule(std::string name, int stages, int chunks, int micro_batches) {
  if (stages < 1) fail(ErrorKind::kUsage, "parallel.pipeline = {}: allowed are 1 and more", stages);
  if (micro_batches < 1) {
    fail(ErrorKind::kUsage, "a pipeline step of {} micro-batches: allowed are 1 and more", micro_batches);
  }
  return {std::move(name), stages, chunks, micro_batches, Lists(static_cast<std::size_t>(stages))};
}

}  // namespace

bool is_message(ActionKind kind) {
  return is_send(kind) || kind == ActionKind::kReceiveForward || kind == ActionKind::kReceiveBackward;
}

bool is_send(ActionKind kind) {
  return kind == ActionKind::kSendForward || kind == ActionKind::kSendBackward;
}

bool is_forward_message(ActionKind kind) {
  return kind == ActionKind::kSendForward || kind == ActionKind::kReceiveForward;
}

std::string describe(const Action& action) {
  const char* names[] = {"forward",      "backward",        "backward-input", "backward-weight",
                         "send-forward", "receive-forward", "send-backward",  "receive-backward"};
  return fmt::format("{} of micro-batch {}, chunk {}", names[static_cast<int>(action.kind)],
                     action.micro_batch, action.chunk);
}

int PipelineSchedule::boundary(int rank, const Action& message) const {
  const int stage = virtual_stage(rank, message.chunk);
  const bool upper_end =
      message.kind == ActionKind::kReceiveForward || message.kind == ActionKind::kSendBackward;
  return upper_end ? stage - 1 : stage;
}

int PipelineSchedule::peer(int rank, const Action& message) const {
  const int stage = virtual_stage(rank, message.chunk), below = boundary(rank, message);
  return (below == stage ? below + 1 : below) % stages;
}

PipelineSchedule one_forward_one_backward(int stages, int micro_batches) {
  PipelineSchedule schedule = empty_schedule("1f1b", stages, 1, micro_batches);
  for (int rank = 0; rank < stages; ++rank) {
    std::vector<Action>& list = schedule.ranks[static_cast<std::size_t>(rank)];
    const int warm_up = std::min(stages - 1 - rank, micro_batches);
    for (int i = 0; i < warm_up; ++i) list.push_back({ActionKind::kForward, i, 0});
    for (int i = 0; i < micro_batches; ++i) {
      if (warm_up + i < micro_batches) list.push_back({ActionKind::kForward, warm_up + i, 0});
      list.push_back({ActionKind::kBackward, i, 0});
    }
  }
  return with_messages(schedule);
}

PipelineSchedule interleaved(int stages, int chunks, int micro_batches) {
  PipelineSchedule schedule = empty_schedule("interleaved", stages, chunks, micro_batches);
  if (chunks < 2) {
    fail(ErrorKind::kUsage,
         "parallel.chunks = {}: parallel.schedule = interleaved needs 2 or more; with 1 it is 1f1b", chunks);
  }
  if (micro_batches % stages != 0) {
    const int below = micro_batches / stages * stages;
    fail(ErrorKind::kUsage,
         "{} micro-batches (batch.global / (batch.micro × parallel.data)) do not divide by "
         "parallel.pipeline = {}, as parallel.schedule = interleaved needs; nearest: {}",
         micro_batches, stages,
         below > 0 ? fmt::format("{} or {}", below, below + stages) : fmt::format("{}", stages));
  }
  const int total = micro_batches * chunks, round = stages * chunks;
  const auto step = [&](ActionKind kind, int number) -> Action {
    const int chunk = number % round / stages;
    return {kind, number / round * stages + number % stages,
            kind == ActionKind::kForward ? chunk : chunks - 1 - chunk};
  };
  for (int rank = 0; rank < stages; ++rank) {
    std::vector<Action>& list = schedule.ranks[static_cast<std::size_t>(rank)];
    const int warm_up = std::min(stages - 1 - rank + (chunks - 1) * stages, total);
    for (int i = 0; i < warm_up; ++i) list.push_back(step(ActionKind::kForward, i));
    for (int i = 0; i < total; ++i) {
      if (warm_up + i < total) list.push_back(step(ActionKind::kForward, warm_up + i));
      list.push_back(step(ActionKind::kBackward, i));
    }
  }
  return with_messages(schedule);
}

PipelineSchedule zero_bubble_h1(int stages, int micro_batches) {
  PipelineSchedule schedule = empty_schedule("zero_bubble", stages, 1, micro_batches);
  for (int rank = 0; rank < stages; ++rank) {
    std::vector<Action>& list = schedule.ranks[static_cast<std::size_t>(rank)];
    const int warm_up = std::min(stages - 1 - rank, micro_batches), delay = std::min(rank, micro_batches);
    for (int i = 0; i < warm_up; ++i) list.push_back({ActionKind::kForward, i, 0});
    for (int i = 0; i < micro_batches; ++i) {
      if (warm_up + i < micro_batches) list.push_back({ActionKind::kForward, warm_up + i, 0});
      list.push_back({ActionKind::kBackwardInput, i, 0});
      if (i >= delay) list.push_back({ActionKind::kBackwardWeight, i - delay, 0});
    }
    for (int i = micro_batches - delay; i < micro_batches; ++i) {
      list.push_back({ActionKind::kBackwardWeight, i, 0});
    }
  }
  return with_messages(schedule);
}

PipelineSchedule make_schedule(const std::string& name, int stages, int chunks, int micro_batches) {
  if (name == "interleaved") return interleaved(stages, chunks, micro_batches);
  if (name != "1f1b" && name != "zero_bubble") {
    fail(ErrorKind::kUsage, "parallel.schedule = {}: allowed are 1f1b, interleaved, zero_bubble", name);
  }
  if (chunks != 1) {
    fail(ErrorKind::kUsage,
         "parallel.chunks = {}: parallel.schedule = {} has 1; several need parallel.schedule = interleaved",
         chunks, name);
  }
  return name == "1f1b" ? one_forward_one_backward(stages, micro_batches)
                        : zero_bubble_h1(stages, micro_batches);
}

}  // namespace octet
