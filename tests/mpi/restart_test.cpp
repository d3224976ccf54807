// N steps, stop, M steps against N + M: bitwise in the same layout, 1e-6 in another.
#include "octet/train/restart.h"
#include "octet/train/schedule.h"
#include "support/seed.h"
#include "support/shared_folder.h"
#include "support/training_support.h"

namespace octet::test {
namespace {

constexpr int kBefore = 3, kAfter = 3;

class Restart : public testing::Test {
 protected:
  void SetUp() override { MPI_Comm_size(MPI_COMM_WORLD, &ranks_); }

  static Samples batch(int step) {
    return random_samples(8, 64, 256, 700 + static_cast<std::uint64_t>(step));
  }

  Deck deck(int data, int tensor, int zero) const {
    Deck deck = tiny_deck();
    deck.model.layers = 2;
    deck.model.vocabulary = 256;
    deck.model.tied = true;
    deck.parallel.data = data;
    deck.parallel.tensor = tensor;
    deck.parallel.zero = zero;
    deck.schedule.kind = "cosine";
    deck.schedule.warmup = 2;
    deck.run.steps = kBefore + kAfter;
    deck.run.directory = folder_.path();
    return deck;
  }

  struct End {
    std::vector<double> losses;
    Tensors state;
  };
  End run(MPI_Comm ranks, const Deck& deck, int from, int to, bool load, bool save) const {
    Session session(ranks, deck);
    if (load) {
      std::vector<std::string> notes;
      const auto checkpoint = find_checkpoint(deck, &notes);
      EXPECT_TRUE(checkpoint.has_value());
      EXPECT_EQ(checkpoint->state.step, from);
      check_same_run(*checkpoint, deck, "hash", &notes);
      load_run(session.engine(), *checkpoint, ranks);
    }
    End end;
    RunPosition position{from, from * 8, 0, from};
    for (int step = from; step < to; ++step) {
      const StepResult result = session.step(batch(step));
      end.losses.push_back(result.loss);
      position = {step + 1, (step + 1) * 8, 0, result.updates};
    }
    if (save) save_run(session.engine(), deck, position, "hash", ranks);
    end.state = session.gather(session.engine().store().saved_boxes());
    return end;
  }

  int ranks_ = 1;
  SharedFolder folder_;
};

/// Scales of 8-bit products that come from earlier steps are state of the run: without them the first steps
/// after a restart would differ.
TEST_F(Restart, ScalesFromEarlierStepsGoOnBitwise) {
  Deck delayed = deck(ranks_, 1, 3);
  delayed.model.mlp = 192;
  delayed.precision.compute = "bf16";
  delayed.precision.fp8 = "delayed";
  delayed.precision.fp8_history = 2;
  const End whole = run(MPI_COMM_WORLD, delayed, 0, kBefore + kAfter, false, false);
  run(MPI_COMM_WORLD, delayed, 0, kBefore, false, true);
  for (const bool gathers_codes : {false, true}) {
    delayed.precision.fp8_gather = gathers_codes;
    const End rest = run(MPI_COMM_WORLD, delayed, kBefore, kBefore + kAfter, true, false);
    EXPECT_EQ(std::vector<double>(whole.losses.begin() + kBefore, whole.losses.end()), rest.losses);
    EXPECT_TRUE(rest.state == whole.state);
  }
}

TEST_F(Restart, SameLayoutGoesOnBitwise) {
  const int tensor = ranks_ >= 4 ? 2 : 1;
  for (const int zero : {0, 1, 2, 3}) {
    Deck same = deck(ranks_ / tensor, tensor, zero);
    // N08: masters come back as they were, not rebuilt from what they are rounded to.
    if (zero % 2 == 1) same.precision.compute = "bf16";
    const End whole = run(MPI_COMM_WORLD, same, 0, kBefore + kAfter, false, false);
    run(MPI_COMM_WORLD, same, 0, kBefore, false, true);
    const End resumed = run(MPI_COMM_WORLD, same, kBefore, kBefore + kAfter, true, false);
    EXPECT_EQ(std::vector<double>(whole.losses.begin() + kBefore, whole.losses.end()), resumed.losses)
        << "ZeRO " << zero;
    EXPECT_EQ(whole.state, resumed.state) << "ZeRO " << zero;
  }
}

/// C04 and C07: any layout continues from any other, by a random sample of pairs: data, tensor, context,
/// pipeline with each schedule, ZeRO. Moments, update count and learning rate are included; the loss of the
/// next step is equal.
TEST_F(Restart, AnyLayoutGoesOnFromAnyOther) {
  const End whole = run(MPI_COMM_SELF, deck(1, 1, 1), 0, kBefore + kAfter, false, false);
  std::vector<Deck> layouts;
  for (int tensor = 1; tensor <= std::min(ranks_, 4); tensor *= 2) {
    for (int context = 1; context * tensor <= ranks_; context *= 2) {
      for (int pipeline = 1; pipeline <= 2 && pipeline * context * tensor <= ranks_; pipeline *= 2) {
        for (const int zero : {0, 1, 2, 3}) {
          Deck layout = deck(0, tensor, zero);
          layout.parallel.context = context;
          layout.parallel.pipeline = pipeline;
          layout.parallel.sequence = zero % 2 == 1;
          if (pipeline == 2 && zero == 1) layout.parallel.schedule = "zero_bubble";
          layouts.push_back(layout);
        }
      }
    }
  }
  unsigned seed = test_seed();
  MPI_Bcast(&seed, 1, MPI_UNSIGNED, 0, MPI_COMM_WORLD);
  SCOPED_TRACE(fmt::format("seed {}", seed));
  std::mt19937 random(seed);
  const auto any = [&] { return layouts[random() % layouts.size()]; };
  for (int pair = 0; pair < 6; ++pair) {
    const Deck from = any(), to = any();
    SCOPED_TRACE(fmt::format(
        "from tensor {} context {} pipeline {} ZeRO {} to tensor {} context {} pipeline {} ZeRO {}",
        from.parallel.tensor, from.parallel.context, from.parallel.pipeline, from.parallel.zero,
        to.parallel.tensor, to.parallel.context, to.parallel.pipeline, to.parallel.zero));
    run(MPI_COMM_WORLD, from, 0, kBefore, false, true);
    const End resumed = run(MPI_COMM_WORLD, to, kBefore, kBefore + kAfter, true, false);
    for (int i = 0; i < kAfter; ++i) {
      const double expected = whole.losses[static_cast<std::size_t>(kBefore + i)];
      EXPECT_NEAR(resumed.losses[static_cast<std::size_t>(i)], expected, (i == 0 ? 1e-6 : 1e-5) * expected)
          << "step " << kBefore + i + 1;
    }
    for (const auto& [name, values] : whole.state)
      EXPECT_LT(relative_difference(resumed.state.at(name), values), 1e-4) << name;
  }
}

/// C07: weights alone would give another next step.
TEST_F(Restart, MomentsMatter) {
  const End whole = run(MPI_COMM_SELF, deck(1, 1, 1), 0, kBefore + kAfter, false, false);
  Session session(MPI_COMM_SELF, deck(1, 1, 1));
  for (int step = 0; step < kBefore; ++step) session.step(batch(step));
  Tensors weights;
  for (const auto& [name, values] : session.gather(session.engine().store().saved_boxes())) {
    if (name.starts_with("parameters/")) weights[name.substr(11)] = values;
  }
  Session fresh(MPI_COMM_SELF, deck(1, 1, 1));
  fresh.set_parameters(weights);
  fresh.step(batch(kBefore));
  fresh.step(batch(kBefore + 1));
  fresh.step(batch(kBefore + 2));
  const Tensors end = fresh.gather(fresh.engine().store().saved_boxes());
  const std::string name = "parameters/layers.0.attention.q.weight";
  EXPECT_GT(relative_difference(end.at(name), whole.state.at(name)), 1e-3);
}

/// C08: what a checkpoint is compared with before anything is read.
TEST_F(Restart, AnotherModelIsRefusedAndAnotherScheduleNeedsLeave) {
  const Deck made = deck(ranks_, 1, 1);
  run(MPI_COMM_WORLD, made, 0, 1, false, true);
  std::vector<std::string> notes;
  const auto checkpoint = find_checkpoint(made, &notes);
  ASSERT_TRUE(checkpoint.has_value());
  const auto refusal = [&](const Deck& deck) {
    try {
      check_same_run(*checkpoint, deck, "hash", &notes);
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kCheckpoint);
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_EQ(refusal(made), "");
  Deck other = made;
  other.model.layers = 3;
  EXPECT_NE(refusal(other).find("model.layers"), std::string::npos);
  other = made;
  other.optimizer.lr = 5e-4;
  EXPECT_NE(refusal(other).find("optimizer.lr"), std::string::npos);
  other.checkpoint.allow_changes = true;
  EXPECT_EQ(refusal(other), "");
  other = made;
  other.run.steps = 200;
  EXPECT_NE(refusal(other).find("run.steps"), std::string::npos);
  try {
    check_same_run(*checkpoint, made, "other data", &notes);
    ADD_FAILURE() << "other data were accepted";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("data.train"), std::string::npos);
  }
}

/// C07: step 5 -> 5.0e-4, 10 -> 1.0e-3, 50 -> 6.28142e-4, 51 -> 6.12628e-4, 100 -> 1.0e-4.
TEST(Schedule, WarmupAndCosineByTheFormula) {
  Deck deck;
  deck.optimizer.lr = 1e-3;
  deck.schedule.kind = "cosine";
  deck.schedule.warmup = 10;
  deck.schedule.floor = 0.1;
  deck.run.steps = 100;
  const std::vector<float> rates = learning_rates(deck);
  ASSERT_EQ(rates.size(), 100u);
  const auto at = [&](std::size_t step) { return rates[step - 1]; };
  EXPECT_NEAR(at(5), 5.0e-4, 1e-9);
  EXPECT_NEAR(at(10), 1.0e-3, 1e-9);
  EXPECT_NEAR(at(50), 6.28142e-4, 1e-9);
  EXPECT_NEAR(at(51), 6.12628e-4, 1e-9);
  EXPECT_NEAR(at(100), 1.0e-4, 1e-9);
}

TEST(Schedule, WarmupStableDecayAndTokenUnits) {
  Deck deck;
  deck.optimizer.lr = 1.0;
  deck.schedule.kind = "wsd";
  deck.schedule.unit = "tokens";
  deck.batch.global = 4;
  deck.batch.sequence = 25;
  deck.schedule.warmup = 10 * 100;
  deck.schedule.decay = 20 * 100;
  deck.schedule.floor = 0.0;
  deck.run.steps = 100;
  const std::vector<float> rates = learning_rates(deck);
  EXPECT_FLOAT_EQ(rates[4], 0.5f);
  EXPECT_FLOAT_EQ(rates[9], 1.0f);
  EXPECT_FLOAT_EQ(rates[79], 1.0f);
  EXPECT_FLOAT_EQ(rates[89], 0.5f);
  EXPECT_FLOAT_EQ(rates[99], 0.0f);
}

}  // namespace
}  // namespace octet::test
