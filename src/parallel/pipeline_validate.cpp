#include <array>
#include <map>
#include <tuple>
#include <utility>

#include "octet/base/error.h"
#include "octet/parallel/pipeline_schedule.h"
#include "octet/parallel/pipeline_simulator.h"

namespace octet {

namespace {

constexpr int kKinds = 8;

/// Where each action of one rank stands in its list.
class RankCheck {
 public:
  RankCheck(const PipelineSchedule& schedule, int rank)
      : schedule_(schedule),
        rank_(rank),
        place_(static_cast<std::size_t>(kKinds * schedule.chunks * schedule.micro_batches), -1) {
    int number = 0;
    for (const Action& action : schedule.ranks[static_cast<std::size_t>(rank)]) {
      if (has(action)) refuse("has {} twice", describe(action));
      place(action) = number++;
    }
  }

  void run() {
    for (int chunk = 0; chunk < schedule_.chunks; ++chunk) {
      for (int micro_batch = 0; micro_batch < schedule_.micro_batches; ++micro_batch) {
        check(chunk, micro_batch);
      }
    }
  }

 private:
  template <typename... Args>
  [[noreturn]] void refuse(fmt::format_string<Args...> text, Args&&... args) const {
    fail(ErrorKind::kUsage, "schedule {}: rank {} {}", schedule_.name, rank_,
         fmt::format(text, std::forward<Args>(args)...));
  }
  int& place(const Action& action) {
    return place_[static_cast<std::size_t>((static_cast<int>(action.kind) * schedule_.chunks + action.chunk) *
                                               schedule_.micro_batches +
                                           action.micro_batch)];
  }
  bool has(const Action& action) { return place(action) >= 0; }
  void need(const Action& action, bool wanted) {
    if (wanted && !has(action)) refuse("lacks {}", describe(action));
    if (!wanted && has(action)) refuse("has {}, which does not belong there", describe(action));
  }
  /// Holds where one of them is not there.
  void in_order(const Action& first, const Action& second) {
    if (has(first) && has(second) && place(first) > place(second)) {
      refuse("has {} before {}", describe(second), describe(first));
    }
  }

  void check(int chunk, int micro_batch) {
    const auto action = [&](ActionKind kind) { return Action{kind, micro_batch, chunk}; };
    const int stage = schedule_.virtual_stage(rank_, chunk), last = schedule_.virtual_stages() - 1;
    const bool messages = schedule_.stages > 1, below = messages && stage > 0,
               above = messages && stage < last;
    const Action forward = action(ActionKind::kForward), weight = action(ActionKind::kBackwardWeight);
    const bool split = has(action(ActionKind::kBackwardInput)) || has(weight);
    const Action backward = action(split ? ActionKind::kBackwardInput : ActionKind::kBackward);
    need(forward, true);
    need(backward, true);
    need(weight, split);
    need(action(ActionKind::kBackward), !split);
    need(action(ActionKind::kReceiveForward), below);
    need(action(ActionKind::kSendForward), above);
    need(action(ActionKind::kReceiveBackward), above);
    need(action(ActionKind::kSendBackward), below);
    in_order(action(ActionKind::kReceiveForward), forward);
    in_order(forward, action(ActionKind::kSendForward));
    in_order(forward, backward);
    in_order(action(ActionKind::kReceiveBackward), backward);
    in_order(backward, action(ActionKind::kSendBackward));
    in_order(backward, weight);
    if (!messages && chunk > 0) {
      in_order({ActionKind::kForward, micro_batch, chunk - 1}, forward);
      in_order(backward, {ActionKind::kBackward, micro_batch, chunk - 1});
      in_order(backward, {ActionKind::kBackwardInput, micro_batch, chunk - 1});
    }
  }

  const PipelineSchedule& schedule_;
  int rank_;
  std::vector<int> place_;
};

/// The messages from one rank to another, as that end lists them.
using Channel = std::vector<std::pair<int, Action>>;  ///< boundary and action

void check_message_order(const PipelineSchedule& schedule) {
  std::map<std::pair<int, int>, std::array<Channel, 2>> channels;  // by sender and receiver; both ends' lists
  for (int rank = 0; rank < schedule.stages; ++rank) {
    for (const Action& action : schedule.ranks[static_cast<std::size_t>(rank)]) {
      if (!is_message(action.kind)) continue;
      const bool send = is_send(action.kind);
      const int peer = schedule.peer(rank, action);
      channels[send ? std::pair{rank, peer} : std::pair{peer, rank}][send ? 0 : 1].push_back(
          {schedule.boundary(rank, action), action});
    }
  }
  for (const auto& [ends, lists] : channels) {
    for (std::size_t i = 0; i < lists[0].size(); ++i) {
      const auto identity = [](const std::pair<int, Action>& message) {
        return std::tuple{message.first, is_forward_message(message.second.kind), message.second.micro_batch};
      };
      if (identity(lists[0][i]) != identity(lists[1][i])) {
        fail(ErrorKind::kUsage,
             "schedule {}: message {} from rank {} to rank {} is {} at one end and {} at the other",
             schedule.name, i, ends.first, ends.second, describe(lists[0][i].second),
             describe(lists[1][i].second));
      }
    }
  }
}

}  // namespace

void check_ranges(const PipelineSchedule& schedule) {
  const auto refuse = [&](std::string what) {
    fail(ErrorKind::kUsage, "schedule {}: {}", schedule.name, what);
  };
  if (schedule.stages < 1 || schedule.chunks < 1 || schedule.micro_batches < 1 ||
      schedule.ranks.size() != static_cast<std::size_t>(schedule.stages)) {
    refuse(fmt::format("{} lists for {} stages of {} chunks and {} micro-batches", schedule.ranks.size(),
                       schedule.stages, schedule.chunks, schedule.micro_batches));
  }
  for (int rank = 0; rank < schedule.stages; ++rank) {
    for (const Action& action : schedule.ranks[static_cast<std::size_t>(rank)]) {
      if (action.chunk < 0 || action.chunk >= schedule.chunks || action.micro_batch < 0 ||
          action.micro_batch >= schedule.micro_batches) {
        refuse(fmt::format("rank {} has {}; there are {} micro-batches and {} chunks", rank, describe(action),
                           schedule.micro_batches, schedule.chunks));
      }
      if (!is_message(action.kind)) continue;
      const int boundary = schedule.boundary(rank, action);
      if (schedule.stages == 1 || boundary < 0 || boundary >= schedule.virtual_stages() - 1) {
        refuse(fmt::format("rank {} has {}, but no rank is at the other end", rank, describe(action)));
      }
    }
  }
}

void validate(const PipelineSchedule& schedule) {
  check_ranges(schedule);
  for (int rank = 0; rank < schedule.stages; ++rank) RankCheck(schedule, rank).run();
  check_message_order(schedule);
  simulate(schedule, {StageCost{}}, Transfer::kRendezvous);
  simulate(schedule, {StageCost{}}, Transfer::kStreams);
}

}  // namespace octet
