// GPT-2 and Llama with their activations as part of matrix products, against separate passes.
#include "support/training_support.h"

namespace octet::test {
namespace {

Deck gpt2(const std::string& device, const std::string& compute) {
  Deck deck = tiny_deck();
  deck.model.family = "gpt2";
  deck.model.kv_heads = 4;
  deck.model.mlp = 256;
  deck.model.tied = true;
  deck.precision.compute = compute;
  deck.run.device = device;
  return deck;
}

Deck llama(const std::string& device, const std::string& compute) {
  Deck deck = tiny_deck();
  deck.model.mlp = 256;
  deck.precision.compute = compute;
  deck.run.device = device;
  return deck;
}

struct Outcome {
  std::vector<double> losses;
  Tensors gradients;  ///< of the first step
  std::int64_t activations = 0;
};

Outcome train(const Deck& deck, std::uint64_t steps = 4) {
  Session session(MPI_COMM_WORLD, deck);
  Outcome outcome;
  for (std::uint64_t step = 0; step < steps; ++step) {
    outcome.losses.push_back(session.step(random_samples(8, 64, 256, 500 + step % 4)).loss);
    if (step == 0) outcome.gradients = session.gather(session.engine().store().gradient_boxes());
  }
  for (const auto& [name, bytes] : session.engine().memory()) {
    if (name == "activations") outcome.activations = bytes;
  }
  return outcome;
}

void expect_alike(const Outcome& found, const Outcome& expected, double loss_bound, double gradient_bound) {
  for (std::size_t i = 0; i < expected.losses.size(); ++i) {
    EXPECT_NEAR(found.losses[i], expected.losses[i], loss_bound * expected.losses[i]) << "step " << i + 1;
  }
  for (const auto& [name, values] : expected.gradients) {
    if (name.ends_with("attention.k.bias")) continue;  // rounding noise where keys are not rotated
    EXPECT_LT(relative_difference(found.gradients.at(name), values), gradient_bound) << name;
  }
}

/// Every way to the activation, on all ranks.
void compare(Deck deck, double loss_bound, double gradient_bound) {
  deck.run.fuse_matmul = false;
  deck.memory.recompute = "selective";
  const Outcome expected = train(deck);
  for (const bool fused : {false, true}) {
    for (const char* recompute : {"none", "selective", "block"}) {
      if (!fused && std::string(recompute) != "none") continue;
      SCOPED_TRACE(fmt::format("fuse_matmul {} recompute {}", fused, recompute));
      deck.run.fuse_matmul = fused;
      deck.memory.recompute = recompute;
      expect_alike(train(deck), expected, loss_bound, gradient_bound);
    }
  }
}

TEST(FusedProducts, GivesTheNumbersOfSeparatePasses) {
  compare(gpt2("cpu", "fp32"), 1e-6, 1e-5);
  compare(llama("cpu", "fp32"), 1e-6, 1e-5);
}

TEST(FusedProducts, DiffersFromSeparatePassesByRoundingInBf16) {
  compare(gpt2("cpu", "bf16"), 2e-3, 2e-2);
  compare(llama("cpu", "bf16"), 2e-3, 2e-2);
}

TEST(FusedProducts, CudaGivesTheNumbersOfSeparatePasses) {
  if (gpu_missing()) GTEST_SKIP() << "no CUDA device";
  compare(gpt2("cuda", "fp32"), 1e-5, 1e-4);
  compare(llama("cuda", "fp32"), 1e-5, 1e-4);
}

TEST(FusedProducts, CudaDiffersFromSeparatePassesByRoundingInBf16) {
  if (gpu_missing()) GTEST_SKIP() << "no CUDA device";
  compare(gpt2("cuda", "bf16"), 2e-3, 2e-2);
  compare(llama("cuda", "bf16"), 2e-3, 2e-2);
}

TEST(FusedProducts, CudaOwnProductsAndAttentionOfGpt2FollowTheCpu) {
  if (gpu_missing()) GTEST_SKIP() << "no CUDA device";
  Deck deck = gpt2("cpu", "fp32");
  deck.model.layers = deck.model.heads = deck.model.kv_heads = 2;
  deck.model.head_size = 64;
  const Outcome expected = train(deck, 1);
  deck.run.device = "cuda";
  deck.precision.compute = "bf16";
  deck.run.matmul = deck.run.attention = "own";
  expect_alike(train(deck, 1), expected, 2e-3, 5e-2);
}

/// All that is there for speed, the own products wherever there is one, against plain passes and the
/// library's.
TEST(FusedProducts, CudaFastPathsFollowPlainOnesOver50Steps) {
  if (gpu_missing()) GTEST_SKIP() << "no CUDA device";
  for (Deck deck : {gpt2("cuda", "bf16"), llama("cuda", "bf16")}) {
    SCOPED_TRACE(deck.model.family);
    deck.run.steps = 50;
    deck.run.fuse_matmul = false;
    deck.run.matmul = "cublas";
    const Outcome plain = train(deck, 50);
    deck.run.fuse_matmul = true;
    deck.run.matmul = "own";
    expect_alike(train(deck, 50), plain, 2e-3, 2e-2);
    EXPECT_LT(plain.losses.back(), plain.losses.front() - 0.2);
  }
}

/// What need not be rebuilt is kept, and that alone: two norm outputs and an activation a layer.
TEST(FusedProducts, KeepNormOutputsAndActivationsUnlessTheyAreRebuilt) {
  for (Deck deck : {gpt2("cpu", "fp32"), llama("cpu", "fp32")}) {
    SCOPED_TRACE(deck.model.family);
    deck.batch.micro = 1;
    const std::int64_t elements = deck.model.layers * deck.batch.sequence * size_of(DType::kF32);
    const std::int64_t norms = elements * 2 * deck.model.hidden, activation = elements * deck.model.mlp;
    const auto activations = [&](const char* recompute, bool fused) {
      deck.memory.recompute = recompute;
      deck.run.fuse_matmul = fused;
      return train(deck, 1).activations;
    };
    const std::int64_t lean = activations("selective", true);
    EXPECT_EQ(activations("none", true), lean + norms + activation);
    EXPECT_EQ(activations("none", false), lean + norms);
    EXPECT_LT(activations("block", true), lean);
  }
}

}  // namespace
}  // namespace octet::test
