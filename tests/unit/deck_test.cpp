#include "octet/config/deck.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <random>

#include "octet/base/error.h"
#include "octet/config/nearest_name.h"
#include "support/seed.h"

namespace octet {
namespace {

/// A folder for the decks of one test, removed with it.
class DeckTest : public testing::Test {
 protected:
  DeckTest() {
    std::string name = (std::filesystem::temp_directory_path() / "octet-deck-XXXXXX").string();
    folder_ = mkdtemp(name.data());
  }
  ~DeckTest() override { std::filesystem::remove_all(folder_); }

  std::string write(const std::string& name, const std::string& text) const {
    const auto path = folder_ / name;
    std::ofstream(path) << text;
    return path.string();
  }

  /// The message that reading this deck fails with; empty when it is accepted.
  std::string refusal(const std::string& text, const std::vector<std::string>& assignments = {}) const {
    try {
      read_deck({write("refused.cfg", text)}, assignments);
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kUsage);
      return error.what();
    }
    return {};
  }

  std::filesystem::path folder_;
};

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST_F(DeckTest, SectionsAndDottedNamesReachTheSameKey) {
  const Deck sections =
      read_deck({write("a.cfg", "[model]\nlayers = 3\n[optimizer]\nlr = 1e-3 # high\n")}, {});
  const Deck dotted = read_deck({write("b.cfg", "model.layers=3\noptimizer.lr = 0.001\n")}, {});
  EXPECT_EQ(deck_values(sections), deck_values(dotted));
  EXPECT_EQ(sections.model.layers, 3);
  EXPECT_EQ(sections.optimizer.lr, 1e-3);
}

TEST_F(DeckTest, LaterDecksAndAssignmentsWinAndTheOriginSaysWhere) {
  const std::string first = write("first.cfg", "# a comment\n[model]\nlayers = 3\nhidden = 64\n");
  const std::string second = write("second.cfg", "[model]\nlayers = 5\n");
  const Deck deck = read_deck({first, second}, {"batch.micro=4", "batch.micro=8"});
  EXPECT_EQ(deck.model.layers, 5);
  EXPECT_EQ(deck.batch.micro, 8);
  EXPECT_EQ(deck.origin.at("model.layers"), second + ":2");
  EXPECT_EQ(deck.origin.at("model.hidden"), first + ":4");
  EXPECT_EQ(deck.origin.at("batch.micro"), "--set");
  EXPECT_EQ(deck.origin.at("optimizer.lr"), "default");
}

TEST_F(DeckTest, CountsTakeSuffixesThatArePowersOfAThousand) {
  const Deck deck = read_deck({}, {"run.steps=10k", "schedule.warmup=2M", "schedule.decay=1g", "run.seed=7"});
  EXPECT_EQ(deck.run.steps, 10'000);
  EXPECT_EQ(deck.schedule.warmup, 2'000'000);
  EXPECT_EQ(deck.schedule.decay, 1'000'000'000);
  EXPECT_EQ(deck.run.seed, 7);
  EXPECT_TRUE(contains(refusal("run.steps = 10q"), "run.steps = 10q is not allowed; expected integer >= 1"));
  EXPECT_TRUE(contains(refusal("run.steps = 10000000000g"), "run.steps"));
  EXPECT_TRUE(contains(refusal("run.steps = 1e6"), "run.steps"));
}

TEST_F(DeckTest, MisspeltKeyNamesTheNearest) {
  EXPECT_TRUE(
      contains(refusal("[optimizer]\nweigth_decay = 0.1\n"),
               "refused.cfg:2: unknown key optimizer.weigth_decay; did you mean optimizer.weight_decay?"));
  EXPECT_TRUE(contains(refusal("[model]\nnum-layers = 2\n"), "did you mean model.layers?"));
  EXPECT_TRUE(contains(refusal("[model]\nkv-heads = 2\n"), "did you mean model.kv_heads?"));
  EXPECT_TRUE(contains(refusal("[optimiser]\nlr = 0.1\n"), "did you mean optimizer.lr?"));
}

TEST_F(DeckTest, KeyInTheWrongPlaceNamesItsSection) {
  EXPECT_TRUE(
      contains(refusal("learning_rate = 1e-4\n"), "unknown key learning_rate; did you mean optimizer.lr?"));
  EXPECT_TRUE(contains(refusal("[model]\nclip = 1\n"), "did you mean optimizer.clip?"));
  EXPECT_TRUE(
      contains(refusal("", {"batch_size=8"}), "--set: unknown key batch_size; did you mean batch.global?"));
}

TEST_F(DeckTest, UnknownKeyThatResemblesNothingListsWhatThereIs) {
  EXPECT_TRUE(contains(refusal("[batch]\nxylophones = 3\n"), "section [batch] has sequence, micro, global"));
  EXPECT_TRUE(contains(refusal("[orchestra]\nxylophones = 3\n"), "the sections batch, checkpoint"));
}

TEST_F(DeckTest, KeyGivenTwiceInOneFileIsRefused) {
  const std::string message = refusal("[model]\nlayers = 2\nhidden = 8\nlayers = 2\n");
  EXPECT_TRUE(contains(message, "refused.cfg:4: model.layers is given twice; the first is at"));
  EXPECT_TRUE(contains(message, "refused.cfg:2"));
}

TEST_F(DeckTest, QuotedNumberIsTextAndRefused) {
  EXPECT_TRUE(
      contains(refusal("[optimizer]\nlr = \"1e-4\"\n"), "optimizer.lr = \"1e-4\" is text; expected number"));
  EXPECT_TRUE(contains(refusal("[model]\ntied = \"true\"\n"), "expected true or false, without quotes"));
}

TEST_F(DeckTest, ValueOutOfRangeNamesTheRange) {
  EXPECT_TRUE(contains(refusal("[optimizer]\nlr = 3\n"),
                       "optimizer.lr = 3 is not allowed; expected number, 0 < value <= 1"));
  EXPECT_TRUE(contains(refusal("[optimizer]\nlr = 0\n"), "0 < value <= 1"));
  EXPECT_TRUE(contains(refusal("[optimizer]\nlr = nan\n"), "optimizer.lr = nan"));
  EXPECT_TRUE(contains(refusal("[optimizer]\nbeta2 = 1\n"), "0 <= value < 1"));
  EXPECT_TRUE(
      contains(refusal("[batch]\nmicro = -2\n"), "batch.micro = -2 is not allowed; expected integer >= 1"));
  EXPECT_TRUE(contains(refusal("[parallel]\nzero = 9\n"),
                       "parallel.zero = 9 is not allowed; expected integer, 0 <= value"));
  EXPECT_TRUE(contains(refusal("[schedule]\nkind = cosin\n"), "one of: constant, linear, cosine, wsd"));
  EXPECT_TRUE(contains(refusal("[model]\ntied = yes\n"), "true or false"));
}

TEST_F(DeckTest, BadSyntaxNamesTheLine) {
  EXPECT_TRUE(contains(refusal("[model\nlayers = 2\n"), "refused.cfg:1: cannot read `[model`"));
  EXPECT_TRUE(contains(refusal("[optimizer]\nlr: 3e-4\n"), "refused.cfg:2: cannot read `lr: 3e-4`"));
  EXPECT_TRUE(contains(refusal("[data]\ntrain = \"a.h5\n"), "without its closing quote"));
  EXPECT_TRUE(contains(refusal("", {"batch.micro"}), "expected --set section.key=value"));
}

TEST_F(DeckTest, AllProblemsAreReportedAtOnce) {
  const std::string message = refusal("[model]\nlayers = x\nhiden = 4\nnonsense\n", {"optimizer.lr=2"});
  EXPECT_TRUE(contains(message, "4 problems"));
  for (const char* part : {"model.layers = x", "model.hiden", "`nonsense`", "--set: optimizer.lr = 2"}) {
    EXPECT_TRUE(contains(message, part)) << part << " in " << message;
  }
}

TEST_F(DeckTest, UnreadableDeckIsNamed) {
  const std::string missing = (folder_ / "missing.cfg").string();
  try {
    read_deck({missing, folder_.string()}, {});
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_TRUE(contains(error.what(), missing + ": cannot read the deck: No such file"));
    EXPECT_TRUE(contains(error.what(), "it is a directory"));
  }
}

/// A deck with a fresh value in as many kinds of keys as there are.
Deck random_deck() {
  std::mt19937_64 random(test::test_seed());
  std::uniform_real_distribution<double> uniform(0.0, 1.0);
  Deck deck = read_deck({}, {});
  deck.model.layers = static_cast<std::int64_t>(random() % 1'000'000'000'000);
  deck.model.tied = random() % 2 == 1;
  deck.run.seed = std::numeric_limits<std::int64_t>::max() - static_cast<std::int64_t>(random() % 100);
  deck.optimizer.lr = std::nextafter(uniform(random), 1.0);
  deck.optimizer.epsilon = uniform(random) * 1e-300 + 1e-310;
  deck.model.rope_theta = 1e6 * (1.0 + uniform(random));
  deck.schedule.kind = "wsd";
  return deck;
}

TEST_F(DeckTest, ValuesRoundTripExactly) {
  for (int trial = 0; trial < 50; ++trial) {
    Deck deck = random_deck();
    deck.data.train = " a \"path\" # with\\everything";
    const Deck again = deck_from_values(deck_values(deck));
    EXPECT_EQ(deck_values(again), deck_values(deck));
    EXPECT_EQ(again.optimizer.lr, deck.optimizer.lr);
    EXPECT_EQ(again.optimizer.epsilon, deck.optimizer.epsilon);
    EXPECT_EQ(again.model.rope_theta, deck.model.rope_theta);
    EXPECT_EQ(again.run.seed, deck.run.seed);
  }
}

TEST_F(DeckTest, WrittenDeckReadsBackTheSame) {
  for (const char* path :
       {"", "plain.h5", "a#b.h5", "a #b.h5", " padded ", "\"quoted\"", "back\\slash # and \"quote"}) {
    Deck deck = random_deck();
    deck.data.train = path;
    deck.origin["data.train"] = "derived";
    const std::string text = write_deck(deck);
    const Deck again = read_deck({write("written.cfg", text)}, {});
    EXPECT_EQ(deck_values(again), deck_values(deck)) << text;
  }
}

TEST_F(DeckTest, ValuesOfAnotherVersionAreReadAsFarAsTheyAreKnown) {
  const Deck deck = deck_from_values({{"model.layers", "12"}, {"model.from_the_future", "x"}});
  EXPECT_EQ(deck.model.layers, 12);
  EXPECT_EQ(deck.optimizer.lr, Deck().optimizer.lr);
}

TEST_F(DeckTest, DescriptionNamesEveryKeyWithItsDefault) {
  const std::string page = describe_deck();
  for (const auto& [name, value] : deck_values(Deck())) {
    EXPECT_TRUE(contains(page, name + " = " + value)) << name;
  }
}

TEST_F(DeckTest, EveryDefaultIsAllowed) {
  std::vector<std::string> assignments;
  for (const auto& [name, value] : deck_values(Deck())) assignments.push_back(name + "=" + value);
  EXPECT_EQ(deck_values(read_deck({}, assignments)), deck_values(Deck()));
}

TEST(NearestName, CountsASwapOfNeighboursAsOneEdit) {
  EXPECT_EQ(edit_distance("weigth", "weight"), 1);
  EXPECT_EQ(edit_distance("", "abc"), 3);
  EXPECT_EQ(edit_distance("kitten", "sitting"), 3);
  EXPECT_EQ(nearest_name("tran", {"pack", "train"}), "train");
  EXPECT_EQ(nearest_name("xyzzy", {"pack", "train"}), "");
}

}  // namespace
}  // namespace octet
