#include "octet/config/resolve.h"

#include <gtest/gtest.h>

#include "octet/base/error.h"
#include "octet/runtime/device_choice.h"
#include "octet/runtime/grid.h"

namespace octet {
namespace {

Deck sound_deck() {
  Deck deck;
  deck.model.layers = 4;
  deck.model.hidden = 64;
  deck.model.heads = 4;
  deck.model.mlp = 172;
  deck.model.vocabulary = 256;
  deck.batch.sequence = 64;
  deck.data.train = "train.h5";
  return deck;
}

std::string refusal(Deck deck, int ranks) {
  try {
    resolve_deck(deck, ranks);
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kUsage);
    return error.what();
  }
  return "";
}

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(ResolveDeck, DerivesWhatFollowsFromTheRest) {
  Deck deck = sound_deck();
  deck.parallel.tensor = 2;
  deck.batch.micro = 8;
  deck.batch.global = 256;
  resolve_deck(deck, 8);
  EXPECT_EQ(deck.parallel.data, 4);
  EXPECT_EQ(deck.model.head_size, 16);
  EXPECT_EQ(deck.model.kv_heads, 4);
  EXPECT_EQ(deck.origin.at("parallel.data"), "derived");
}

/// L05: global 256 with micro 8 on 8 ranks is 4 micro-batches.
TEST(ResolveDeck, L05AccumulationFollowsFromBatchSizes) {
  Deck deck = sound_deck();
  deck.batch.micro = 8;
  deck.batch.global = 256;
  resolve_deck(deck, 8);
  EXPECT_EQ(deck.batch.global / (deck.batch.micro * deck.parallel.data), 4);
}

TEST(ResolveDeck, L05RanksThatTheAxesDoNotFillAreRefused) {
  Deck deck = sound_deck();
  deck.parallel.tensor = 4;
  const std::string text = refusal(deck, 6);
  EXPECT_TRUE(has(text, "6 ranks")) << text;
  EXPECT_TRUE(has(text, "4 or 8")) << text;
  deck.parallel.data = 1;
  EXPECT_TRUE(has(refusal(deck, 8), "8 were started")) << refusal(deck, 8);
}

TEST(ResolveDeck, L05HeadsAndMlpThatTensorRanksDoNotDivideNameTheAllowed) {
  Deck deck = sound_deck();
  deck.model.heads = 6;
  deck.model.head_size = 16;
  deck.parallel.tensor = 4;
  std::string text = refusal(deck, 4);
  EXPECT_TRUE(has(text, "model.heads = 6")) << text;
  EXPECT_TRUE(has(text, "1, 2")) << text;
  deck = sound_deck();
  deck.model.heads = 8;
  deck.parallel.tensor = 8;
  text = refusal(deck, 8);
  EXPECT_TRUE(has(text, "model.mlp = 172")) << text;
  EXPECT_TRUE(has(text, "1, 2, 4")) << text;
}

TEST(ResolveDeck, L05SequenceThatTensorRanksDoNotDivideNamesTheNearest) {
  Deck deck = sound_deck();
  deck.batch.sequence = 62;
  deck.parallel.tensor = 4;
  deck.parallel.sequence = true;
  const std::string text = refusal(deck, 4);
  EXPECT_TRUE(has(text, "60 or 64")) << text;
}

TEST(ResolveDeck, L05GlobalBatchThatDoesNotDivideNamesTheNearest) {
  Deck deck = sound_deck();
  deck.batch.micro = 3;
  deck.batch.global = 256;
  const std::string text = refusal(deck, 8);
  EXPECT_TRUE(has(text, "240 or 264")) << text;
}

TEST(ResolveDeck, AllProblemsAreToldAtOnce) {
  Deck deck = sound_deck();
  deck.model.heads = 3;
  deck.model.head_size = 16;
  deck.parallel.tensor = 2;
  deck.batch.micro = 3;
  deck.batch.global = 4;
  const std::string text = refusal(deck, 2);
  EXPECT_TRUE(has(text, "model.heads")) << text;
  EXPECT_TRUE(has(text, "batch.global")) << text;
  EXPECT_TRUE(has(refusal(Deck{}, 1), "model.layers is required")) << refusal(Deck{}, 1);
  EXPECT_TRUE(has(refusal(Deck{}, 1), "data.train is required"));
}

TEST(ResolveDeck, SettingsOfAnotherFamilyAreRefused) {
  Deck deck = sound_deck();
  deck.model.family = "gpt2";
  deck.model.qk_norm = true;
  EXPECT_TRUE(has(refusal(deck, 1), "qk_norm"));
  deck = sound_deck();
  deck.model.positions = 128;
  EXPECT_TRUE(has(refusal(deck, 1), "model.positions"));
  deck = sound_deck();
  deck.model.family = "gpt2";
  deck.model.positions = 32;
  EXPECT_TRUE(has(refusal(deck, 1), "longer than the position table"));
}

/// L02: which GPU a rank takes.
TEST(ChooseGpu, L02EightRanksOnEightGpusTakeTheirOwn) {
  for (int rank = 0; rank < 8; ++rank) EXPECT_EQ(choose_gpu(8, rank, 8, false, "node1"), rank);
}

TEST(ChooseGpu, L02OneVisibleGpuARankIsDeviceZero) {
  for (int rank = 0; rank < 8; ++rank) EXPECT_EQ(choose_gpu(1, rank, 8, false, "node1"), 0);
}

TEST(ChooseGpu, L02MoreRanksThanGpusAreRefusedUnlessShared) {
  try {
    choose_gpu(4, 5, 8, false, "node1");
    ADD_FAILURE() << "8 ranks on 4 GPUs were accepted";
  } catch (const Error& error) {
    EXPECT_TRUE(has(error.what(), "8 ranks, 4 GPUs on host node1")) << error.what();
  }
  EXPECT_EQ(choose_gpu(4, 5, 8, true, "node1"), 1);
}

TEST(Grid, TensorIsTheFastestAxis) {
  const GridPoint sizes{2, 1, 4, 1};
  EXPECT_EQ(place_of(0, sizes).tensor, 0);
  EXPECT_EQ(place_of(1, sizes).tensor, 1);
  EXPECT_EQ(place_of(1, sizes).data, 0);
  EXPECT_EQ(place_of(6, sizes).data, 3);
  const GridPoint all{2, 2, 2, 2};
  EXPECT_EQ(place_of(13, all).tensor, 1);
  EXPECT_EQ(place_of(13, all).context, 0);
  EXPECT_EQ(place_of(13, all).data, 1);
  EXPECT_EQ(place_of(13, all).pipeline, 1);
}

TEST(ResolveDeck, SplitMastersNeedBf16Parameters) {
  Deck deck = sound_deck();
  deck.optimizer.master = "split";
  EXPECT_EQ(refusal(deck, 1), "");
  deck.precision.compute = "fp32";
  EXPECT_TRUE(has(refusal(deck, 1), "optimizer.master = split")) << refusal(deck, 1);
  EXPECT_TRUE(has(refusal(deck, 1), "precision.compute = bf16")) << refusal(deck, 1);
}

TEST(ResolveDeck, GatherIn8BitsNeedsCodesOfWholeMatricesAndZero) {
  Deck deck = sound_deck();
  deck.model.mlp = 128;
  deck.precision.fp8_gather = true;
  EXPECT_TRUE(has(refusal(deck, 1), "precision.fp8_gather needs precision.fp8 = current or delayed"));
  deck.precision.fp8 = "current";
  EXPECT_EQ(refusal(deck, 1), "");
  deck.parallel.zero = 0;
  EXPECT_TRUE(has(refusal(deck, 1), "precision.fp8_gather has no effect with parallel.zero = 0"));
  deck.parallel.zero = 3;
  deck.model.hidden = deck.model.mlp = 128 * deck.model.heads;
  deck.model.head_size = 128;
  deck.batch.sequence = 128;
  deck.precision.fp8 = "block";
  EXPECT_TRUE(has(refusal(deck, 1), "precision.fp8_gather does not go with precision.fp8 = block"));
}

/// Pieces of tokens must have equal shares for all ranks; 8-bit products take 16 rows.
TEST(ResolveDeck, TensorChunksThatTokensDoNotDivideByAreRefusedWithTheNearest) {
  Deck deck = sound_deck();
  deck.parallel.tensor = 2;
  deck.parallel.tensor_chunks = 3;
  EXPECT_TRUE(has(refusal(deck, 2), "parallel.tensor_chunks = 3 is not allowed; allowed: 1, 2, 4, 8"));
  deck.parallel.tensor_chunks = 8;
  EXPECT_EQ(refusal(deck, 2), "");
  deck.batch.sequence = 72;
  EXPECT_EQ(refusal(deck, 2), "");  // pieces of 9 tokens, whole on both ranks
  deck.parallel.sequence = true;
  std::string text = refusal(deck, 2);
  EXPECT_TRUE(has(text,
                  "= 72 tokens into pieces that must be multiples of 2; nearest batch.sequence: 64 or "
                  "80; or parallel.tensor_chunks from 1, 2, 4"))
      << text;
  deck.batch.micro = 2;
  EXPECT_EQ(refusal(deck, 2), "");
  deck.parallel.tensor = 1;
  deck.batch.micro = 1;
  EXPECT_EQ(refusal(deck, 2), "");  // nothing is exchanged
  deck.parallel.tensor = 2;
  deck.batch.sequence = 64;
  deck.model.mlp = 128;
  deck.precision.fp8 = "current";
  text = refusal(deck, 2);
  EXPECT_TRUE(has(text,
                  "multiples of 16 (precision.fp8 = current); nearest batch.sequence: 128; or "
                  "parallel.tensor_chunks from 1, 2, 4"))
      << text;
}

}  // namespace
}  // namespace octet
