#include "octet/parallel/pipeline_schedule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <tuple>

#include "octet/base/error.h"
#include "octet/parallel/pipeline_buffers.h"
#include "octet/parallel/pipeline_simulator.h"
#include "support/seed.h"

namespace octet {
namespace {

constexpr double kRounding = 1e-9;
constexpr Transfer kInListOrder[] = {Transfer::kBuffered, Transfer::kRendezvous};
constexpr Transfer kTransfers[] = {Transfer::kBuffered, Transfer::kRendezvous, Transfer::kStreams};

/// Every schedule of 1 to 8 stages, 1 to 16 micro-batches, up to 4 chunks.
template <typename Check>
void for_all_schedules(Check check) {
  for (int stages = 1; stages <= 8; ++stages) {
    for (int micro_batches = 1; micro_batches <= 16; ++micro_batches) {
      check(one_forward_one_backward(stages, micro_batches));
      check(zero_bubble_h1(stages, micro_batches));
      for (int chunks = 2; chunks <= 4 && micro_batches % stages == 0; ++chunks) {
        check(interleaved(stages, chunks, micro_batches));
      }
    }
  }
}

std::string title(const PipelineSchedule& schedule) {
  return fmt::format("{}, {} stages, {} chunks, {} micro-batches", schedule.name, schedule.stages,
                     schedule.chunks, schedule.micro_batches);
}

std::vector<StageCost> random_costs(std::mt19937& random, int virtual_stages) {
  std::uniform_real_distribution<double> time(0.1, 3);
  std::vector<StageCost> costs(static_cast<std::size_t>(virtual_stages));
  for (StageCost& cost : costs) cost = {time(random), time(random), time(random), time(random)};
  return costs;
}

template <typename Work>
std::string refusal(Work work) {
  try {
    work();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kUsage);
    return error.what();
  }
  return "nothing refused";
}

#define EXPECT_HAS(text, part) EXPECT_NE((text).find(part), std::string::npos) << (text)

std::vector<Action>::iterator find(std::vector<Action>& list, const Action& action) {
  const auto found = std::find(list.begin(), list.end(), action);
  EXPECT_NE(found, list.end()) << describe(action);
  return found;
}

TEST(PipelineSchedule, EveryScheduleIsValid) {
  for_all_schedules(
      [](const PipelineSchedule& schedule) { EXPECT_NO_THROW(validate(schedule)) << title(schedule); });
}

/// Counted apart from validate.
TEST(PipelineSchedule, EveryMicroBatchPassesEveryVirtualStageOnceEachWay) {
  for_all_schedules([](const PipelineSchedule& schedule) {
    for (const std::vector<Action>& list : schedule.ranks) {
      std::map<std::tuple<int, int, ActionKind>, int> times;
      for (const Action& action : list) ++times[{action.chunk, action.micro_batch, action.kind}];
      for (int chunk = 0; chunk < schedule.chunks; ++chunk) {
        for (int i = 0; i < schedule.micro_batches; ++i) {
          const int whole = times[{chunk, i, ActionKind::kBackward}];
          EXPECT_EQ((times[{chunk, i, ActionKind::kForward}]), 1) << title(schedule);
          EXPECT_EQ((whole + times[{chunk, i, ActionKind::kBackwardInput}]), 1) << title(schedule);
          EXPECT_EQ((whole + times[{chunk, i, ActionKind::kBackwardWeight}]), 1) << title(schedule);
        }
      }
    }
  });
}

/// So that `micro_batch % peak` is a free place for its activations.
TEST(PipelineSchedule, MicroBatchesOfAChunkComeInRisingOrder) {
  for_all_schedules([](const PipelineSchedule& schedule) {
    for (const std::vector<Action>& list : schedule.ranks) {
      std::map<std::pair<int, ActionKind>, int> expected;
      for (const Action& action : list) {
        EXPECT_EQ(action.micro_batch, (expected[{action.chunk, action.kind}]++)) << title(schedule);
      }
    }
  });
}

bool is_backward(ActionKind kind) {
  return kind == ActionKind::kBackward || kind == ActionKind::kBackwardInput;
}

/// Whether `takes` see chunks and micro-batches in the order in which `gives` did, where both are listed.
template <typename Gives, typename Takes>
void expect_first_come_first_served(const PipelineSchedule& schedule, Gives gives, Takes takes) {
  for (const std::vector<Action>& list : schedule.ranks) {
    std::vector<std::pair<int, int>> given, taken;
    for (const Action& action : list) {
      if (gives(action.kind)) given.push_back({action.chunk, action.micro_batch});
      if (takes(action.kind)) taken.push_back({action.chunk, action.micro_batch});
    }
    const auto keep_common = [](auto& kept, const auto& other) {
      std::erase_if(kept, [&](const auto& x) { return std::count(other.begin(), other.end(), x) == 0; });
    };
    keep_common(given, taken);
    keep_common(taken, given);
    EXPECT_EQ(given, taken) << title(schedule);
  }
}

/// So that message buffers can be rings.
TEST(PipelineSchedule, MessagesAreUsedAndSentInTheOrderInWhichTheyCame) {
  for_all_schedules([](const PipelineSchedule& schedule) {
    const auto is = [](ActionKind wanted) { return [=](ActionKind kind) { return kind == wanted; }; };
    expect_first_come_first_served(schedule, is(ActionKind::kReceiveForward), is(ActionKind::kForward));
    expect_first_come_first_served(schedule, is(ActionKind::kForward), is(ActionKind::kSendForward));
    expect_first_come_first_served(schedule, is(ActionKind::kReceiveBackward), is_backward);
    expect_first_come_first_served(schedule, is_backward, is(ActionKind::kSendBackward));
  });
}

TEST(PipelineSchedule, NoCostsAndNoWayOfSendingDeadlock) {
  std::mt19937 random(test::test_seed());
  for_all_schedules([&](const PipelineSchedule& schedule) {
    const std::vector<StageCost> costs = random_costs(random, schedule.virtual_stages());
    const double buffered = simulate(schedule, costs, Transfer::kBuffered).makespan;
    const double rendezvous = simulate(schedule, costs, Transfer::kRendezvous).makespan;
    EXPECT_LE(buffered, rendezvous * (1 + kRounding)) << title(schedule);
    const double streams = simulate(schedule, costs, Transfer::kStreams).makespan;
    EXPECT_LE(streams, rendezvous * (1 + kRounding)) << title(schedule);
  });
}

/// The clock against the rules: nothing starts on a rank before the action ahead of it ended, and no
/// computation before its input has crossed from the neighbour.
TEST(PipelineSchedule, SimulatedTimesKeepEveryDependency) {
  std::mt19937 random(test::test_seed());
  const PipelineSchedule schedules[] = {one_forward_one_backward(4, 7), interleaved(2, 3, 6),
                                        zero_bubble_h1(5, 6)};
  for (const PipelineSchedule& schedule : schedules) {
    const std::vector<StageCost> costs = random_costs(random, schedule.virtual_stages());
    for (const Transfer transfer : kInListOrder) {
      const PipelineTimeline timeline = simulate(schedule, costs, transfer);
      std::map<std::tuple<int, int, bool>, TimedAction> computed;  // by virtual stage, micro-batch, forward
      for (int rank = 0; rank < schedule.stages; ++rank) {
        double clock = 0;
        for (const TimedAction& timed : timeline.ranks[static_cast<std::size_t>(rank)]) {
          EXPECT_GE(timed.start, clock);
          clock = timed.end;
          const ActionKind kind = timed.action.kind;
          if (is_message(kind) || kind == ActionKind::kBackwardWeight) continue;
          computed[{schedule.virtual_stage(rank, timed.action.chunk), timed.action.micro_batch,
                    kind == ActionKind::kForward}] = timed;
        }
      }
      for (int stage = 0; stage + 1 < schedule.virtual_stages(); ++stage) {
        const double latency = costs[static_cast<std::size_t>(stage)].transfer - kRounding;
        for (int i = 0; i < schedule.micro_batches; ++i) {
          EXPECT_GE((computed[{stage + 1, i, true}].start), (computed[{stage, i, true}].end + latency));
          EXPECT_GE((computed[{stage, i, false}].start), (computed[{stage + 1, i, false}].end + latency));
        }
      }
    }
  }
}

/// Begin and end of each action with messages on streams, waiting left out.
std::vector<std::vector<std::pair<double, double>>> times_on_streams(const PipelineSchedule& schedule,
                                                                     const std::vector<StageCost>& costs) {
  std::vector<std::vector<std::pair<double, double>>> result;
  const PipelineTimeline timeline = simulate(schedule, costs, Transfer::kStreams);
  for (int rank = 0; rank < schedule.stages; ++rank) {
    std::vector<std::pair<double, double>>& times = result.emplace_back();
    for (const TimedAction& timed : timeline.ranks[static_cast<std::size_t>(rank)]) {
      const int stage = is_message(timed.action.kind) ? schedule.boundary(rank, timed.action)
                                                      : schedule.virtual_stage(rank, timed.action.chunk);
      const StageCost& cost = costs[static_cast<std::size_t>(stage)];
      double duration = cost.transfer;
      if (timed.action.kind == ActionKind::kForward) duration = cost.forward;
      if (timed.action.kind == ActionKind::kBackward) duration = cost.backward_input + cost.backward_weight;
      if (timed.action.kind == ActionKind::kBackwardInput) duration = cost.backward_input;
      if (timed.action.kind == ActionKind::kBackwardWeight) duration = cost.backward_weight;
      times.push_back({timed.end - duration, timed.end});
    }
  }
  return result;
}

/// Whoever has a buffer has it alone, from the first to the last action that touches it.
TEST(PipelineStreams, NoBufferIsTakenBeforeItsLastUserIsDone) {
  std::mt19937 random(test::test_seed());
  for_all_schedules([&](const PipelineSchedule& schedule) {
    if (schedule.stages == 1) return;
    const auto times = times_on_streams(schedule, random_costs(random, schedule.virtual_stages()));
    for (int rank = 0; rank < schedule.stages; ++rank) {
      const RankBuffers buffers = plan_buffers(schedule, rank);
      const std::vector<Action>& list = schedule.ranks[static_cast<std::size_t>(rank)];
      // By kind of buffer, chunk (of slots) and number: the span of each micro-batch.
      std::map<std::tuple<char, int, int>, std::map<std::pair<int, int>, std::pair<double, double>>> spans;
      for (std::size_t i = 0; i < list.size(); ++i) {
        const Action& action = list[i];
        const Place& place =
            buffers
                .places[static_cast<std::size_t>(action.chunk)][static_cast<std::size_t>(action.micro_batch)];
        const auto [begin, end] = times[static_cast<std::size_t>(rank)][i];
        const auto uses = [&, begin = begin, end = end](char kind, int chunk, int number) {
          if (number < 0) return;
          auto& span = spans[{kind, chunk, number}]
                           .try_emplace({action.chunk, action.micro_batch}, begin, end)
                           .first->second;
          span = {std::min(span.first, begin), std::max(span.second, end)};
        };
        using enum ActionKind;
        const bool computes = !is_message(action.kind), forward = action.kind == kForward;
        const bool last = schedule.virtual_stage(rank, action.chunk) == schedule.virtual_stages() - 1;
        if (computes || action.kind == kReceiveForward) uses('s', action.chunk, place.slot);
        if (forward || action.kind == kSendForward) uses('o', 0, place.output);
        if ((forward && last) || is_backward(action.kind) || action.kind == kSendBackward ||
            action.kind == kReceiveBackward)
          uses('g', 0, place.gradient);
      }
      for (const auto& [buffer, users] : spans) {
        std::vector<std::pair<double, double>> sorted;
        for (const auto& [who, span] : users) sorted.push_back(span);
        std::sort(sorted.begin(), sorted.end());
        for (std::size_t i = 1; i < sorted.size(); ++i)
          EXPECT_GE(sorted[i].first, sorted[i - 1].second - kRounding) << title(schedule);
      }
    }
  });
}

TEST(PipelineStreams, ActionsBeginBehindWhatTheyWaitFor) {
  std::mt19937 random(test::test_seed());
  for_all_schedules([&](const PipelineSchedule& schedule) {
    const auto times = times_on_streams(schedule, random_costs(random, schedule.virtual_stages()));
    for (int rank = 0; rank < schedule.stages; ++rank) {
      const auto& own = times[static_cast<std::size_t>(rank)];
      const auto awaited = awaited_actions(schedule, rank);
      for (std::size_t i = 0; i < own.size(); ++i) {
        for (const int other : awaited[i]) {
          EXPECT_LT(other, static_cast<int>(i)) << title(schedule);
          EXPECT_GE(own[i].first, own[static_cast<std::size_t>(other)].second - kRounding) << title(schedule);
        }
      }
    }
  });
}

/// Messages a tenth as long as a forward pass cost 1F1B little once they are beside it.
TEST(PipelineStreams, MessagesAreHiddenBehindComputation) {
  const PipelineSchedule schedule = one_forward_one_backward(4, 32);
  const StageCost cost{1, 1, 1, 0.1};
  const double plain = simulate(schedule, {StageCost{}}).makespan;
  const double streams = simulate(schedule, {cost}, Transfer::kStreams).makespan - plain;
  const double rendezvous = simulate(schedule, {cost}, Transfer::kRendezvous).makespan - plain;
  EXPECT_LT(streams, 0.6 * rendezvous) << streams << " against " << rendezvous;
}

/// Activations that two ranks send to one another on the same stream, each behind a receive.
TEST(PipelineStreams, CrossingMessagesOnOneStreamDeadlock) {
  PipelineSchedule schedule = interleaved(2, 2, 2);
  const auto move_before = [](std::vector<Action>& list, const Action& what, const Action& where) {
    list.erase(find(list, what));
    list.insert(find(list, where), what);
  };
  using enum ActionKind;
  move_before(schedule.ranks[0], {kReceiveForward, 0, 1}, {kSendForward, 1, 0});
  move_before(schedule.ranks[1], {kReceiveForward, 1, 0}, {kSendForward, 0, 0});
  const std::string text = refusal([&] { simulate(schedule, {StageCost{}}, Transfer::kStreams); });
  EXPECT_HAS(text, "deadlocks with messages on streams of their own");
  EXPECT_HAS(text, "rank 0 waits at receive-forward of micro-batch 0, chunk 1");
  EXPECT_HAS(text, "rank 1 waits at receive-forward of micro-batch 1, chunk 0");
  EXPECT_HAS(refusal([&] { validate(schedule); }), "deadlocks");
}

TEST(PipelineBubble, OneForwardOneBackwardIdlesStagesLessOneOfTheTime) {
  for (int p = 1; p <= 8; ++p) {
    for (int m = 1; m <= 16; ++m) {
      for (const Transfer transfer : kTransfers) {
        const PipelineTimeline timeline = simulate(one_forward_one_backward(p, m), {StageCost{}}, transfer);
        EXPECT_NEAR(timeline.makespan, 3 * (m + p - 1), kRounding) << p << " stages, " << m;
        for (const double bubble : timeline.bubble) {
          EXPECT_NEAR(bubble, (p - 1.0) / (m + p - 1), kRounding) << p << " stages, " << m;
        }
      }
    }
  }
}

TEST(PipelineBubble, InterleavingDividesBubbleTimeByChunks) {
  for (int p = 1; p <= 8; ++p) {
    for (int m = p; m <= 16; m += p) {
      for (int v = 2; v <= 4; ++v) {
        for (const Transfer transfer : kTransfers) {
          const StageCost part{1.0 / v, 1.0 / v, 1.0 / v, 0};
          const PipelineTimeline timeline = simulate(interleaved(p, v, m), {part}, transfer);
          EXPECT_NEAR(timeline.makespan, 3 * m + 3.0 * (p - 1) / v, kRounding)
              << p << " stages, " << v << " chunks, " << m;
          for (const double bubble : timeline.bubble) {
            EXPECT_NEAR(bubble, (p - 1.0) / (v * m + p - 1), kRounding);
          }
        }
      }
    }
  }
}

TEST(PipelineBubble, ZeroBubbleH1IdlesAThirdOfOneForwardOneBackward) {
  for (int p = 2; p <= 8; ++p) {
    for (int m = p; m <= 16; ++m) {
      for (const Transfer transfer : kTransfers) {
        const double work = 3 * m;
        const double usual =
            simulate(one_forward_one_backward(p, m), {StageCost{}}, transfer).makespan - work;
        const PipelineTimeline timeline = simulate(zero_bubble_h1(p, m), {StageCost{}}, transfer);
        EXPECT_NEAR(timeline.makespan - work, usual / 3, kRounding) << p << " stages, " << m;
      }
    }
  }
}

TEST(PipelineBubble, OneMicroBatchCrossesEveryBoundaryTwice) {
  const StageCost cost{1, 1, 1, 0.25};
  for (int p = 1; p <= 8; ++p) {
    for (const Transfer transfer : kTransfers) {
      EXPECT_NEAR(simulate(one_forward_one_backward(p, 1), {cost}, transfer).makespan,
                  3 * p + 2 * (p - 1) * 0.25, kRounding);
    }
  }
}

/// By hand: rank 0 computes F0 F1 B0 B1, rank 1 F0 B0 F1 B1, in a stage three times as slow.
TEST(PipelineBubble, UnequalStagesWaitForTheSlowest) {
  const std::vector<StageCost> costs = {{1, 1, 1, 0}, {3, 3, 3, 0}};
  const PipelineTimeline timeline = simulate(one_forward_one_backward(2, 2), costs);
  EXPECT_NEAR(timeline.makespan, 1 + 2 * 9 + 2, kRounding);
  EXPECT_NEAR(timeline.bubble[0], 1 - 6 / 21.0, kRounding);
  EXPECT_NEAR(timeline.bubble[1], 1 - 18 / 21.0, kRounding);
}

TEST(PipelineMemory, OneForwardOneBackwardHoldsStagesLessRank) {
  for (int p = 1; p <= 8; ++p) {
    for (int m = 1; m <= 16; ++m) {
      const std::vector<RankMemory> memory = memory_need(one_forward_one_backward(p, m));
      for (int rank = 0; rank < p; ++rank) {
        const RankMemory& need = memory[static_cast<std::size_t>(rank)];
        EXPECT_EQ(need.together.activations, std::min(p - rank, m));
        EXPECT_EQ(need.together.deferred_weights, 0);
        EXPECT_EQ(need.received_activations, rank > 0 ? 1 : 0);
        EXPECT_EQ(need.received_gradients, rank < p - 1 ? 1 : 0);
        EXPECT_EQ(need.unsent_activations, rank < p - 1 ? 1 : 0);
        EXPECT_EQ(need.unsent_gradients, rank > 0 ? 1 : 0);
      }
    }
  }
}

TEST(PipelineMemory, ZeroBubbleH1HoldsNoMoreThanTheFirstRankOfOneForwardOneBackward) {
  for (int p = 1; p <= 8; ++p) {
    for (int m = 1; m <= 16; ++m) {
      const std::vector<RankMemory> memory = memory_need(zero_bubble_h1(p, m));
      for (int rank = 0; rank < p; ++rank) {
        const StageMemory& need = memory[static_cast<std::size_t>(rank)].together;
        EXPECT_EQ(need.before_backward, std::min(p - rank, m)) << "rank " << rank << " of " << p;
        EXPECT_EQ(need.deferred_weights, std::min(rank + 1, m)) << "rank " << rank << " of " << p;
        EXPECT_EQ(need.activations, std::min(p, m)) << "rank " << rank << " of " << p;
      }
    }
  }
}

TEST(PipelineMemory, InterleavingHoldsOnTheFirstRankWhatOneForwardOneBackwardDoes) {
  for (int p = 1; p <= 8; ++p) {
    for (int v = 2; v <= 4; ++v) {
      const std::vector<RankMemory> memory = memory_need(interleaved(p, v, 4 * p));
      for (int rank = 0; rank < p; ++rank) {
        EXPECT_EQ(memory[static_cast<std::size_t>(rank)].together.activations, v * p - rank);
      }
    }
  }
}

TEST(PipelineRefusal, DeadlockNamesRanksAndWhatTheyWaitAt) {
  PipelineSchedule schedule = one_forward_one_backward(3, 4);
  // Ranks 0 and 1 would send to one another at once: one activation, one gradient.
  std::vector<Action>& list = schedule.ranks[1];
  const auto receive = find(list, {ActionKind::kReceiveForward, 2, 0});
  list.erase(receive);
  list.insert(find(list, {ActionKind::kForward, 2, 0}), {ActionKind::kReceiveForward, 2, 0});
  const auto send = find(list, {ActionKind::kSendBackward, 0, 0});
  list.erase(send);
  list.insert(find(list, {ActionKind::kBackward, 0, 0}) + 1, {ActionKind::kSendBackward, 0, 0});
  std::vector<Action>& first = schedule.ranks[0];
  first.erase(find(first, {ActionKind::kSendForward, 2, 0}));
  first.insert(find(first, {ActionKind::kForward, 2, 0}) + 1, {ActionKind::kSendForward, 2, 0});

  EXPECT_NO_THROW(simulate(schedule, {StageCost{}}, Transfer::kBuffered));
  const std::string text = refusal([&] { validate(schedule); });
  EXPECT_HAS(text, "deadlocks");
  EXPECT_HAS(text, "rank 0 waits at send-forward of micro-batch 2, chunk 0 for rank 1");
  EXPECT_HAS(text, "rank 1 waits at send-backward of micro-batch 0, chunk 0 for rank 0");
  EXPECT_EQ(text.find("rank 2 waits"), std::string::npos) << text;
}

TEST(PipelineRefusal, ReceivesThatWaitForOneAnotherDeadlockWithBuffersToo) {
  PipelineSchedule schedule{"hand-made", 2, 1, 1, {}};
  schedule.ranks = {{{ActionKind::kReceiveBackward, 0, 0},
                     {ActionKind::kForward, 0, 0},
                     {ActionKind::kSendForward, 0, 0},
                     {ActionKind::kBackward, 0, 0}},
                    {{ActionKind::kReceiveForward, 0, 0},
                     {ActionKind::kForward, 0, 0},
                     {ActionKind::kBackward, 0, 0},
                     {ActionKind::kSendBackward, 0, 0}}};
  for (const Transfer transfer : kInListOrder) {
    const std::string text = refusal([&] { simulate(schedule, {StageCost{}}, transfer); });
    EXPECT_HAS(text, "rank 0 waits at receive-backward of micro-batch 0, chunk 0 for rank 1");
    EXPECT_HAS(text, "rank 1 waits at receive-forward of micro-batch 0, chunk 0 for rank 0");
  }
}

TEST(PipelineRefusal, AMessageThatNobodySendsIsNamed) {
  PipelineSchedule schedule = one_forward_one_backward(2, 1);
  std::vector<Action>& list = schedule.ranks[0];
  list.erase(find(list, {ActionKind::kSendForward, 0, 0}));
  list.erase(find(list, {ActionKind::kReceiveBackward, 0, 0}));
  for (const Transfer transfer : kInListOrder) {
    const std::string text = refusal([&] { simulate(schedule, {StageCost{}}, transfer); });
    EXPECT_HAS(text, "rank 1 waits at receive-forward of micro-batch 0, chunk 0 for rank 0, which has ended");
  }
}

/// Swapping, doubling or leaving out one action is noticed wherever it makes a difference.
TEST(PipelineRefusal, ValidateRefusesActionsOutOfOrderMissingOrDoubled) {
  const PipelineSchedule sound = zero_bubble_h1(3, 4);
  const auto swapped = [&](int rank, const Action& a, const Action& b) {
    PipelineSchedule schedule = sound;
    std::vector<Action>& list = schedule.ranks[static_cast<std::size_t>(rank)];
    std::iter_swap(find(list, a), find(list, b));
    return refusal([&] { validate(schedule); });
  };
  using enum ActionKind;
  EXPECT_HAS(swapped(1, {kReceiveForward, 2, 0}, {kForward, 2, 0}),
             "rank 1 has forward of micro-batch 2, chunk 0 before receive-forward");
  EXPECT_HAS(swapped(1, {kForward, 0, 0}, {kBackwardInput, 0, 0}), "rank 1 has");
  EXPECT_HAS(swapped(2, {kForward, 1, 0}, {kBackwardInput, 1, 0}),
             "backward-input of micro-batch 1, chunk 0 before forward");
  EXPECT_HAS(swapped(0, {kBackwardInput, 1, 0}, {kBackwardWeight, 1, 0}),
             "backward-weight of micro-batch 1, chunk 0 before backward-input");
  EXPECT_HAS(swapped(1, {kBackwardInput, 3, 0}, {kSendBackward, 3, 0}),
             "send-backward of micro-batch 3, chunk 0 before backward-input");

  for (int rank = 0; rank < sound.stages; ++rank) {
    const std::size_t count = sound.ranks[static_cast<std::size_t>(rank)].size();
    for (std::size_t i = 0; i < count; ++i) {
      PipelineSchedule schedule = sound;
      std::vector<Action>& list = schedule.ranks[static_cast<std::size_t>(rank)];
      const std::string name = describe(list[i]);
      list.insert(list.begin() + static_cast<std::ptrdiff_t>(i), list[i]);
      EXPECT_HAS(refusal([&] { validate(schedule); }), fmt::format("rank {} has {} twice", rank, name));
      list.erase(list.begin() + static_cast<std::ptrdiff_t>(i),
                 list.begin() + static_cast<std::ptrdiff_t>(i) + 2);
      EXPECT_HAS(refusal([&] { validate(schedule); }), fmt::format("rank {} lacks {}", rank, name));
    }
  }
}

TEST(PipelineRefusal, ValidateRefusesEndsThatDisagreeAboutTheOrderOfMessages) {
  PipelineSchedule schedule = one_forward_one_backward(2, 4);
  schedule.ranks[0] = {};
  using enum ActionKind;
  for (int i = 0; i < 4; ++i) {
    schedule.ranks[0].push_back({kForward, i, 0});
    schedule.ranks[0].push_back({kSendForward, i, 0});
  }
  std::swap(schedule.ranks[0][1], schedule.ranks[0][3]);
  std::swap(schedule.ranks[0][1], schedule.ranks[0][2]);
  for (int i = 0; i < 4; ++i) {
    schedule.ranks[0].push_back({kReceiveBackward, i, 0});
    schedule.ranks[0].push_back({kBackward, i, 0});
  }
  EXPECT_HAS(refusal([&] { validate(schedule); }),
             "message 0 from rank 0 to rank 1 is send-forward of "
             "micro-batch 1, chunk 0 at one end");
}

TEST(PipelineRefusal, ValidateRefusesWhatDoesNotExist) {
  using enum ActionKind;
  const auto with = [](const Action& action) {
    PipelineSchedule schedule = one_forward_one_backward(2, 2);
    schedule.ranks[0].push_back(action);
    return refusal([&] { validate(schedule); });
  };
  EXPECT_HAS(with({kForward, 2, 0}), "there are 2 micro-batches");
  EXPECT_HAS(with({kForward, 0, 1}), "1 chunks");
  EXPECT_HAS(with({kReceiveForward, 0, 0}), "no rank is at the other end");
  EXPECT_HAS(with({kBackwardWeight, 0, 0}), "backward-input");
}

TEST(PipelineRefusal, DeckNamesKeysAndWhatIsAllowed) {
  EXPECT_HAS(refusal([] { make_schedule("gpipe", 2, 1, 4); }),
             "parallel.schedule = gpipe: allowed are 1f1b, interleaved, zero_bubble");
  EXPECT_HAS(refusal([] { make_schedule("interleaved", 4, 2, 6); }), "nearest: 4 or 8");
  EXPECT_HAS(refusal([] { make_schedule("interleaved", 4, 2, 3); }), "nearest: 4");
  EXPECT_HAS(refusal([] { make_schedule("interleaved", 4, 1, 8); }), "parallel.chunks = 1");
  EXPECT_HAS(refusal([] { make_schedule("zero_bubble", 4, 2, 8); }), "parallel.chunks = 2");
  EXPECT_HAS(refusal([] { make_schedule("1f1b", 0, 1, 8); }), "parallel.pipeline = 0");
  for (const char* name : {"1f1b", "zero_bubble"}) EXPECT_EQ(make_schedule(name, 4, 1, 6).name, name);
  EXPECT_EQ(make_schedule("interleaved", 2, 3, 4).chunks, 3);
}

}  // namespace
}  // namespace octet
