// What runs beside the compute stream, on streams that truly run beside one another: reductions, gathers,
// stage messages and the optimizer must leave every bit as it is when all runs in order.
#include "support/seed.h"
#include "support/training_support.h"

namespace octet::test {
namespace {

constexpr int kSteps = 4;

struct Trained {
  std::vector<double> numbers;  ///< loss and gradient norm of each step
  Tensors state;
};

/// Steps are queued two ahead, as a run does, from memory that the device copies without waiting.
Trained train(const Deck& deck, std::optional<std::uint64_t> streams) {
  Session session(MPI_COMM_WORLD, deck, streams);
  Engine& engine = session.engine();
  std::vector<std::unique_ptr<Buffer>> memory;
  Trained trained;
  const auto take = [&] {
    const StepResult result = engine.result();
    trained.numbers.insert(trained.numbers.end(), {result.loss, result.gradient_norm});
  };
  for (std::uint64_t step = 0; step < kSteps; ++step) {
    Samples samples =
        random_samples(deck.batch.global, deck.batch.sequence, deck.model.vocabulary, test_seed() + step);
    // A step without targets is skipped: AdamW must see that verdict and not the next one's.
    if (step == 1) samples.masks.assign(samples.tokens.size(), std::vector<std::uint8_t>(32, 0));
    const PackedStep packed = pack(samples, engine.cut());
    std::vector<MicroBatch> batches;
    for (const auto& array : packed.memory) {
      memory.push_back(engine.device().allocate_host(static_cast<std::int64_t>(4 * array.size()), "a batch"));
      std::copy(array.begin(), array.end(), static_cast<std::int32_t*>(memory.back()->data()));
      batches.push_back({static_cast<const std::int32_t*>(memory.back()->data()), engine.cut().tokens()});
    }
    engine.step(batches, true);
    if (engine.pending() == 2) take();
  }
  take();
  EXPECT_EQ(engine.find_differing_replica(), "");
  trained.state = session.gather(engine.store().saved_boxes());
  engine.stream().synchronize();
  return trained;
}

Deck small_deck() {
  Deck deck = tiny_deck();
  deck.batch.sequence = 32;
  deck.optimizer.lr = 1e-2;
  return deck;
}

class Overlap : public testing::Test {
 protected:
  void SetUp() override {
    MPI_Comm_size(MPI_COMM_WORLD, &ranks_);
    if (ranks_ > 4) GTEST_SKIP() << "four ranks meet all there is, and each has eight threads";
  }

  /// In order, and beside one another with the optimizer overlapped and, if `both`, without.
  static void expect_equal_bits(Deck deck, bool both) {
    deck.parallel.overlap_optimizer = false;
    const Trained expected = train(deck, {});
    for (const bool overlap : {false, true}) {
      if (!overlap && !both) continue;
      SCOPED_TRACE(overlap ? "optimizer overlapped" : "optimizer in order");
      deck.parallel.overlap_optimizer = overlap;
      const Trained found = train(deck, test_seed());
      for (std::size_t i = 0; i < expected.numbers.size(); ++i) {
        const bool both_nan = std::isnan(found.numbers[i]) && std::isnan(expected.numbers[i]);
        EXPECT_TRUE(found.numbers[i] == expected.numbers[i] || both_nan)
            << "number " << i << ": " << found.numbers[i] << " and " << expected.numbers[i];
      }
      for (const auto& [name, values] : expected.state) EXPECT_TRUE(found.state.at(name) == values) << name;
    }
  }

  int ranks_ = 1;
};

TEST_F(Overlap, ReductionsGathersAndOptimizerInEveryZeroStage) {
  for (int zero = 0; zero <= 3; ++zero) {
    for (const bool tied : {false, true}) {
      // One rank cuts nothing; on two all pairs are met, on four again beside tensor ranks.
      if ((ranks_ == 1 && zero != 1) || (ranks_ > 2 && tied != (zero % 2 == 1))) continue;
      Deck deck = small_deck();
      deck.model.tied = tied;
      deck.parallel.zero = zero;
      deck.parallel.tensor = ranks_ > 2 ? 2 : 1;
      deck.parallel.sequence = ranks_ > 2;
      deck.batch.micro = zero % 2 + 1;
      SCOPED_TRACE(fmt::format("ZeRO {} tied {}", zero, tied));
      expect_equal_bits(deck, ranks_ < 4);
    }
  }
}

TEST_F(Overlap, ScalesOf8BitLayers) {
  if (ranks_ > 2) GTEST_SKIP() << "the same on two ranks";
  for (const char* recipe : {"current", "delayed"}) {
    for (const auto& [zero, gathers_codes] : {std::pair{3, false}, {1, true}, {3, true}}) {
      if (gathers_codes && ranks_ == 1) continue;
      Deck deck = small_deck();
      deck.model.mlp = 128;
      deck.parallel.zero = zero;
      deck.precision.compute = "bf16";
      deck.precision.fp8 = recipe;
      deck.precision.fp8_gather = gathers_codes;
      SCOPED_TRACE(fmt::format("{}, ZeRO {}, 8-bit gather {}", recipe, zero, gathers_codes));
      expect_equal_bits(deck, false);
    }
  }
}

/// Collectives of tensor ranks beside products: what products read was gathered, what the next norm reads was
/// summed, and nothing is written that a collective still reads.
TEST_F(Overlap, PiecesOfTokensBetweenTensorRanks) {
  if (ranks_ < 2) GTEST_SKIP() << "one rank has nothing to exchange";
  for (const bool sequence : {false, true}) {
    for (const int variant : {0, 1, 2}) {
      // All that there is on two ranks; on four more shares, with stages beside them.
      if (ranks_ == 4 && (variant == 1) == sequence) continue;
      Deck deck = small_deck();
      deck.parallel.tensor = ranks_ == 2 ? 2 : variant == 0 ? 4 : 2;
      deck.parallel.sequence = sequence;
      deck.parallel.tensor_chunks = variant == 0 ? 4 : 2;
      deck.batch.micro = 2;
      if (variant == 1) deck.memory.recompute = "block";
      if (variant == 1) deck.parallel.zero = 3;
      if (variant == 2) {
        deck.parallel.pipeline = ranks_ / 2;
        deck.parallel.schedule = ranks_ == 4 ? "zero_bubble" : "1f1b";
        deck.model.mlp = 128;
        deck.precision.compute = "bf16";
        deck.precision.fp8 = "current";
      }
      SCOPED_TRACE(fmt::format("sequence {} variant {}", sequence, variant));
      expect_equal_bits(deck, false);
    }
  }
}

TEST_F(Overlap, StageMessagesOfEverySchedule) {
  if (ranks_ < 2) GTEST_SKIP() << "one rank has no stages";
  for (const char* schedule : {"1f1b", "interleaved", "zero_bubble"}) {
    for (int zero = 0; zero <= 3; ++zero) {
      for (const int stages : {2, 4}) {
        if (ranks_ % stages != 0) continue;
        // Without data ranks the stages of ZeRO are alike; with them every schedule meets two.
        const bool wanted = stages == ranks_ ? zero == 1 : zero % 2 == (std::string(schedule) == "1f1b");
        if (!wanted) continue;
        Deck deck = small_deck();
        deck.parallel.schedule = schedule;
        deck.parallel.pipeline = stages;
        deck.parallel.chunks = std::string(schedule) == "interleaved" ? 2 : 1;
        if (stages * deck.parallel.chunks > 4) deck.model.layers = stages * deck.parallel.chunks;
        deck.parallel.zero = zero;
        deck.model.tied = zero < 2;
        SCOPED_TRACE(fmt::format("{} {} stages ZeRO {}", schedule, stages, zero));
        expect_equal_bits(deck, zero == 1);
      }
    }
  }
}

TEST_F(Overlap, CudaOptimizerBesideTheNextStepChangesNoNumber) {
  if (gpu_missing()) GTEST_SKIP() << "no CUDA device";
  for (int zero = 0; zero <= 3; ++zero) {
    for (const int stages : {1, 2}) {
      if (ranks_ % stages != 0) continue;
      Deck deck = small_deck();
      deck.run.device = "cuda";
      deck.run.deterministic = true;
      deck.parallel.zero = zero;
      deck.parallel.pipeline = stages;
      SCOPED_TRACE(fmt::format("ZeRO {} stages {}", zero, stages));
      const Trained expected = train(deck, {});
      deck.parallel.overlap_optimizer = true;
      const Trained found = train(deck, {});
      for (const auto& [name, values] : expected.state) EXPECT_TRUE(found.state.at(name) == values) << name;
    }
  }
}

}  // namespace
}  // namespace octet::test
