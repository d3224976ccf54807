// Failures that users of other trainers reported, by the number of ../shared/cases.md that names the class;
// the values are kept here.
#include "support/training_support.h"

namespace octet::test {
namespace {

class Cases : public testing::Test {
 protected:
  void SetUp() override {
    MPI_Comm_size(MPI_COMM_WORLD, &ranks_);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank_);
  }
  /// The tiny deck with tensor ranks as far as four heads go.
  Deck split_deck() const {
    Deck deck = tiny_deck();
    deck.model.layers = 2;
    deck.parallel.tensor = std::min(ranks_, 4);
    deck.parallel.sequence = ranks_ > 1;
    return deck;
  }
  int ranks_ = 1, rank_ = 0;
};

/// N03: masked micro-batches and ranks add nothing; a step without any target changes nothing.
TEST_F(Cases, N03MaskedMicroBatchAndMaskedRankCountForNothing) {
  Deck deck = tiny_deck();
  deck.model.layers = 2;
  Samples samples = random_samples(8, 64, 256, 1);
  samples.masks.assign(8, std::vector<std::uint8_t>(64, 1));
  samples.masks[0].assign(64, 0);
  samples.masks[3].assign(64, 0);
  samples.masks[7].assign(64, 0);
  Session single(MPI_COMM_SELF, deck);
  const StepResult expected = single.step(samples);
  EXPECT_EQ(expected.tokens, 5 * 64);
  Session split(MPI_COMM_WORLD, deck);
  const StepResult found = split.step(samples);
  EXPECT_EQ(found.tokens, expected.tokens);
  EXPECT_NEAR(found.loss, expected.loss, 1e-6 * expected.loss);
  EXPECT_NEAR(found.gradient_norm, expected.gradient_norm, 1e-5 * expected.gradient_norm);
}

TEST_F(Cases, N03StepWithoutTargetsChangesNothing) {
  for (const int zero : {0, 1, 2, 3}) {
    Deck deck = split_deck();
    deck.parallel.zero = zero;
    Session session(MPI_COMM_WORLD, deck);
    Samples samples = random_samples(8, 64, 256, 2);
    session.step(samples);
    const Tensors before = session.gather(session.engine().store().saved_boxes());
    samples.masks.assign(8, std::vector<std::uint8_t>(64, 0));
    const StepResult result = session.step(samples);
    EXPECT_TRUE(result.skipped);
    EXPECT_TRUE(std::isnan(result.loss));
    EXPECT_EQ(result.updates, 1);
    EXPECT_EQ(session.gather(session.engine().store().saved_boxes()), before);
    samples.masks.clear();
    EXPECT_EQ(session.step(samples).updates, 2);
  }
}

/// N13 (its core): one bad gradient on one rank, and all ranks skip.
TEST_F(Cases, N13GradientThatIsNotFiniteIsSkippedOnAllRanks) {
  Session session(MPI_COMM_WORLD, split_deck());
  const Samples samples = random_samples(8, 64, 256, 3);
  session.step(samples);
  const Tensors good = session.gather(session.engine().store().saved_boxes());
  Tensors weights;
  for (const auto& [name, values] : good) {
    if (name.starts_with("parameters/")) weights[name.substr(11)] = values;
  }
  Tensors bad = weights;
  bad.at("layers.1.mlp.down.weight")[17] = std::numeric_limits<float>::quiet_NaN();
  session.set_parameters(bad);
  const StepResult result = session.step(samples);
  EXPECT_TRUE(result.skipped);
  EXPECT_EQ(result.updates, 0);
  session.set_parameters(weights);
  EXPECT_FALSE(session.step(samples).skipped);
}

/// N04: padding rows of a split vocabulary stay out of the softmax and stay zero. ln 101 = 4.615121; ln 104
/// would be 4.644391.
TEST_F(Cases, N04ZeroHeadGivesLogOfTheVocabularyPaddedOrNot) {
  for (const bool tied : {false, true}) {
    Deck deck = split_deck();
    deck.model.vocabulary = 101;
    deck.model.zero_head = true;
    deck.model.tied = tied;
    Session session(MPI_COMM_WORLD, deck);
    EXPECT_NEAR(session.step(random_samples(8, 64, 101, 4)).loss, 4.615121, 1e-6);
  }
  Deck deck = split_deck();
  deck.model.zero_head = true;
  Session session(MPI_COMM_WORLD, deck);
  EXPECT_NEAR(session.step(random_samples(8, 64, 256, 4)).loss, 5.545177, 1e-6);
}

/// N05: a tied embedding on two pipeline stages: both copies stay bitwise equal, and it is one tensor of the
/// state.
TEST_F(Cases, N05TiedEmbeddingIsOneParameterOverTwoStages) {
  if (ranks_ < 2) GTEST_SKIP() << "a pipeline takes two ranks";
  for (const int zero : {0, 1, 2, 3}) {
    Deck deck = tiny_deck();
    deck.model.layers = 2;
    deck.model.tied = true;
    deck.parallel.pipeline = 2;
    deck.parallel.zero = zero;
    Session session(MPI_COMM_WORLD, deck);
    for (std::uint64_t step = 0; step < 5; ++step) session.step(random_samples(8, 64, 256, 50 + step));
    EXPECT_EQ(session.engine().find_differing_replica(), "");
    // Every element of the state is held once over all ranks, embedding included: gather() checks it.
    const Tensors state = session.gather(session.engine().store().saved_boxes());
    EXPECT_TRUE(state.contains("parameters/embedding.weight"));
    EXPECT_FALSE(state.contains("parameters/head.weight"));
    const Grid& grid = session.engine().grid();
    if (grid.ends() == MPI_COMM_NULL || zero == 3) continue;
    for (const auto& replica : session.engine().store().replicas()) {
      if (replica.name != "embedding.weight (as computed with)") continue;
      const auto* own = replica.memory.as<float>();
      std::vector<float> first(own, own + replica.memory.size());
      MPI_Bcast(first.data(), static_cast<int>(first.size()), MPI_FLOAT, 0, grid.ends());
      EXPECT_EQ(std::memcmp(first.data(), own, first.size() * sizeof(float)), 0) << "ZeRO " << zero;
    }
  }
}

/// N06: a gradient of a tied embedding is one gradient; its norm counts it once in every layout.
TEST_F(Cases, N06GradientNormCountsTiedEmbeddingOnce) {
  Deck deck = split_deck();
  deck.model.tied = true;
  deck.optimizer.clip = 0.1;
  Session session(MPI_COMM_WORLD, deck);
  const StepResult result = session.step(random_samples(8, 64, 256, 5));
  double square = 0.0;
  for (const auto& [name, values] : session.gather(session.engine().store().gradient_boxes())) {
    for (const float value : values) square += std::pow(value / result.tokens, 2);
  }
  EXPECT_NEAR(result.gradient_norm, std::sqrt(square), 1e-6 * result.gradient_norm);
  EXPECT_GT(result.gradient_norm, 0.1);
}

/// N07: what tensor ranks hold alike stays bitwise alike.
TEST_F(Cases, N07ReplicatedParametersStayBitwiseEqualUnderSequenceParallelism) {
  for (const bool sequence : {false, true}) {
    Deck deck = split_deck();
    deck.parallel.sequence = sequence;
    deck.model.qk_norm = true;
    deck.model.kv_heads = 1;
    Session session(MPI_COMM_WORLD, deck);
    for (std::uint64_t step = 0; step < 10; ++step) session.step(random_samples(8, 64, 256, 60 + step));
    const Grid& grid = session.engine().grid();
    int compared = 0;
    for (const auto& box : session.engine().store().held_boxes()) {
      const bool replicated =
          box.name.find("norm") != std::string::npos || box.name.find("attention.k.") != std::string::npos;
      if (!replicated) continue;
      const auto* own = box.memory.as<float>();
      std::vector<float> first(own, own + box.box.size());
      MPI_Bcast(first.data(), static_cast<int>(first.size()), MPI_FLOAT, 0, grid.tensor());
      EXPECT_EQ(std::memcmp(first.data(), own, first.size() * sizeof(float)), 0) << box.name;
      ++compared;
    }
    EXPECT_GT(compared, 0);
  }
}

/// N07: the check that users can turn on finds a copy that has come apart, and names it; it finds nothing in
/// a sound run.
TEST_F(Cases, N07ReplicaCheckNamesTheTensorThatDiffers) {
  for (const int zero : {0, 1, 3}) {
    Deck deck = split_deck();
    deck.parallel.zero = zero;
    Session session(MPI_COMM_WORLD, deck);
    session.step(random_samples(8, 64, 256, 9));
    EXPECT_EQ(session.engine().find_differing_replica(), "") << "ZeRO " << zero;
    if (session.engine().grid().sizes().tensor == 1) continue;
    for (const auto& box : session.engine().store().held_boxes()) {
      if (session.engine().grid().place().tensor == 1 && box.name == "parameters/layers.1.mlp_norm.weight")
        box.memory.as<float>()[0] += 1e-6f;
    }
    const std::string found = session.engine().find_differing_replica();
    EXPECT_NE(found.find("layers.1.mlp_norm.weight"), std::string::npos) << found;
    EXPECT_NE(found.find("tensor"), std::string::npos) << found;
  }
}

/// N08: weights of 1.0 that move by less than a bf16 step a time. Masters: 0.94; their bf16: 0.94140625.
TEST_F(Cases, N08SmallUpdatesAddUpInTheMasters) {
  const std::unique_ptr<Device> device = make_cpu_device();
  const std::unique_ptr<Stream> stream = device->make_stream();
  const std::unique_ptr<Ops> ops = make_cpu_ops(1);
  std::vector<float> master(8, 1.0f), first(8), second(8), gradient(8, 1.0f);
  std::vector<BF16> parameter(8);
  const auto vector = [](auto& values) {
    using T = typename std::decay_t<decltype(values)>::value_type;
    return Tensor{values.data(), DTypeOf<T>::value, 1, 8};
  };
  std::vector<float> rates(1, 6e-4f);
  StepScalars scalars;
  for (int step = 0; step < 100; ++step) {
    scalars.loss = scalars.tokens = 1.0;
    scalars.gradient_square = 8.0;
    ops->finish_step(*stream, &scalars, {rates.data(), DType::kF32, 1, 1}, 0.0f, 0.9f, 0.95f);
    ops->adamw(*stream,
               {vector(master), vector(first), vector(second), vector(gradient), vector(parameter), 0.9f,
                0.95f, 1e-8f, 0.0f},
               &scalars);
  }
  for (const float value : master) EXPECT_NEAR(value, 0.94f, 1e-5f);
  for (const BF16 value : parameter) EXPECT_EQ(static_cast<float>(value), 0.94140625f);
}

/// N09: with documents apart, a sample [A][B] costs what A and B cost by themselves, and changing A changes
/// nothing in B.
TEST_F(Cases, N09PackedDocumentsDoNotSeeOneAnother) {
  Deck deck = split_deck();
  deck.data.mask_documents = true;
  const auto loss_of = [&](const std::vector<std::int32_t>& tokens, std::int32_t boundary, int from, int to) {
    Samples samples;
    for (int i = 0; i < 8; ++i) {
      samples.tokens.push_back(tokens);
      samples.masks.emplace_back(64, 0);
      std::fill(samples.masks.back().begin() + from, samples.masks.back().begin() + to, 1);
      samples.starts.emplace_back(64, 0);
      std::fill(samples.starts.back().begin() + boundary, samples.starts.back().end(), boundary);
    }
    Session session(MPI_COMM_WORLD, deck);
    return session.step(samples);
  };
  std::vector<std::int32_t> packed = random_samples(1, 64, 256, 11).tokens[0];
  const StepResult a = loss_of(packed, 20, 0, 19), b = loss_of(packed, 20, 20, 64);
  std::vector<std::int32_t> alone(packed.begin() + 20, packed.end());
  alone.resize(65, 0);
  const StepResult b_alone = loss_of(alone, 44, 0, 44);
  EXPECT_NEAR(b.loss, b_alone.loss, 1e-6 * b.loss);
  std::vector<std::int32_t> other = packed;
  for (int i = 0; i < 20; ++i) other[static_cast<std::size_t>(i)] = 255 - packed[static_cast<std::size_t>(i)];
  EXPECT_EQ(loss_of(other, 20, 20, 64).loss, b.loss);
  EXPECT_NE(loss_of(other, 20, 0, 19).loss, a.loss);
}

/// N16: the random numbers of a run (initial values; the sample order has tests of its own) depend on global
/// positions alone.
TEST_F(Cases, N16InitialValuesAreTheSameInEveryLayout) {
  Deck deck = tiny_deck();
  deck.model.layers = 2;
  Session single(MPI_COMM_SELF, deck);
  const Tensors expected = single.gather(single.engine().store().saved_boxes());
  Session split(MPI_COMM_WORLD, split_deck());
  EXPECT_EQ(split.gather(split.engine().store().saved_boxes()), expected);
  const auto& q = expected.at("parameters/layers.0.attention.q.weight");
  const auto& o = expected.at("parameters/layers.1.attention.q.weight");
  EXPECT_GT(relative_difference(q, o), 1.0) << "streams of different parameters differ";
}

/// U02: what is planned before the first step is what is in use after some, and each ZeRO stage keeps less
/// than the one before it.
TEST_F(Cases, U02MemoryInUseIsWhatWasPlanned) {
  std::vector<std::int64_t> state;
  for (const int zero : {0, 1, 2, 3}) {
    for (const char* recompute : {"none", "block"}) {
      Deck deck = tiny_deck();
      deck.model.hidden = 128;
      deck.parallel.zero = zero;
      deck.memory.recompute = recompute;
      Session session(MPI_COMM_WORLD, deck);
      for (std::uint64_t step = 0; step < 3; ++step) session.step(random_samples(8, 64, 256, 70 + step));
      std::int64_t planned = 0, kept = 0;
      for (const auto& [name, bytes] : session.engine().memory()) {
        if (name != "operators" && name != "context, libraries")
          planned += bytes;  // the CPU's scratch is not its device's
        if (name == "optimizer state") kept += bytes;
      }
      const auto used = static_cast<double>(session.engine().device().memory_used());
      EXPECT_NEAR(used, static_cast<double>(planned), 0.03 * used)
          << "ZeRO " << zero << " recompute " << recompute;
      if (std::string(recompute) == "none") state.push_back(kept);
    }
  }
  EXPECT_LE(state[1], state[0]);
  if (ranks_ > 1) {
    EXPECT_LT(state[1], state[0]);
  }
}

/// Evaluation counts every target of the file once, whatever the layout; the last round is short.
TEST_F(Cases, EvaluationIsTheSameInEveryLayoutAndMicroBatch) {
  std::string path = testing::TempDir() + "octet_evaluation.h5";
  if (rank_ == 0) {
    TokenFileInfo info;
    info.vocabulary = 256;
    TokenFileWriter writer(path, info);
    writer.add_document(random_samples(1, 64 * 11 + 3, 256, 8).tokens[0]);
    writer.finish();
  }
  MPI_Barrier(MPI_COMM_WORLD);
  const TokenFile file(path);
  Deck deck = tiny_deck();
  deck.model.layers = 2;
  deck.batch.micro = 4;
  deck.batch.global = 8;
  Session single(MPI_COMM_SELF, deck);
  const Evaluation expected = single.engine().evaluate(file, 0);
  EXPECT_EQ(expected.tokens, 64 * 11);
  Deck other = split_deck();
  other.batch.micro = 1;
  Session split(MPI_COMM_WORLD, other);
  const Evaluation found = split.engine().evaluate(file, 0);
  EXPECT_EQ(found.tokens, expected.tokens);
  EXPECT_NEAR(found.loss, expected.loss, 1e-6 * expected.loss);
  MPI_Barrier(MPI_COMM_WORLD);
  if (rank_ == 0) std::remove(path.c_str());
}

}  // namespace
}  // namespace octet::test
