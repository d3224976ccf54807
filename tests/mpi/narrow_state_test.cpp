// Optimizer state that is narrower than float32, through whole training steps: in every ZeRO stage and
// layout, over restarts, in memory, and what it does to the loss.
#include <cstring>

#include "octet/train/restart.h"
#include "support/shared_folder.h"
#include "support/training_support.h"

namespace octet::test {
namespace {

constexpr int kSteps = 4, kSaved = 2;  ///< steps of a run, and after how many of them it stops and goes on
constexpr int kVocabulary = 249;

struct Form {
  std::string moments, master;
};

class NarrowState : public testing::Test {
 protected:
  void SetUp() override { MPI_Comm_size(MPI_COMM_WORLD, &ranks_); }

  static Deck deck(const Form& form) {
    Deck deck = tiny_deck();
    deck.model.layers = 2;
    deck.model.tied = true;
    // One key head, which both tensor ranks hold, beside query heads that they share; padded rows.
    deck.model.kv_heads = 1;
    deck.model.vocabulary = kVocabulary;
    deck.parallel.zero = 1;
    deck.optimizer.moments = form.moments;
    deck.optimizer.master = form.master;
    if (form.master == "split") deck.precision.compute = "bf16";
    return deck;
  }

  /// ZeRO stages over all ranks, beside tensor ranks, and beside two stages that share an embedding.
  std::vector<Deck> layouts(const Form& form, const char* device = "cpu") const {
    std::vector<Deck> result;
    for (int zero = 0; zero <= 3; ++zero) {
      if (ranks_ == 1 && zero != 1) continue;
      if (ranks_ > 4 && zero != 3) continue;  // fewer ranks have shown the others
      Deck data = deck(form);
      data.run.device = device;
      data.run.deterministic = true;
      data.parallel.zero = zero;
      result.push_back(data);
      if (ranks_ == 1) continue;
      Deck other = data;
      if (ranks_ >= 4 && zero >= 1) other.parallel.shard_size = ranks_ / 4;
      if (zero % 2 == 1) {
        other.parallel.tensor = 2;
        other.parallel.sequence = zero == 3;
        result.push_back(other);
      }
      if (zero == 3) other = data;
      if (zero != 1) {
        other.parallel.pipeline = 2;
        result.push_back(other);
      }
    }
    return result;
  }
  static std::string text(const Deck& deck) {
    return fmt::format("tensor {} pipeline {} ZeRO {} shard_size {} {} moments {} master",
                       deck.parallel.tensor, deck.parallel.pipeline, deck.parallel.zero,
                       deck.parallel.shard_size, deck.optimizer.moments, deck.optimizer.master);
  }

  static Samples batch(int step) {
    return random_samples(8, 64, kVocabulary, 800 + static_cast<std::uint64_t>(step));
  }

  struct Outcome {
    std::vector<double> losses;
    Tensors state;
  };
  static Outcome run(MPI_Comm ranks, const Deck& deck) {
    Session session(ranks, deck);
    Outcome outcome;
    for (int step = 0; step < kSteps; ++step) outcome.losses.push_back(session.step(batch(step)).loss);
    EXPECT_EQ(session.engine().find_differing_replica(), "");
    outcome.state = session.gather(session.engine().store().saved_boxes());
    return outcome;
  }

  /// Largest of ‖found - expected‖ / ‖expected‖ over all tensors of a kind.
  static double worst_difference(const Tensors& found, const Tensors& expected, const std::string& kind) {
    double worst = 0.0;
    for (const auto& [name, values] : expected) {
      if (name.starts_with(kind)) worst = std::max(worst, relative_difference(found.at(name), values));
    }
    return worst;
  }

  void expect_split_like_whole(const char* device) const {
    std::size_t turn = 0;
    for (const Deck& layout : layouts({"fp32", "split"}, device)) {
      Deck split = layout;
      split.optimizer.moments = std::vector<std::string>{"8bit", "fp32", "bf16"}[turn++ % 3];
      SCOPED_TRACE(text(split));
      Deck whole = split;
      whole.optimizer.master = "fp32";
      const Outcome found = run(MPI_COMM_WORLD, split), expected = run(MPI_COMM_WORLD, whole);
      EXPECT_EQ(found.losses, expected.losses);
      for (const auto& [name, values] : expected.state) {
        const std::vector<float>& own = found.state.at(name);
        if (!name.starts_with("parameters/")) {
          EXPECT_EQ(own, values) << name;
          continue;
        }
        for (std::size_t i = 0; i < values.size(); ++i) {
          ASSERT_LE(std::abs(own[i] - values[i]), 0x1p-22f * std::abs(values[i])) << name;
          ASSERT_EQ(BF16(own[i]).bits, BF16(values[i]).bits) << name;
        }
      }
    }
  }

  int ranks_ = 1;
};

/// Random numbers belong to global elements: layouts differ by the rounding of sums alone, which sends a
/// bfloat16 moment the other way now and then.
TEST_F(NarrowState, Bf16MomentsAreTheSameInEveryLayout) {
  const Outcome expected = run(MPI_COMM_SELF, deck({"bf16", "fp32"}));
  const Outcome plain = run(MPI_COMM_SELF, deck({"fp32", "fp32"}));
  EXPECT_GT(worst_difference(plain.state, expected.state, "first_moment/"), 1e-4)
      << "moments are not rounded";
  for (const Deck& layout : layouts({"bf16", "fp32"})) {
    SCOPED_TRACE(text(layout));
    const Outcome found = run(MPI_COMM_WORLD, layout);
    for (std::size_t i = 0; i < found.losses.size(); ++i)
      EXPECT_NEAR(found.losses[i], expected.losses[i], 1e-5 * expected.losses[i]) << "step " << i + 1;
    EXPECT_LT(worst_difference(found.state, expected.state, "parameters/"), 1e-4);
    std::size_t moments = 0, apart = 0;
    for (const auto& [name, values] : expected.state) {
      if (name.starts_with("parameters/")) continue;
      const std::vector<float>& own = found.state.at(name);
      for (std::size_t i = 0; i < values.size(); ++i) {
        ASSERT_EQ(own[i], static_cast<float>(BF16(own[i]))) << name;
        apart += own[i] != values[i];
        ++moments;
      }
    }
    EXPECT_LT(apart, moments / 100);
  }
}

/// Where a slice or a tensor rank's columns cut a block of codes, its parts have scales of their own: that
/// moves codes by a step.
TEST_F(NarrowState, EightBitMomentsAgreeBetweenLayoutsWithinTheirSteps) {
  const Outcome expected = run(MPI_COMM_SELF, deck({"8bit", "fp32"}));
  for (const Deck& layout : layouts({"8bit", "fp32"})) {
    SCOPED_TRACE(text(layout));
    const Outcome found = run(MPI_COMM_WORLD, layout);
    for (std::size_t i = 0; i < found.losses.size(); ++i)
      EXPECT_NEAR(found.losses[i], expected.losses[i], 2e-4 * expected.losses[i]) << "step " << i + 1;
    EXPECT_LT(worst_difference(found.state, expected.state, "parameters/"), 1e-2);
    EXPECT_LT(worst_difference(found.state, expected.state, "first_moment/"), 5e-2);
    EXPECT_LT(worst_difference(found.state, expected.state, "second_moment/"), 5e-2);
  }
}

/// In one and the same layout, losses and moments are bitwise those of float32 masters; masters too, but for
/// ties between two bfloat16 numbers, which are one unit nearer to zero.
TEST_F(NarrowState, SplitMastersTrainLikeFloat32Masters) {
  expect_split_like_whole("cpu");
}

TEST_F(NarrowState, CudaSplitMastersTrainLikeFloat32Masters) {
  if (gpu_missing()) GTEST_SKIP() << "no CUDA device";
  expect_split_like_whole("cuda");
}

/// Bytes a parameter: masters 4; split 2, or 4 where parameters lie in slots; moments 8, 4, or 2 and a 32nd.
TEST_F(NarrowState, MemoryFollowsTheFormula) {
  for (const int zero : {0, 1, 2, 3}) {
    const auto state_bytes = [&](const Form& form) {
      Deck layout = deck(form);
      layout.parallel.zero = zero;
      layout.precision.compute = "bf16";
      Session session(MPI_COMM_WORLD, layout);
      std::int64_t bytes = 0;
      for (const auto& [name, size] : session.engine().memory()) {
        if (name == "optimizer state") bytes = size;
      }
      return static_cast<double>(bytes);
    };
    const double plain = state_bytes({"fp32", "fp32"});
    const double held = plain / 12.0;  // elements, those between parameters included
    // Rounding of arrays to 256 bytes: at most eight arrays in each of four buckets.
    const double slack = 4 * 8 * 256;
    const double resident = zero == 3 && ranks_ > 1 ? 4.0 : 2.0;
    EXPECT_NEAR(state_bytes({"fp32", "split"}), (resident + 8.0) * held, slack) << "ZeRO " << zero;
    EXPECT_NEAR(state_bytes({"bf16", "fp32"}), 8.0 * held, slack) << "ZeRO " << zero;
    EXPECT_NEAR(state_bytes({"bf16", "split"}), (resident + 4.0) * held, slack) << "ZeRO " << zero;
    EXPECT_NEAR(state_bytes({"8bit", "fp32"}), (6.0 + 1.0 / 32.0) * held, slack) << "ZeRO " << zero;
    EXPECT_NEAR(state_bytes({"8bit", "split"}), (resident + 2.0 + 1.0 / 32.0) * held, slack)
        << "ZeRO " << zero;
  }
}

/// 60 steps on text that can be learnt: narrow moments follow the losses of float32 moments.
TEST_F(NarrowState, NarrowMomentsLearnAsWell) {
  if (ranks_ > 1) GTEST_SKIP() << "one rank says it";
  const auto losses = [&](const Form& form) {
    Session session(MPI_COMM_SELF, deck(form));
    std::vector<double> curve;
    for (std::uint64_t step = 0; step < 60; ++step) {
      Samples samples = random_samples(8, 64, kVocabulary, 900 + step);
      for (auto& tokens : samples.tokens) {
        for (std::size_t i = 1; i < tokens.size(); ++i)
          tokens[i] = tokens[i] % 4 == 0 ? tokens[i] : (tokens[i - 1] + 1) % kVocabulary;
      }
      curve.push_back(session.step(samples).loss);
    }
    return curve;
  };
  const std::vector<double> expected = losses({"fp32", "fp32"});
  EXPECT_LT(expected.back(), 0.8 * expected.front());
  for (const char* moments : {"bf16", "8bit"}) {
    const std::vector<double> found = losses({moments, "fp32"});
    double worst = 0.0;
    for (std::size_t i = 0; i < found.size(); ++i)
      worst = std::max(worst, std::abs(found[i] / expected[i] - 1.0));
    EXPECT_LT(worst, 2e-3) << moments;
  }
}

class NarrowRestart : public NarrowState {
 protected:
  Deck in_folder(Deck deck) const {
    deck.run.directory = folder_.path();
    deck.checkpoint.allow_changes = true;
    return deck;
  }
  /// Steps [from, to), beginning with the newest checkpoint where from is not 0.
  Outcome part(const Deck& deck, int from, int to, bool save = true) const {
    Session session(MPI_COMM_WORLD, deck);
    if (from > 0) {
      std::vector<std::string> notes;
      const auto checkpoint = find_checkpoint(deck, &notes);
      EXPECT_TRUE(checkpoint.has_value());
      check_same_run(*checkpoint, deck, "hash", &notes);
      load_run(session.engine(), *checkpoint, MPI_COMM_WORLD);
      EXPECT_EQ(session.engine().find_differing_replica(), "");
    }
    Outcome outcome;
    RunPosition position{from, from * 8, 0, from};
    for (int step = from; step < to; ++step) {
      const StepResult result = session.step(batch(step));
      outcome.losses.push_back(result.loss);
      position = {step + 1, (step + 1) * 8, 0, result.updates};
    }
    if (save) save_run(session.engine(), deck, position, "hash", MPI_COMM_WORLD);
    outcome.state = session.gather(session.engine().store().saved_boxes());
    return outcome;
  }

  void expect_bitwise(const char* device) const {
    const std::vector<Form> forms = {
        {"8bit", "split"}, {"bf16", "fp32"}, {"fp32", "split"}, {"8bit", "fp32"}, {"bf16", "split"}};
    std::vector<std::pair<Deck, Form>> cases;
    for (const Deck& layout : layouts({"fp32", "fp32"}, device))
      cases.emplace_back(layout, forms[cases.size() % forms.size()]);
    // Too few layouts for all forms.
    while (cases.size() < forms.size()) cases.emplace_back(cases.front().first, forms[cases.size()]);
    for (auto& [layout, form] : cases) {
      Deck same = in_folder(layout);
      same.optimizer.moments = form.moments;
      same.optimizer.master = form.master;
      if (form.master == "split") same.precision.compute = "bf16";
      SCOPED_TRACE(text(same));
      const Outcome whole = part(same, 0, kSteps, false);
      part(same, 0, kSaved);
      const Outcome resumed = part(same, kSaved, kSteps, false);
      EXPECT_EQ(std::vector<double>(whole.losses.begin() + kSaved, whole.losses.end()), resumed.losses);
      EXPECT_EQ(whole.state, resumed.state);
    }
  }

  SharedFolder folder_;
};

TEST_F(NarrowRestart, SameFormAndLayoutGoOnBitwise) {
  expect_bitwise("cpu");
}

TEST_F(NarrowRestart, CudaSameFormAndLayoutGoOnBitwise) {
  if (gpu_missing()) GTEST_SKIP() << "no CUDA device";
  expect_bitwise("cuda");
}

/// What one form saved another takes up, whatever the layouts: exactly where it is wider, rounded to nearest
/// where it is narrower.
TEST_F(NarrowRestart, AnyFormLoadsAnyOther) {
  const std::vector<Form> forms = {
      {"fp32", "fp32"}, {"bf16", "split"}, {"8bit", "fp32"}, {"8bit", "split"}, {"bf16", "fp32"}};
  for (std::size_t i = 0; i < forms.size(); ++i) {
    for (const std::size_t distance : {1, 2}) {
      const Form &from = forms[i], &to = forms[(i + distance) % forms.size()];
      Deck saving = in_folder(layouts(from).front()), loading = in_folder(layouts(to).back());
      saving.precision.compute = loading.precision.compute = "bf16";
      SCOPED_TRACE(fmt::format("{} / {} to {} / {}", from.moments, from.master, to.moments, to.master));
      const Outcome saved = part(saving, 0, kSaved);
      const Outcome loaded = part(loading, kSaved, kSaved, false);
      const double masters = worst_difference(loaded.state, saved.state, "parameters/");
      if (to.master == "fp32" || from.master == "split") {
        EXPECT_EQ(masters, 0.0);
      } else {
        EXPECT_LT(masters, 1e-8) << "ties alone move";
      }
      const bool bf16 = to.moments == "bf16";
      const bool exact = to.moments == "fp32" || (bf16 && from.moments == "bf16");
      const double first = worst_difference(loaded.state, saved.state, "first_moment/"),
                   second = worst_difference(loaded.state, saved.state, "second_moment/");
      EXPECT_LE(first, exact ? 0.0 : bf16 ? 4e-3 : 2e-2);
      EXPECT_LE(second, exact ? 0.0 : bf16 ? 4e-3 : 2e-2);
      EXPECT_TRUE(exact || (from.moments == to.moments) || first > 0.0);
    }
  }
}

}  // namespace
}  // namespace octet::test
