// Linear layers in 8 bits: the same training as in bfloat16, and alike in every layout.
#include "../src/ops/cpu/cpu_ops.h"
#include "support/training_support.h"

namespace octet::test {
namespace {

/// Sizes that every recipe takes, cut over two tensor ranks too.
Deck fp8_deck(const std::string& recipe) {
  Deck deck = tiny_deck();
  deck.model.layers = 2;
  deck.model.hidden = 128;
  deck.model.head_size = 64;
  deck.model.mlp = 256;
  deck.batch.sequence = 128;
  deck.precision.compute = "bf16";
  deck.precision.fp8 = recipe;
  return deck;
}

/// Mostly the next number: the loss falls well below ln 256.
Samples learnable(const Deck& deck, std::uint64_t seed) {
  Samples samples = random_samples(deck.batch.global, deck.batch.sequence, deck.model.vocabulary, seed);
  for (auto& tokens : samples.tokens) {
    for (std::size_t i = 1; i < tokens.size(); ++i)
      tokens[i] = tokens[i] % 4 == 0 ? tokens[i] : (tokens[i - 1] + 1) % 256;
  }
  return samples;
}

struct Curve {
  std::vector<double> losses;
  Tensors gradients;  ///< of the first step
};

Curve train(MPI_Comm ranks, const Deck& deck, int steps, const EngineWrappers& wrappers = {}) {
  Session session(ranks, deck, {}, wrappers);
  Curve curve;
  for (int step = 0; step < steps; ++step) {
    curve.losses.push_back(session.step(learnable(deck, 700 + static_cast<std::uint64_t>(step))).loss);
    if (step == 0) curve.gradients = session.gather(session.engine().store().gradient_boxes());
  }
  return curve;
}

/// How often largest magnitudes were found in a pass over a finished tensor, and while it was written.
struct Measurements {
  int apart = 0, by_producers = 0;
};

/// The CPU operators, but for largest magnitudes: each is found in a pass of its own.
class MeasuringApart final : public CpuOps {
 public:
  explicit MeasuringApart(Measurements& count) : CpuOps(1), count_(count) {}

  void largest_magnitude(Stream& stream, Tensor x, Tensor largest) override {
    ++count_.apart;
    CpuOps::largest_magnitude(stream, x, largest);
  }
  void norm_forward(Stream& stream, const NormForward& args) override {
    NormForward silent = args;
    silent.largest = {};
    CpuOps::norm_forward(stream, silent);
    measure(stream, args.y, args.largest);
  }
  void norm_backward(Stream& stream, const NormBackward& args) override {
    NormBackward silent = args;
    silent.largest = {};
    CpuOps::norm_backward(stream, silent);
    measure(stream, args.dx, args.largest);
  }
  void swiglu_forward(Stream& stream, Tensor gate_up, Tensor out, Tensor largest) override {
    CpuOps::swiglu_forward(stream, gate_up, out, {});
    measure(stream, out, largest);
  }
  void swiglu_backward(Stream& stream, Tensor gate_up, Tensor dout, Tensor largest) override {
    CpuOps::swiglu_backward(stream, gate_up, dout, {});
    measure(stream, gate_up, largest);
  }
  void gelu_forward(Stream& stream, Tensor in, Tensor out, Tensor largest) override {
    CpuOps::gelu_forward(stream, in, out, {});
    measure(stream, out, largest);
  }
  void gelu_backward(Stream& stream, Tensor in, Tensor dout, Tensor largest) override {
    CpuOps::gelu_backward(stream, in, dout, {});
    measure(stream, in, largest);
  }

 private:
  void measure(Stream& stream, Tensor written, Tensor largest) {
    if (!largest) return;
    EXPECT_EQ(*largest.as<float>(), 0.0f) << "left from another tensor";
    ++count_.by_producers;
    CpuOps::largest_magnitude(stream, written, largest);
  }

  Measurements& count_;
};

/// The CPU operators, counting the elements that 8-bit copies were made of.
class CountingCopies final : public CpuOps {
 public:
  explicit CountingCopies(std::int64_t& elements) : CpuOps(1), elements_(elements) {}
  void quantize(Stream& stream, const Quantize& args) override {
    elements_ += args.from.size();
    CpuOps::quantize(stream, args);
  }

 private:
  std::int64_t& elements_;
};

double worst_difference(const Curve& a, const Curve& b) {
  double worst = 0.0;
  for (std::size_t i = 0; i < b.losses.size(); ++i)
    worst = std::max(worst, std::abs(a.losses[i] - b.losses[i]) / b.losses[i]);
  return worst;
}

class Fp8 : public testing::Test {
 protected:
  void SetUp() override { MPI_Comm_size(MPI_COMM_WORLD, &ranks_); }
  int ranks_ = 1;

  static void expect_like_bf16(const std::string& device) {
    Deck deck = fp8_deck("none");
    deck.run.device = device;
    const Curve wide = train(MPI_COMM_SELF, deck, 12);
    EXPECT_LT(wide.losses.back(), 0.85 * wide.losses.front());
    for (const char* recipe : {"current", "delayed", "block"}) {
      SCOPED_TRACE(recipe);
      deck.precision.fp8 = recipe;
      const Curve narrow = train(MPI_COMM_SELF, deck, 12);
      EXPECT_LT(worst_difference(narrow, wide), 1e-2);
      EXPECT_NE(narrow.losses, wide.losses);  // something was done in 8 bits
      for (const auto& [name, values] : wide.gradients)
        EXPECT_LT(relative_difference(narrow.gradients.at(name), values), 0.15) << name;
    }
  }

  void expect_alike_in_every_layout(const std::string& device) const {
    for (const char* recipe : {"current", "delayed", "block"}) {
      Deck deck = fp8_deck(recipe);
      deck.run.device = device;
      deck.batch.micro = 8;
      const Curve expected = train(MPI_COMM_SELF, deck, 4);
      for (const Deck& layout : layouts(deck)) {
        const auto& p = layout.parallel;
        SCOPED_TRACE(fmt::format("{}: tensor {} context {} pipeline {} ({}) ZeRO {}", recipe, p.tensor,
                                 p.context, p.pipeline, p.schedule, p.zero));
        const Curve found = train(MPI_COMM_WORLD, layout, 4);
        EXPECT_LT(worst_difference(found, expected), 2e-3);
        for (const auto& [name, values] : expected.gradients)
          EXPECT_LT(relative_difference(found.gradients.at(name), values), 0.1) << name;
      }
    }
  }

  /// One of each kind that the ranks allow.
  std::vector<Deck> layouts(Deck deck) const {
    deck.batch.micro = 1;
    deck.parallel.zero = 3;
    std::vector<Deck> result;
    if (ranks_ <= 4) result.push_back(deck);
    if (ranks_ == 1) {
      deck.memory.recompute = "block";
      result.push_back(deck);
      return result;
    }
    const int data = ranks_ / 2;
    if (8 % data != 0) return result;
    Deck tensor = deck;
    tensor.parallel.tensor = 2;
    tensor.parallel.sequence = true;
    tensor.batch.micro = 2;
    result.push_back(tensor);
    Deck pipeline = deck;
    pipeline.parallel.pipeline = 2;
    pipeline.parallel.schedule = "zero_bubble";
    pipeline.parallel.zero = 2;
    result.push_back(pipeline);
    Deck context = deck;
    context.parallel.context = 2;
    context.batch.micro = 2;
    result.push_back(context);
    return result;
  }
};

TEST_F(Fp8, TrainsLikeBf16) {
  if (ranks_ > 1) GTEST_SKIP() << "for one rank";
  expect_like_bf16("cpu");
}

TEST_F(Fp8, EveryLayoutGivesTheSameCurve) {
  expect_alike_in_every_layout("cpu");
}

/// Pieces of a matrix have scales of their own, which changes subnormal codes alone; scales by block and from
/// earlier steps are the same for all pieces.
TEST_F(Fp8, PiecesOfTokensGiveTheSameGradients) {
  if (ranks_ != 2) GTEST_SKIP() << "for two tensor ranks";
  for (const char* recipe : {"current", "delayed", "block"}) {
    for (const bool sequence : {false, true}) {
      SCOPED_TRACE(fmt::format("{} sequence {}", recipe, sequence));
      Deck deck = fp8_deck(recipe);
      deck.batch.micro = 4;
      deck.parallel.tensor = 2;
      deck.parallel.sequence = sequence;
      const Curve whole = train(MPI_COMM_WORLD, deck, 2);
      deck.parallel.tensor_chunks = 4;
      const Curve pieces = train(MPI_COMM_WORLD, deck, 2);
      EXPECT_LT(worst_difference(pieces, whole), 1e-4);
      for (const auto& [name, values] : whole.gradients)
        EXPECT_LT(relative_difference(pieces.gradients.at(name), values), 1e-4) << name;
    }
  }
}

TEST_F(Fp8, OperandsWrittenByTheirOperatorsAreThoseThatWouldBeCopied) {
  if (ranks_ > 4) GTEST_SKIP() << "eight ranks say nothing that four do not";
  const Deck deck = fp8_deck("delayed");
  std::vector<Deck> decks = layouts(deck);
  decks.push_back(deck);
  decks.back().model.family = "gpt2";
  decks.back().model.kv_heads = deck.model.heads;
  decks.back().model.positions = deck.batch.sequence;
  decks.back().batch.micro = 2;
  if (ranks_ > 1) {
    decks.back().parallel.tensor = 2;
    decks.push_back(deck);
    decks.back().batch.micro = 1;
    decks.back().parallel.pipeline = 2;
    decks.back().memory.recompute = "block";
  }
  for (const Deck& layout : decks) {
    const auto& p = layout.parallel;
    SCOPED_TRACE(fmt::format("{}: tensor {} context {} pipeline {} recompute {}", layout.model.family,
                             p.tensor, p.context, p.pipeline, layout.memory.recompute));
    struct Outcome {
      std::vector<double> losses;
      Tensors gradients;
      std::vector<float> history;
      std::int64_t copied = 0;  ///< elements, in the last step
    };
    const auto run = [&](bool apart) {
      Outcome outcome;
      std::int64_t elements = 0;
      EngineWrappers wrappers;
      wrappers.ops = [&](std::unique_ptr<Ops>) { return std::make_unique<CountingCopies>(elements); };
      wrappers.quantize_apart = apart;
      Session session(MPI_COMM_WORLD, layout, {}, wrappers);
      for (std::uint64_t step = 0; step < 3; ++step) {
        const std::int64_t before = elements;
        outcome.losses.push_back(session.step(learnable(layout, 700 + step)).loss);
        outcome.copied = elements - before;
      }
      outcome.gradients = session.gather(session.engine().store().gradient_boxes());
      const Tensor history = session.engine().fp8_history();
      outcome.history.assign(history.as<float>(), history.as<float>() + history.size());
      return outcome;
    };
    const Outcome expected = run(true), found = run(false);
    EXPECT_EQ(found.losses, expected.losses);
    EXPECT_EQ(found.gradients, expected.gradients);
    EXPECT_EQ(found.history, expected.history);
    if (p.sequence) continue;  // operators see a rank's rows alone
    EXPECT_LT(found.copied, expected.copied);
    if (ranks_ > 1) continue;
    // Of each layer's operands, inputs once in each pass and gradients once, those of attention are left.
    const bool gated = layout.model.family != "gpt2", again = layout.memory.recompute == "block";
    const std::int64_t stream = 128, mlp = 256, inner = gated ? 2 * mlp : mlp;
    const std::int64_t made = (again ? 3 : 2) * 2 * stream + 2 * mlp + inner + 2 * stream;
    const std::int64_t tokens = layout.batch.global * layout.batch.sequence;
    // The last layer's output gradient comes from the head.
    EXPECT_EQ(expected.copied - found.copied, tokens * (layout.model.layers * made - stream));
  }
}

TEST_F(Fp8, LargestMagnitudesByProducersEqualThoseOfFinishedTensors) {
  if (ranks_ > 4) GTEST_SKIP() << "eight ranks say nothing that four do not";
  Deck deck = fp8_deck("current");
  std::vector<Deck> decks = layouts(deck);
  decks.push_back(deck);
  decks.back().model.family = "gpt2";
  decks.back().model.kv_heads = deck.model.heads;
  decks.back().model.positions = deck.batch.sequence;
  if (ranks_ > 1 && ranks_ <= 4) {
    decks.push_back(deck);
    decks.back().parallel.tensor = 2;
    decks.back().batch.micro = 2;
  }
  for (const Deck& layout : decks) {
    const auto& p = layout.parallel;
    SCOPED_TRACE(fmt::format("{}: tensor {} context {} pipeline {} recompute {}", layout.model.family,
                             p.tensor, p.context, p.pipeline, layout.memory.recompute));
    Measurements count;
    EngineWrappers apart, as_written;  // with one thread each: products' last bits go by their number
    apart.ops = [&](std::unique_ptr<Ops>) { return std::make_unique<MeasuringApart>(count); };
    as_written.ops = [](std::unique_ptr<Ops>) { return make_cpu_ops(1); };
    const Curve expected = train(MPI_COMM_WORLD, layout, 2, apart);
    const Curve found = train(MPI_COMM_WORLD, layout, 2, as_written);
    EXPECT_EQ(found.losses, expected.losses);
    EXPECT_EQ(found.gradients, expected.gradients);
    EXPECT_GT(count.by_producers, 0);
    if (ranks_ > 1) continue;
    // Left are the attention's output and the gradient of qkv, and weights once a step. What recomputation
    // writes once more is known.
    const int layers = static_cast<int>(layout.model.layers);
    const int passes =
        2 * layers * static_cast<int>(layout.batch.global / std::max<std::int64_t>(1, layout.batch.micro));
    EXPECT_EQ(count.by_producers, 6 * passes);
    EXPECT_EQ(count.apart, 2 * passes + 2 * layers * kLinearLayers);
  }
}

TEST_F(Fp8, KeptWeightsGiveTheSameNumbersAndAreCopiedOnceAStep) {
  if (ranks_ > 4) GTEST_SKIP() << "eight ranks say nothing that four do not";
  for (const char* recipe : {"current", "delayed", "block"}) {
    for (Deck deck : layouts(fp8_deck(recipe))) {
      const auto& p = deck.parallel;
      SCOPED_TRACE(fmt::format("{}: tensor {} context {} pipeline {} ZeRO {} recompute {}", recipe, p.tensor,
                               p.context, p.pipeline, p.zero, deck.memory.recompute));
      const auto run = [&](const char* keep, bool warm_up) {
        deck.precision.fp8_keep_weights = keep;
        std::int64_t elements = 0;
        EngineWrappers wrappers;
        wrappers.ops = [&](std::unique_ptr<Ops>) { return std::make_unique<CountingCopies>(elements); };
        Session session(MPI_COMM_WORLD, deck, {}, wrappers);
        std::vector<float> numbers;
        std::int64_t in_warm_ups = 0;
        for (std::uint64_t step = 0; step < 2; ++step) {
          const Samples samples = learnable(deck, 700 + step);
          if (warm_up) {  // copies made before a step do not keep it from seeing magnitudes
            const std::int64_t before = elements;
            session.engine().warm_up(pack(samples, session.engine().cut()).batches);
            in_warm_ups += elements - before;
          }
          numbers.push_back(static_cast<float>(session.step(samples).loss));
        }
        if (const Tensor history = session.engine().fp8_history())
          numbers.insert(numbers.end(), history.as<float>(), history.as<float>() + history.size());
        return std::pair(numbers, elements - in_warm_ups);
      };
      const auto [expected, often] = run("false", false);
      const auto [found, once] = run("true", true);
      EXPECT_EQ(found, expected);
      if (ranks_ > 1) continue;
      const std::int64_t weights = 2 * (128 * (256 + 2 * 128) + 128 * 256 + 3 * 128 * 256);
      const bool again = deck.memory.recompute == "block";
      // Recomputed layers do not come to the down product again.
      const std::int64_t recomputed = again ? weights - 2 * 128 * 256 : 0;
      EXPECT_EQ(often - once, 2 * (8 * (2 * weights + recomputed) - weights));
    }
  }
}

TEST_F(Fp8, CudaOperandsWrittenByTheirOperatorsTrainAsCopiesDo) {
  if (gpu_missing()) GTEST_SKIP() << "no CUDA device";
  for (const char* family : {"llama", "gpt2"}) {
    SCOPED_TRACE(family);
    Deck deck = fp8_deck("delayed");
    deck.run.device = "cuda";
    deck.batch.sequence = 64;
    deck.model.family = family;
    if (deck.model.family == "gpt2") {
      deck.model.kv_heads = deck.model.heads;
      deck.model.positions = deck.batch.sequence;
    }
    deck.batch.global = 2;
    deck.batch.micro = 1;
    EngineWrappers apart;
    apart.quantize_apart = true;
    const Curve expected = train(MPI_COMM_SELF, deck, 3, apart), found = train(MPI_COMM_SELF, deck, 3);
    // Column sums are taken in another order, and with them the last bits of what they are summed to.
    EXPECT_LT(worst_difference(found, expected), 1e-4);
  }
}

TEST_F(Fp8, CudaTrainsLikeBf16) {
  if (gpu_missing()) GTEST_SKIP() << "no CUDA device";
  expect_like_bf16("cuda");
}

TEST_F(Fp8, CudaEveryLayoutGivesTheSameCurve) {
  if (gpu_missing()) GTEST_SKIP() << "no CUDA device";
  expect_alike_in_every_layout("cuda");
}

TEST_F(Fp8, SizesThatMatrixUnitsDoNotTakeAreRefusedWithTheNearest) {
  const auto message = [&](Deck deck) -> std::string {
    try {
      resolve_deck(deck, ranks_);
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kUsage);
      return error.what();
    }
    return "accepted";
  };
  Deck deck = fp8_deck("current");
  EXPECT_EQ(message(deck), "accepted");
  deck.model.mlp = 168;
  EXPECT_NE(message(deck).find("model.mlp / tensor = 168 must be a multiple of 16; nearest: 160 or 176"),
            std::string::npos)
      << message(deck);
  deck = fp8_deck("block");
  deck.model.hidden = 192;
  EXPECT_NE(message(deck).find("nearest: 128 or 256"), std::string::npos) << message(deck);
  deck = fp8_deck("current");
  deck.precision.compute = "fp32";
  EXPECT_NE(message(deck).find("needs precision.compute = bf16"), std::string::npos) << message(deck);
}

TEST_F(Fp8, ScalesByBlocksTakeAFewPercentOfTheCodesMemory) {
  const auto work_space = [&](const char* recipe) {
    Deck deck = fp8_deck(recipe);
    deck.model.hidden = 512;
    deck.model.mlp = 1024;
    deck.batch.micro = 8 / ranks_;
    Session session(MPI_COMM_WORLD, deck);
    for (const auto& [name, bytes] : session.engine().memory()) {
      if (name == "work space") return static_cast<double>(bytes);
    }
    return 0.0;
  };
  const double plain = work_space("none"), tensor = work_space("current"), block = work_space("block");
  EXPECT_GT(tensor, plain);
  EXPECT_LT(block - plain, 1.25 * (tensor - plain));
}

TEST_F(Fp8, KeptWeightsTakeTwoBytesAParameterOfTheRanksOwnLayers) {
  if (ranks_ > 2) GTEST_SKIP() << "for one rank, and for a pipeline of two";
  const auto bytes = [&](const char* keep) {
    Deck deck = fp8_deck("delayed");
    deck.batch.micro = 1;
    deck.parallel.pipeline = ranks_;
    deck.precision.fp8_keep_weights = keep;
    Session session(MPI_COMM_WORLD, deck);
    std::int64_t sum = 0;
    for (const auto& [name, size] : session.engine().memory()) sum += name == "work space" ? size : 0;
    return static_cast<double>(sum);
  };
  const double largest = 2 * 128 * 256, layer = 128 * (256 + 2 * 128) + 128 * 256 + 3 * 128 * 256;
  const double without = bytes("false");
  EXPECT_NEAR(bytes("true") - without, 2 * layer * (2 / ranks_) - largest, 2e4);
  EXPECT_EQ(bytes("auto"), bytes("true"));
}

TEST_F(Fp8, GpuWithoutThoseUnitsIsRefusedByName) {
  check_fp8("none", "NVIDIA A100", 80);
  check_fp8("block", "NVIDIA H200", 90);
  check_fp8("current", "some processor", 0);
  const auto message = [](const char* recipe, const char* device, int capability) -> std::string {
    try {
      check_fp8(recipe, device, capability);
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kUsage);
      return error.what();
    }
    return "accepted";
  };
  EXPECT_NE(message("current", "NVIDIA A100", 80).find("NVIDIA A100 (compute capability 8.0) has no 8-bit"),
            std::string::npos);
  EXPECT_NE(message("block", "NVIDIA L40S", 89).find("allowed here: none, current, delayed"),
            std::string::npos);
}

}  // namespace
}  // namespace octet::test
