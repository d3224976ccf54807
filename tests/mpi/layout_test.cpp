// The same global batch in every layout: data × tensor × sequence × ZeRO × micro-batch against one rank.
// Bounds are the design's: loss 1e-6 at step 1 and 1e-5 at step 5, gradient norm 1e-5.
#include "support/training_support.h"

namespace octet::test {
namespace {

constexpr int kSteps = 5;

struct Layout {
  int data = 1, tensor = 1, micro = 1, zero = 1;
  bool sequence = false;
  int pipeline = 1, chunks = 1;  ///< chunks 2: interleaved; 0: zero-bubble
};

std::string text(const Layout& layout) {
  return fmt::format("data {} tensor {}{} pipeline {} chunks {} ZeRO {} micro-batch {}", layout.data, layout.tensor,
                     layout.sequence ? " with sequence" : "", layout.pipeline, layout.chunks, layout.zero, layout.micro);
}

Deck with(Deck deck, const Layout& layout) {
  deck.parallel.data = layout.data;
  deck.parallel.tensor = layout.tensor;
  deck.parallel.sequence = layout.sequence;
  deck.parallel.pipeline = layout.pipeline;
  deck.parallel.chunks = std::max(layout.chunks, 1);
  deck.parallel.schedule = layout.chunks > 1 ? "interleaved" : layout.chunks == 1 ? "1f1b" : "zero_bubble";
  deck.parallel.zero = layout.zero;
  deck.batch.micro = layout.micro;
  return deck;
}

bool fits(const Deck& deck, const Layout& layout) {
  const std::int64_t micro_batches = deck.batch.global / (layout.micro * layout.data);
  if (micro_batches * layout.micro * layout.data != deck.batch.global) return false;
  if (layout.pipeline * layout.chunks > deck.model.layers || layout.pipeline > deck.model.layers) return false;
  if (layout.chunks == 0 && (layout.pipeline == 1 || layout.zero >= 2)) return false;
  if (layout.chunks > 1 && (layout.pipeline == 1 || micro_batches % layout.pipeline != 0)) return false;
  if (layout.sequence && layout.tensor == 1) return false;
  // Without data parallelism the stages differ only where two pipeline stages share an embedding.
  return layout.data > 1 || layout.zero == 1 || (layout.pipeline > 1 && deck.model.tied);
}

/// All layouts of the ranks at hand that a deck allows: every grid, schedule, ZeRO stage and micro-batch size.
std::vector<Layout> layouts_of(const Deck& deck, int ranks) {
  std::vector<Layout> result;
  for (int tensor = 1; tensor <= ranks; tensor *= 2) {
    if (deck.model.heads % tensor != 0 || deck.model.mlp % tensor != 0) continue;
    for (int pipeline = 1; pipeline * tensor <= ranks; pipeline *= 2) {
      if (ranks % (tensor * pipeline) != 0) continue;
      for (const int chunks : {0, 1, 2}) {
        for (const bool sequence : {false, true}) {
          for (int micro = 1; micro <= deck.batch.global; micro *= 2) {
            for (int zero = 0; zero <= 3; ++zero) {
              const Layout layout{ranks / (tensor * pipeline), tensor, micro, zero, sequence, pipeline, chunks};
              if (fits(deck, layout)) result.push_back(layout);
            }
          }
        }
      }
    }
  }
  return result;
}

struct Outcome {
  std::vector<StepResult> steps;
  Tensors gradients, parameters;  ///< gradients of step 1, unscaled; parameters after the last step
};

Outcome run(MPI_Comm ranks, const Deck& deck, const std::vector<Samples>& batches) {
  Session session(ranks, deck);
  Outcome outcome;
  for (const Samples& batch : batches) {
    outcome.steps.push_back(session.step(batch));
    if (outcome.steps.size() == 1)
      outcome.gradients = session.gather(session.engine().store().gradient_boxes());
  }
  outcome.parameters = session.gather(session.engine().store().saved_boxes());
  return outcome;
}

void expect_equal(const Outcome& found, const Outcome& expected, double scale) {
  for (std::size_t i = 0; i < expected.steps.size(); ++i) {
    const StepResult &a = found.steps[i], &b = expected.steps[i];
    EXPECT_EQ(a.tokens, b.tokens) << "step " << i + 1;
    EXPECT_NEAR(a.loss, b.loss, (i == 0 ? 1e-6 : 1e-5) * scale * b.loss) << "step " << i + 1;
    EXPECT_NEAR(a.gradient_norm, b.gradient_norm, 1e-5 * scale * b.gradient_norm) << "step " << i + 1;
  }
  EXPECT_EQ(found.gradients.size(), expected.gradients.size());
  for (const auto& [name, values] : expected.gradients) {
    if (name.ends_with("attention.k.bias")) continue;  // rounding noise where keys are not rotated
    EXPECT_LT(relative_difference(found.gradients.at(name), values), 1e-5 * scale) << name;
  }
  for (const auto& [name, values] : expected.parameters) {
    if (!name.starts_with("parameters/") || name.ends_with("attention.k.bias")) continue;
    EXPECT_LT(relative_difference(found.parameters.at(name), values), 1e-4 * scale) << name;
  }
}

class LayoutInvariance : public testing::Test {
 protected:
  void SetUp() override { MPI_Comm_size(MPI_COMM_WORLD, &ranks_); }

  /// All layouts against one rank with the whole batch in one micro-batch.
  void compare(Deck deck, bool masked, double scale = 1.0) {
    std::vector<Samples> batches;
    for (int step = 0; step < kSteps; ++step) {
      batches.push_back(random_samples(deck.batch.global, deck.batch.sequence, deck.model.vocabulary,
                                       100 + static_cast<std::uint64_t>(step)));
      if (masked) mask_unevenly(batches.back(), 200 + static_cast<std::uint64_t>(step));
    }
    const Outcome expected =
        run(MPI_COMM_SELF, with(deck, {1, 1, static_cast<int>(deck.batch.global), 1, false}), batches);
    int compared = 0;
    for (const Layout& layout : sampled(layouts_of(deck, ranks_))) {
      SCOPED_TRACE(text(layout));
      expect_equal(run(MPI_COMM_WORLD, with(deck, layout), batches), expected, scale);
      ++compared;
    }
    EXPECT_GT(compared, 0);
  }

  /// All of them with OCTET_ALL_LAYOUTS=1; else every so many, beginning elsewhere in each test, so that one run stays short.
  std::vector<Layout> sampled(const std::vector<Layout>& all) const {
    const char* every = std::getenv("OCTET_ALL_LAYOUTS");
    if (all.size() <= kSample || (every != nullptr && std::string(every) == "1")) return all;
    const std::size_t stride = (all.size() + kSample - 1) / kSample;
    const std::string name = testing::UnitTest::GetInstance()->current_test_info()->name();
    std::vector<Layout> result;
    for (std::size_t i = name.size() % stride; i < all.size(); i += stride) result.push_back(all[i]);
    return result;
  }
  static constexpr std::size_t kSample = 24;

  int ranks_ = 1;
};

Deck gpt2_deck() {
  Deck deck = tiny_deck();
  deck.model.family = "gpt2";
  deck.model.kv_heads = 4;
  deck.model.mlp = 256;
  deck.model.layers = 2;
  deck.model.positions = 80;
  deck.model.tied = true;
  return deck;
}

TEST_F(LayoutInvariance, Llama) {
  compare(tiny_deck(), false);
}

// N01, N06: one denominator for the whole step, and clipping at work in every layout.
TEST_F(LayoutInvariance, UnequalTargetCountsWithClipping) {
  Deck deck = tiny_deck();
  deck.model.layers = 2;
  deck.optimizer.clip = 0.1;
  compare(deck, true);
}

TEST_F(LayoutInvariance, TiedGpt2) {
  compare(gpt2_deck(), false);
}

// N04, N10: a vocabulary and key heads that tensor ranks do not divide.
TEST_F(LayoutInvariance, OddVocabularyAndFewKeyHeads) {
  Deck deck = tiny_deck();
  deck.model.layers = 2;
  deck.model.vocabulary = 101;
  deck.model.heads = 8;
  deck.model.kv_heads = 1;
  deck.model.head_size = 8;
  deck.model.mlp = 176;
  deck.model.tied = true;
  compare(deck, true);
}

// N10: three key heads on two tensor ranks, each with one and a half.
TEST_F(LayoutInvariance, KeyHeadsThatStraddleRanks) {
  Deck deck = tiny_deck();
  deck.model.layers = 2;
  deck.model.heads = 6;
  deck.model.kv_heads = 3;
  deck.model.head_size = 16;
  compare(deck, false);
}

// N07: gradients of norms, and of query and key norms, are partial sums on tensor ranks.
TEST_F(LayoutInvariance, QueryKeyNormsAndBiases) {
  Deck deck = tiny_deck();
  deck.model.layers = 2;
  deck.model.qk_norm = true;
  deck.model.qkv_bias = true;
  deck.model.rope_scaling = "llama3";
  deck.model.rope_original = 32;
  compare(deck, false);
}

/// Layers that run again in the backward pass give the same numbers: all of them, and every second one.
TEST_F(LayoutInvariance, RecomputedBlocks) {
  for (const int every : {1, 2}) {
    Deck deck = tiny_deck();
    deck.model.layers = 3;
    deck.memory.recompute = "block";
    deck.memory.recompute_every = every;
    compare(deck, false);
  }
}

/// Slices cut over fewer ranks than hold the parameters: 1, 2 or 4 of them, by every stage that cuts, with a tied embedding over two stages too.
TEST_F(LayoutInvariance, SlicesWithinSetsOfReplicas) {
  if (ranks_ < 2) GTEST_SKIP() << "one rank has no replicas";
  Deck deck = tiny_deck();
  deck.model.layers = 2;
  deck.model.tied = true;
  const std::vector<Samples> batches = {random_samples(8, 64, 256, 400), random_samples(8, 64, 256, 401)};
  const Outcome expected = run(MPI_COMM_SELF, with(deck, {1, 1, 8, 1, false}), batches);
  for (int size = 1; size <= std::min(ranks_, 4); size *= 2) {
    for (const int zero : {1, 2, 3}) {
      for (const int pipeline : {1, 2}) {
        if (ranks_ / pipeline % size != 0) continue;
        Deck cut = with(deck, {ranks_ / pipeline, 1, 1, zero, false, pipeline});
        cut.parallel.shard_size = size;
        SCOPED_TRACE(fmt::format("shard_size {} ZeRO {} pipeline {}", size, zero, pipeline));
        expect_equal(run(MPI_COMM_WORLD, cut, batches), expected, 1.0);
      }
    }
  }
}

TEST_F(LayoutInvariance, CudaLlamaInFloat32) {
  if (gpu_missing()) GTEST_SKIP() << "no CUDA device";
  Deck deck = tiny_deck();
  deck.run.device = "cuda";
  compare(deck, true, 10.0);
}

TEST_F(LayoutInvariance, CudaTiedGpt2InFloat32) {
  if (gpu_missing()) GTEST_SKIP() << "no CUDA device";
  Deck deck = gpt2_deck();
  deck.run.device = "cuda";
  compare(deck, false, 10.0);
}

/// The GPU's bf16 path against the CPU's float32: every layout within bf16's rounding.
TEST_F(LayoutInvariance, CudaBf16FollowsTheCpu) {
  if (gpu_missing()) GTEST_SKIP() << "no CUDA device";
  Deck deck = tiny_deck();
  deck.model.head_size = 64;
  std::vector<Samples> batches;
  for (int step = 0; step < kSteps; ++step) {
    batches.push_back(random_samples(deck.batch.global, deck.batch.sequence, deck.model.vocabulary,
                                     300 + static_cast<std::uint64_t>(step)));
  }
  const Outcome expected = run(MPI_COMM_SELF, with(deck, {1, 1, 8, 1, false}), batches);
  deck.run.device = "cuda";
  deck.precision.compute = "bf16";
  for (const Layout& layout : layouts_of(deck, ranks_)) {
    SCOPED_TRACE(text(layout));
    const Outcome found = run(MPI_COMM_WORLD, with(deck, layout), batches);
    for (std::size_t i = 0; i < found.steps.size(); ++i) {
      EXPECT_NEAR(found.steps[i].loss, expected.steps[i].loss, 2e-3 * expected.steps[i].loss)
          << "step " << i + 1;
      EXPECT_NEAR(found.steps[i].gradient_norm, expected.steps[i].gradient_norm,
                  2e-2 * expected.steps[i].gradient_norm)
          << "step " << i + 1;
    }
    for (const auto& [name, values] : expected.gradients) {
      EXPECT_LT(relative_difference(found.gradients.at(name), values), 5e-2) << name;
    }
  }
}

}  // namespace
}  // namespace octet::test
