#include "pipeline_messages.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "octet/parallel/pipeline_simulator.h"

namespace octet {

namespace {

/// Every message as soon as it can be sent and as late as it is needed. Only buffered sends run this, and the
/// ends may disagree about the order of messages.
PipelineSchedule with_eager_messages(const PipelineSchedule& computations) {
  PipelineSchedule result = computations;
  const int last = computations.virtual_stages() - 1;
  for (int rank = 0; rank < computations.stages; ++rank) {
    std::vector<Action>& list = result.ranks[static_cast<std::size_t>(rank)];
    list.clear();
    for (const Action& action : computations.ranks[static_cast<std::size_t>(rank)]) {
      const int stage = computations.virtual_stage(rank, action.chunk);
      const auto add = [&](ActionKind kind, bool present) {
        if (present) list.push_back({kind, action.micro_batch, action.chunk});
      };
      const bool forward = action.kind == ActionKind::kForward;
      const bool backward = action.kind == ActionKind::kBackward || action.kind == ActionKind::kBackwardInput;
      add(ActionKind::kReceiveForward, forward && stage > 0);
      add(ActionKind::kReceiveBackward, backward && stage < last);
      list.push_back(action);
      add(ActionKind::kSendForward, forward && stage < last);
      add(ActionKind::kSendBackward, backward && stage > 0);
    }
  }
  return result;
}

/// A message of the eager run, from when it can be sent to when it is needed.
struct Passage {
  int sender = 0, receiver = 0;
  double sent = 0, needed = 0;
};

class MessagePlacer {
 public:
  explicit MessagePlacer(const PipelineSchedule& computations)
      : eager_(with_eager_messages(computations)),
        run_(simulate(eager_, {StageCost{}})),
        passages_(static_cast<std::size_t>(2 * eager_.virtual_stages() * eager_.micro_batches)),
        computations_(eager_.ranks.size()) {
    for (int rank = 0; rank < eager_.stages; ++rank) {
      for (const TimedAction& timed : run_.ranks[static_cast<std::size_t>(rank)]) {
        if (!is_message(timed.action.kind)) {
          computations_[static_cast<std::size_t>(rank)].push_back(timed);
        } else if (is_send(timed.action.kind)) {
          passage(rank, timed.action).sender = rank;
          passage(rank, timed.action).sent = timed.start;
        } else {
          passage(rank, timed.action).receiver = rank;
          passage(rank, timed.action).needed = timed.end;
        }
      }
    }
  }

  std::vector<Action> list(int rank) {
    using Key = std::tuple<double, bool, int, int, bool>;
    std::vector<std::pair<Key, Action>> events;
    for (const TimedAction& timed : run_.ranks[static_cast<std::size_t>(rank)]) {
      const Action& action = timed.action;
      if (!is_message(action.kind)) {
        events.push_back({{timed.start, true, 0, 0, false}, action});
        continue;
      }
      // Of messages of the same moment those over even links pass first: where each blocks, that takes two
      // turns and not one for each rank.
      const int link = eager_.boundary(rank, action) % eager_.stages;
      events.push_back(
          {{moment(passage(rank, action)), false, link % 2, link, is_forward_message(action.kind)}, action});
    }
    std::stable_sort(events.begin(), events.end(),
                     [](const auto& a, const auto& b) { return a.first < b.first; });
    std::vector<Action> result;
    for (const auto& event : events) result.push_back(event.second);
    return result;
  }

 private:
  Passage& passage(int rank, const Action& message) {
    const int way = is_forward_message(message.kind) ? 0 : 1;
    return passages_[static_cast<std::size_t>(
        (way * eager_.virtual_stages() + eager_.boundary(rank, message)) * eager_.micro_batches +
        message.micro_batch)];
  }

  /// The first computation of a rank that ends after `time`.
  std::vector<TimedAction>::const_iterator running(int rank, double time) const {
    const std::vector<TimedAction>& list = computations_[static_cast<std::size_t>(rank)];
    return std::upper_bound(list.begin(), list.end(), time,
                            [](double t, const TimedAction& timed) { return t < timed.end; });
  }
  /// How long after `time` a rank is still busy with what it began before.
  double busy(int rank, double time) const {
    const auto timed = running(rank, time);
    const bool inside = timed != computations_[static_cast<std::size_t>(rank)].end() && timed->start < time;
    return inside ? timed->end - time : 0;
  }

  /// When a message passes: the first moment at which neither end computes, or else that at which they wait
  /// least for one another.
  double moment(const Passage& passage) const {
    double best = passage.sent;
    double least = busy(passage.sender, best) + busy(passage.receiver, best);
    for (const int rank : {passage.sender, passage.receiver}) {
      const auto end = computations_[static_cast<std::size_t>(rank)].end();
      for (auto timed = running(rank, passage.sent); timed != end && timed->end <= passage.needed; ++timed) {
        const double wait = busy(passage.sender, timed->end) + busy(passage.receiver, timed->end);
        if (std::pair{wait, timed->end} < std::pair{least, best}) {
          best = timed->end;
          least = wait;
        }
      }
    }
    return best;
  }

  PipelineSchedule eager_;
  PipelineTimeline run_;
  std::vector<Passage> passages_;
  std::vector<std::vector<TimedAction>> computations_;  ///< of each rank
};

}  // namespace

/// The order is that of a run with equal costs and no latency. A computation stands where it begins there, a
/// message at a moment between its sending and its use, before computations that begin just then.
PipelineSchedule with_messages(const PipelineSchedule& computations) {
  if (computations.stages == 1) return computations;
  MessagePlacer placer(computations);
  PipelineSchedule result = computations;
  for (int rank = 0; rank < result.stages; ++rank) {
    result.ranks[static_cast<std::size_t>(rank)] = placer.list(rank);
  }
  return result;
}

}  // namespace octet
