// What goes before the first step: a warm-up that leaves no trace, and choices that all ranks share.
#include "octet/train/shared_plans.h"
#include "support/seed.h"
#include "support/shared_folder.h"
#include "support/training_support.h"

namespace octet::test {
namespace {

/// Losses and final state of three steps, with a warm-up on other samples before them or without.
std::pair<std::vector<double>, Tensors> train(const Deck& deck, bool warm_up) {
  Session session(MPI_COMM_WORLD, deck);
  Engine& engine = session.engine();
  const auto samples = [&](std::uint64_t step) {
    return random_samples(deck.batch.global, deck.batch.sequence, deck.model.vocabulary, test_seed() + step);
  };
  if (warm_up) engine.warm_up(pack(samples(9), engine.cut()).batches);
  std::vector<double> losses;
  for (std::uint64_t step = 0; step < 3; ++step) {
    const StepResult result = session.step(samples(step));
    losses.push_back(result.loss);
    losses.push_back(result.gradient_norm);
  }
  return {losses, session.gather(engine.store().saved_boxes())};
}

TEST(WarmUp, LeavesEveryNumberOfTheRunAsItWas) {
  int ranks = 1;
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  for (const bool tied : {false, true}) {
    for (const int pipeline : {1, 2}) {
      for (int zero = 0; zero <= 3; ++zero) {
        if (ranks % pipeline != 0 || (ranks > 1 && tied != ((zero + pipeline) % 2 == 1))) continue;
        Deck deck = tiny_deck();
        deck.model.layers = 2;
        deck.model.tied = tied;
        deck.parallel.pipeline = pipeline;
        deck.parallel.zero = zero;
        deck.batch.sequence = 32;
        SCOPED_TRACE(fmt::format("tied {} pipeline {} ZeRO {}", tied, pipeline, zero));
        const auto plain = train(deck, false), warmed = train(deck, true);
        EXPECT_EQ(warmed.first, plain.first);
        EXPECT_EQ(warmed.second, plain.second);
      }
    }
  }
}

/// Magnitudes seen in a warm-up are not remembered for the scales of later steps.
TEST(WarmUp, LeavesTheScalesOf8BitLayersAsTheyWere) {
  for (const char* recipe : {"current", "delayed"}) {
    Deck deck = tiny_deck();
    deck.model.layers = 2;
    deck.model.mlp = 128;
    deck.precision.compute = "bf16";
    deck.precision.fp8 = recipe;
    SCOPED_TRACE(recipe);
    const auto plain = train(deck, false), warmed = train(deck, true);
    EXPECT_EQ(warmed.first, plain.first);
    EXPECT_EQ(warmed.second, plain.second);
  }
}

TEST(SharedPlans, AreTheSameOnAllRanksAndKeptForTheNextRun) {
  const World world(MPI_COMM_WORLD);
  const SharedFolder folder;
  Deck::Run run;
  run.tune_matmul = true;
  run.tune_cache = folder.path();
  const auto plan = [](int number) { return TimedPlan{{std::byte(number), std::byte{1}}, 1.0 + number}; };
  {
    SharedPlans plans(world, run, DeviceKind::kCuda);
    ASSERT_NE(plans.cache(), nullptr);
    EXPECT_TRUE(plans.times());
    plans.cache()->add("met by all ranks", plan(world.rank()));
    plans.cache()->add(fmt::format("met by rank {}", world.rank()), plan(world.rank()));
    plans.agree();
    EXPECT_EQ(*plans.cache()->find("met by all ranks"), plan(0));
    for (int rank = 0; rank < world.size(); ++rank)
      EXPECT_EQ(*plans.cache()->find(fmt::format("met by rank {}", rank)), plan(rank));
  }
  MPI_Barrier(MPI_COMM_WORLD);
  run.deterministic = true;
  SharedPlans plans(world, run, DeviceKind::kCuda);
  EXPECT_FALSE(plans.times());
  EXPECT_EQ(*plans.cache()->find("met by all ranks"), plan(0));
  EXPECT_EQ(*plans.cache()->find(fmt::format("met by rank {}", world.rank())), plan(world.rank()));
}

TEST(SharedPlans, AreNotKeptWhereNobodyAsksForThem) {
  const World world(MPI_COMM_WORLD);
  Deck::Run run;
  EXPECT_EQ(SharedPlans(world, run, DeviceKind::kCuda).cache(), nullptr);
  run.tune_matmul = true;
  EXPECT_EQ(SharedPlans(world, run, DeviceKind::kCpu).cache(), nullptr);
}

/// The whole way on a GPU: a run that times its products, and one that finds them in the file, give the same
/// numbers bit by bit, and those of plain plans within rounding.
TEST(SharedPlans, CudaRunWithRememberedPlansRepeatsTheOneThatTimedThem) {
  if (gpu_missing()) GTEST_SKIP() << "no CUDA device";
  const SharedFolder folder;
  Deck deck = tiny_deck();
  deck.run.device = "cuda";
  deck.run.tune_cache = folder.path();
  const auto losses = [&] {
    Session session(MPI_COMM_WORLD, deck);
    const auto samples = [&](std::uint64_t step) { return random_samples(8, 64, 256, test_seed() + step); };
    session.engine().tune(pack(samples(0), session.engine().cut()).batches);
    std::vector<double> result;
    for (std::uint64_t step = 0; step < 3; ++step) result.push_back(session.step(samples(step)).loss);
    return result;
  };
  const std::vector<double> plain = losses();
  deck.run.tune_matmul = true;
  const std::vector<double> timed = losses(), remembered = losses();
  EXPECT_EQ(remembered, timed);
  for (std::size_t i = 0; i < plain.size(); ++i) EXPECT_NEAR(timed[i], plain[i], 1e-5 * plain[i]);
}

}  // namespace
}  // namespace octet::test
