#include "octet/parallel/pipeline_buffers.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

namespace octet {

namespace {

constexpr int kNobody = -1;

/// Hands out numbers, the smallest free one first, and remembers who had each before.
class Places {
 public:
  struct Taken {
    int number = 0;
    int last_user = kNobody;  ///< the action that gave it back last
  };
  Taken take() {
    const auto free = std::find(taken_.begin(), taken_.end(), false);
    const auto number = static_cast<std::size_t>(free - taken_.begin());
    if (free == taken_.end()) {
      taken_.push_back(true);
      last_.push_back(kNobody);
    }
    taken_[number] = true;
    return {static_cast<int>(number), last_[number]};
  }
  void give_back(int number, int user) {
    if (number < 0) return;  // handed over by a neighbour on the same rank
    taken_[static_cast<std::size_t>(number)] = false;
    last_[static_cast<std::size_t>(number)] = user;
  }
  int most() const { return static_cast<int>(taken_.size()); }

 private:
  std::vector<bool> taken_;
  std::vector<int> last_;
};

class BufferPlan {
 public:
  BufferPlan(const PipelineSchedule& schedule, int rank)
      : schedule_(schedule),
        rank_(rank),
        slots_(static_cast<std::size_t>(schedule.chunks)),
        awaited_(schedule.ranks[static_cast<std::size_t>(rank)].size()) {
    result_.places.assign(static_cast<std::size_t>(schedule.chunks),
                          std::vector<Place>(static_cast<std::size_t>(schedule.micro_batches), {-1, -1, -1}));
    const std::vector<Action>& list = schedule.ranks[static_cast<std::size_t>(rank)];
    for (number_ = 0; number_ < static_cast<int>(list.size()); ++number_) {
      const Action& action = list[static_cast<std::size_t>(number_)];
      await_counterpart(action);
      place(action);
      numbers_[{action.kind, action.chunk, action.micro_batch}] = number_;
    }
    for (const Places& slots : slots_) result_.slots.push_back(std::max(1, slots.most()));
    result_.stream = {outputs_.most(), std::max(1, gradients_.most())};
  }

  RankBuffers& result() { return result_; }
  std::vector<std::vector<int>>& awaited() { return awaited_; }

 private:
  void await(int number) {
    const std::vector<Action>& list = schedule_.ranks[static_cast<std::size_t>(rank_)];
    if (number == kNobody || queue_of(list[static_cast<std::size_t>(number)].kind) ==
                                 queue_of(list[static_cast<std::size_t>(number_)].kind))
      return;
    std::vector<int>& own = awaited_[static_cast<std::size_t>(number_)];
    if (std::find(own.begin(), own.end(), number) == own.end()) own.push_back(number);
  }
  void await(ActionKind kind, const Action& action) {
    const auto found = numbers_.find({kind, action.chunk, action.micro_batch});
    if (found != numbers_.end()) await(found->second);
  }
  /// The message behind a computation, the computation behind a message.
  void await_counterpart(const Action& action) {
    switch (action.kind) {
      case ActionKind::kForward:
        return await(ActionKind::kReceiveForward, action);
      case ActionKind::kSendForward:
        return await(ActionKind::kForward, action);
      case ActionKind::kBackward:
      case ActionKind::kBackwardInput:
        return await(ActionKind::kReceiveBackward, action);
      case ActionKind::kSendBackward:
        await(ActionKind::kBackward, action);
        return await(ActionKind::kBackwardInput, action);
      default:
        return;
    }
  }

  int take(Places& places) {
    const Places::Taken taken = places.take();
    await(taken.last_user);
    return taken.number;
  }
  void place(const Action& action) {
    const int stage = schedule_.virtual_stage(rank_, action.chunk);
    const bool embeds = stage == 0, head = stage == schedule_.virtual_stages() - 1;
    const auto chunk = static_cast<std::size_t>(action.chunk);
    Place& place = result_.places[chunk][static_cast<std::size_t>(action.micro_batch)];
    switch (action.kind) {
      case ActionKind::kReceiveForward:
        place.slot = take(slots_[chunk]);
        break;
      case ActionKind::kForward:
        if (place.slot < 0) place.slot = take(slots_[chunk]);
        (head ? place.gradient : place.output) = take(head ? gradients_ : outputs_);
        break;
      case ActionKind::kSendForward:
        outputs_.give_back(place.output, number_);
        break;
      case ActionKind::kReceiveBackward:
        if (place.gradient < 0) place.gradient = take(gradients_);
        break;
      case ActionKind::kBackward:
      case ActionKind::kBackwardInput:
        if (embeds) gradients_.give_back(place.gradient, number_);
        if (action.kind == ActionKind::kBackward) slots_[chunk].give_back(place.slot, number_);
        break;
      case ActionKind::kBackwardWeight:
        slots_[chunk].give_back(place.slot, number_);
        break;
      case ActionKind::kSendBackward:
        gradients_.give_back(place.gradient, number_);
        break;
    }
  }

  const PipelineSchedule& schedule_;
  int rank_, number_ = 0;
  std::vector<Places> slots_;
  Places outputs_, gradients_;
  std::map<std::tuple<ActionKind, int, int>, int> numbers_;
  std::vector<std::vector<int>> awaited_;
  RankBuffers result_;
};

}  // namespace

ActionQueue queue_of(ActionKind kind) {
  if (!is_message(kind)) return ActionQueue::kCompute;
  return is_forward_message(kind) ? ActionQueue::kForwardMessages : ActionQueue::kBackwardMessages;
}

RankBuffers plan_buffers(const PipelineSchedule& schedule, int rank) {
  return std::move(BufferPlan(schedule, rank).result());
}

std::vector<std::vector<int>> awaited_actions(const PipelineSchedule& schedule, int rank) {
  return std::move(BufferPlan(schedule, rank).awaited());
}

}  // namespace octet
