// Weights that travel as 8-bit codes: the training that gathered bfloat16 weights give, bit for bit.
#include "support/seed.h"
#include "support/training_support.h"

namespace octet::test {
namespace {

/// What a rank was given by gathers of parameters, and how often ranks agreed on magnitudes.
struct Traffic {
  std::int64_t wide_bytes = 0, code_bytes = 0;
  int agreements = 0;
};

class CountingCommunicator final : public Communicator {
 public:
  CountingCommunicator(std::unique_ptr<Communicator> inner, Traffic& traffic)
      : inner_(std::move(inner)), traffic_(traffic), counts_(inner_->name() == "data (parameters)") {}

  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  const std::string& name() const override { return inner_->name(); }
  void all_reduce(Stream& stream, Tensor values, ReduceOp op) override {
    if (counts_) ++traffic_.agreements;
    inner_->all_reduce(stream, values, op);
  }
  void reduce_scatter(Stream& stream, Tensor in, Tensor out) override {
    inner_->reduce_scatter(stream, in, out);
  }
  void all_gather(Stream& stream, Tensor in, Tensor out) override {
    if (counts_) (out.dtype == DType::kE4M3 ? traffic_.code_bytes : traffic_.wide_bytes) += out.bytes();
    inner_->all_gather(stream, in, out);
  }
  void all_to_all(Stream& stream, Tensor in, Tensor out) override { inner_->all_to_all(stream, in, out); }
  void send(Stream& stream, Tensor values, int to) override { inner_->send(stream, values, to); }
  void receive(Stream& stream, Tensor values, int from) override { inner_->receive(stream, values, from); }

 private:
  std::unique_ptr<Communicator> inner_;
  Traffic& traffic_;
  bool counts_;
};

/// Two micro-batches a step where all ranks are data ranks.
Deck gathering_deck(const std::string& recipe, int zero, int ranks) {
  Deck deck = tiny_deck();
  deck.model.layers = 3;
  deck.model.hidden = 128;
  deck.model.head_size = 32;
  deck.model.mlp = 256;
  deck.batch.micro = std::max(1, 4 / ranks);
  deck.optimizer.lr = 5e-2;  // largest magnitudes double: scales of this step and of earlier ones differ
  deck.parallel.zero = zero;
  deck.precision.compute = "bf16";
  deck.precision.fp8 = recipe;
  deck.precision.fp8_history = 2;
  return deck;
}

struct Trained {
  std::vector<double> numbers;  ///< loss and gradient norm of each step
  Tensors state;
  std::vector<float> history;
  Traffic last_step;
};

Trained train(Deck deck, bool gathers_codes, int steps) {
  deck.precision.fp8_gather = gathers_codes;
  Trained trained;
  Traffic traffic;
  EngineWrappers wrappers;
  wrappers.communicator = [&](std::unique_ptr<Communicator> inner) {
    return std::make_unique<CountingCommunicator>(std::move(inner), traffic);
  };
  Session session(MPI_COMM_WORLD, deck, {}, wrappers);
  for (int step = 0; step < steps; ++step) {
    Samples samples = random_samples(deck.batch.global, deck.batch.sequence, deck.model.vocabulary,
                                     test_seed() + static_cast<std::uint64_t>(step));
    // A first step that is skipped leaves delayed scales without a history.
    if (step == 0)
      samples.masks.assign(samples.tokens.size(),
                           std::vector<std::uint8_t>(static_cast<std::size_t>(deck.batch.sequence), 0));
    const Traffic before = traffic;
    const StepResult result = session.step(samples);
    if (step > 0) trained.numbers.insert(trained.numbers.end(), {result.loss, result.gradient_norm});
    trained.last_step = {traffic.wide_bytes - before.wide_bytes, traffic.code_bytes - before.code_bytes,
                         traffic.agreements - before.agreements};
  }
  EXPECT_EQ(session.engine().find_differing_replica(), "");
  trained.state = session.gather(session.engine().store().saved_boxes());
  if (const Tensor history = session.engine().fp8_history()) {
    trained.history.resize(static_cast<std::size_t>(history.size()));
    Stream& stream = session.engine().stream();
    session.engine().device().copy(stream, trained.history.data(), history.data, history.bytes());
    stream.synchronize();
  }
  return trained;
}

class Fp8Gather : public testing::Test {
 protected:
  void SetUp() override {
    MPI_Comm_size(MPI_COMM_WORLD, &ranks_);
    if (ranks_ == 1) GTEST_SKIP() << "one rank gathers nothing";
    if (ranks_ > 4) GTEST_SKIP() << "eight ranks say nothing that four do not";
  }

  static void expect_equal_bits(const Deck& deck, int steps = 4) {
    const auto& p = deck.parallel;
    SCOPED_TRACE(fmt::format("{} {} ZeRO {}: tensor {} context {} pipeline {} ({}) shards {} recompute {}",
                             deck.precision.fp8, deck.model.family, p.zero, p.tensor, p.context, p.pipeline,
                             p.schedule, p.shard_size, deck.memory.recompute));
    const Trained expected = train(deck, false, steps), found = train(deck, true, steps);
    EXPECT_EQ(found.numbers, expected.numbers);
    EXPECT_EQ(found.history, expected.history);
    for (const auto& [name, values] : expected.state) EXPECT_TRUE(found.state.at(name) == values) << name;
    EXPECT_EQ(expected.last_step.code_bytes, 0);
    EXPECT_GT(found.last_step.code_bytes, 0);
  }

  /// Data ranks alone, and beside each of the other axes.
  std::vector<Deck> layouts(const Deck& deck) const {
    std::vector<Deck> result = {deck};
    const auto add = [&](auto change) { change(result.emplace_back(deck)); };
    if (ranks_ == 2) {
      add([](Deck& d) {
        d.parallel.context = 2;
        d.batch.micro = 4;
        d.memory.recompute = "block";
      });
      add([](Deck& d) {
        d.model.family = "gpt2";
        d.model.kv_heads = d.model.heads;
        d.model.positions = d.batch.sequence;
        d.optimizer.master = "split";
        d.optimizer.moments = "bf16";
      });
      add([](Deck& d) {
        d.model.qkv_bias = d.model.qk_norm = d.model.tied = true;
        d.parallel.overlap_optimizer = true;
        d.precision.fp8_keep_weights = "false";
      });
      return result;
    }
    add([](Deck& d) {
      d.parallel.tensor = 2;
      d.batch.micro = 2;
    });
    add([](Deck& d) {
      d.parallel.tensor = 2;
      d.parallel.sequence = true;
      d.parallel.tensor_chunks = 2;
      d.batch.micro = 2;
    });
    add([](Deck& d) {
      d.model.layers = 4;
      d.parallel.pipeline = 2;
      d.parallel.chunks = 2;
      d.parallel.schedule = "interleaved";
      d.batch.micro = 2;
    });
    add([](Deck& d) {
      d.parallel.pipeline = 2;
      d.parallel.schedule = "zero_bubble";
      d.parallel.shard_size = 2;
      d.batch.micro = 2;
    });
    add([](Deck& d) { d.parallel.shard_size = 2; });
    return result;
  }

  int ranks_ = 1;
};

TEST_F(Fp8Gather, CodesMadeBeforeTheGatherTrainAsThoseMadeAfterIt) {
  // ZeRO 3 for slots, and 1 or 2: each layout meets both, each with one recipe.
  bool slots = true;
  for (const char* recipe : {"current", "delayed"}) {
    for (Deck& deck : layouts(gathering_deck(recipe, 3, ranks_))) {
      if (!slots) deck.parallel.zero = ranks_ == 2 ? 1 : 2;
      expect_equal_bits(deck);
      slots = !slots;
    }
    slots = false;
  }
}

TEST_F(Fp8Gather, BlocksTravelInHalfTheBytes) {
  for (const int zero : {1, 3}) {
    SCOPED_TRACE(fmt::format("ZeRO {}", zero));
    const Deck deck = gathering_deck("current", zero, ranks_);
    const Traffic wide = train(deck, false, 2).last_step, narrow = train(deck, true, 2).last_step;
    EXPECT_EQ(wide.code_bytes, 0);
    // Embedding, head and last norm are gathered as before; of the blocks there are their vectors beside
    // codes.
    const std::int64_t others = wide.wide_bytes - 2 * narrow.code_bytes;
    EXPECT_GT(others, 0);
    const std::int64_t vectors = narrow.wide_bytes - others;
    EXPECT_GT(vectors, 0);
    EXPECT_LT(vectors, narrow.code_bytes / 10);
  }
}

TEST_F(Fp8Gather, RanksAgreeOnMagnitudesOnceAnUpdateAndBlock) {
  for (const int zero : {1, 3}) {
    const Deck deck = gathering_deck("current", zero, ranks_);
    EXPECT_EQ(train(deck, false, 2).last_step.agreements, 0);
    EXPECT_EQ(train(deck, true, 2).last_step.agreements, deck.model.layers);
  }
}

TEST_F(Fp8Gather, BlocksTakeHalfTheMemoryWhereverTheyLie) {
  const auto bytes = [&](const char* purpose, int zero, bool gathers_codes) {
    Deck deck = gathering_deck("current", zero, ranks_);
    deck.precision.fp8_gather = gathers_codes;
    Session session(MPI_COMM_WORLD, deck);
    for (const auto& [name, size] : session.engine().memory()) {
      if (name == purpose) return static_cast<double>(size);
    }
    return 0.0;
  };
  const auto saved = [&](const char* purpose, int zero) {
    return bytes(purpose, zero, false) - bytes(purpose, zero, true);
  };
  const double block = 128 * (128 + 2 * 64) + 128 * 128 + 3 * 128 * 256, layers = 3, slots = 2;
  EXPECT_NEAR(saved("parameters", 3), slots * block, 0.1 * block);
  EXPECT_NEAR(saved("parameters", 1), layers * block, 0.1 * block);
  // With several micro-batches a step copies are kept: codes need none of them as they lie.
  EXPECT_NEAR(saved("work space", 1), layers * block, 0.1 * block);
}

TEST_F(Fp8Gather, CudaCodesMadeBeforeTheGatherTrainAsThoseMadeAfterIt) {
  if (gpu_missing()) GTEST_SKIP() << "no CUDA device";
  for (const char* recipe : {"current", "delayed"}) {
    for (const int zero : {1, 3}) {
      Deck deck = gathering_deck(recipe, zero, ranks_);
      deck.run.device = "cuda";
      deck.run.deterministic = true;
      deck.parallel.tensor = ranks_ == 4 ? 2 : 1;
      deck.model.layers = 2;  // small, for emulated kernels
      deck.model.hidden = 64;
      deck.model.head_size = 16;
      deck.model.mlp = 128;
      deck.batch.sequence = 32;
      deck.batch.global = 4;
      deck.batch.micro = 1;
      expect_equal_bits(deck, 3);
    }
  }
}

}  // namespace
}  // namespace octet::test
