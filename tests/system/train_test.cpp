// `octet train` from the outside: runs that stop and go on, and what bad input gets.
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <sstream>

#include "octet/data/token_file.h"
#include "octet/runtime/report_text.h"
#include "support/data_support.h"
#include "system/run_command.h"

namespace octet {
namespace {

testing::AssertionResult says(const CommandResult& result, const std::string& part) {
  if (result.output.find(part) != std::string::npos) return testing::AssertionSuccess();
  return testing::AssertionFailure() << "`" << part << "` is not in:\n" << result.output;
}

testing::AssertionResult says_once(const CommandResult& result, const std::string& part) {
  const auto first = result.output.find(part);
  if (first != std::string::npos && result.output.find(part, first + 1) == std::string::npos)
    return testing::AssertionSuccess();
  return testing::AssertionFailure() << "`" << part << "` is not exactly once in:\n" << result.output;
}

class Train : public testing::Test {
 protected:
  void SetUp() override {
    write_tokens("train.h5", 4000, 64);
    write_tokens("validation.h5", 300, 64);
    std::ofstream(folder_ / "run.cfg")
        << "[model]\nlayers = 2\nhidden = 32\nheads = 4\nkv_heads = 2\nmlp = 64\nvocabulary = 64\n"
           "[batch]\nsequence = 16\nmicro = 2\nglobal = 8\n"
           "[schedule]\nwarmup = 2\n[optimizer]\nlr = 1e-2\n[precision]\ncompute = fp32\n"
           "[log]\nevery = 1\n[run]\nsteps = 12\ndevice = cpu\n[data]\ntrain = "
        << (folder_ / "train.h5") << "\nvalidation = " << (folder_ / "validation.h5") << "\n";
  }

  /// Random text in which every id is mostly followed by the next: something to learn.
  void write_tokens(const std::string& name, std::int64_t count, std::int64_t vocabulary) {
    std::mt19937_64 random(7);
    std::vector<std::int32_t> tokens(static_cast<std::size_t>(count));
    for (std::size_t i = 1; i < tokens.size(); ++i) {
      tokens[i] = static_cast<std::int32_t>(
          random() % 4 == 0 ? random() % static_cast<std::uint64_t>(vocabulary)
                            : static_cast<std::uint64_t>((tokens[i - 1] + 1) % vocabulary));
    }
    TokenFileInfo info;
    info.vocabulary = vocabulary;
    TokenFileWriter writer(folder_ / name, info);
    writer.add_document(tokens);
    writer.finish();
  }

  std::string deck(const std::string& run) const {
    return (folder_ / "run.cfg") + " --set run.directory=" + (folder_ / run);
  }
  CommandResult train(int ranks, const std::string& run, const std::string& more = "") const {
    return run_octet_ranks(ranks, "train " + deck(run) + " " + more);
  }
  /// Values of `key` by step; each step must stand there once.
  std::map<int, double> metric(const std::string& run, const std::string& key) const {
    std::ifstream file(folder_ / (run + "/metrics.jsonl"));
    std::map<int, double> values;
    for (std::string line; std::getline(file, line);) {
      const auto object = nlohmann::json::parse(line);
      if (!object.contains(key)) continue;
      EXPECT_TRUE(values.emplace(object["step"].get<int>(), object[key].get<double>()).second) << line;
    }
    return values;
  }
  nlohmann::json status(const std::string& run) const {
    return nlohmann::json::parse(std::ifstream(folder_ / (run + "/STATUS.json")));
  }

  TemporaryFolder folder_;
};

TEST_F(Train, LossFallsAndTheRunFolderIsComplete) {
  const CommandResult result = train(2, "whole", "--set run.evaluate_every=6");
  ASSERT_EQ(result.code, 0) << result.output;
  const auto loss = metric("whole", "loss");
  ASSERT_EQ(loss.size(), 12u);
  EXPECT_LT(loss.at(12), loss.at(1) - 0.5);
  EXPECT_EQ(metric("whole", "validation_loss").size(), 2u);
  EXPECT_EQ(status("whole")["state"], "done");
  for (const char* key : {"grad_norm", "lr", "tokens", "tok/s/gpu", "tflops", "mem_gib", "step_ms", "data_ms",
                          "comm_ms", "skipped", "eta"}) {
    EXPECT_EQ(metric("whole", key).size(), 12u) << key;
  }
  EXPECT_EQ(metric("whole", "tokens").at(12), 12 * 8 * 16);
  EXPECT_TRUE(std::filesystem::exists(folder_ / "whole/deck.cfg"));
  EXPECT_TRUE(std::filesystem::exists(folder_ / "whole/checkpoints/step-00000012/manifest.json"));
  EXPECT_TRUE(says_once(result, "GFLOP/token"));
  // The resolved deck is a deck.
  EXPECT_EQ(run_octet_ranks(1, "train " + (folder_ / "whole/deck.cfg") +
                                   " --set run.directory=" + (folder_ / "again") +
                                   " --set parallel.data=1 --set run.steps=1 --set schedule.warmup=0")
                .code,
            0);
}

TEST_F(Train, StartUpReportFitsItsColumns) {
  for (const char* more : {"--set parallel.pipeline=2 --set batch.micro=1",
                           "--set precision.compute=bf16 --set precision.fp8=current --set "
                           "optimizer.master=split --set optimizer.moments=8bit"}) {
    const CommandResult result =
        train(2, "wide", std::string("--set run.steps=1 --set schedule.warmup=0 ") + more);
    EXPECT_EQ(result.code, 0) << result.output;
    std::istringstream lines(result.output.substr(0, result.output.find("  run folder")));
    for (std::string line; std::getline(lines, line);) EXPECT_LE(line.size(), kReportColumns) << line;
    std::filesystem::remove_all(folder_ / "wide");
  }
}

TEST_F(Train, StoppedRunGoesOnBitwiseInItsLayoutAndCloselyInAnother) {
  ASSERT_EQ(train(4, "whole", "--set parallel.tensor=2").code, 0);
  const CommandResult first = train(4, "parts", "--set parallel.tensor=2 --set run.stop_after=5");
  EXPECT_EQ(first.code, 85) << first.output;
  EXPECT_EQ(status("parts")["state"], "stopped");
  EXPECT_EQ(status("parts")["resume"], true);
  std::filesystem::copy(folder_ / "parts", folder_ / "other", std::filesystem::copy_options::recursive);

  const CommandResult second = train(4, "parts", "--set parallel.tensor=2 --set run.stop_after=5");
  EXPECT_EQ(second.code, 0) << second.output;
  EXPECT_TRUE(says(second, "at step 5"));
  EXPECT_EQ(metric("parts", "loss"), metric("whole", "loss"));
  EXPECT_EQ(metric("parts", "grad_norm"), metric("whole", "grad_norm"));
  EXPECT_EQ(metric("parts", "validation_loss").at(12), metric("whole", "validation_loss").at(12));

  const CommandResult elsewhere = train(2, "other", "--set batch.micro=1 --set parallel.zero=2");
  EXPECT_EQ(elsewhere.code, 0) << elsewhere.output;
  EXPECT_TRUE(says(elsewhere, "saved as data 2 × tensor 2"));
  const auto expected = metric("whole", "loss"), found = metric("other", "loss");
  ASSERT_EQ(found.size(), expected.size());
  EXPECT_NEAR(found.at(6), expected.at(6), 1e-6 * expected.at(6));
  EXPECT_NEAR(found.at(12), expected.at(12), 1e-4 * expected.at(12));
}

/// D06: a run of 250 samples with steps of 8 crosses an epoch and meets every sample; the position is one
/// integer.
TEST_F(Train, RunsCrossEpochs) {
  write_tokens("train.h5", 16 * 10 + 1, 64);
  const CommandResult result = train(2, "epochs");
  EXPECT_EQ(result.code, 0) << result.output;
  EXPECT_TRUE(says(result, "10 samples of 16"));
}

TEST_F(Train, ShowsTheNodeAndWhatSteersTheRanks) {
  const std::string steps = "--set run.steps=1 --set schedule.warmup=0 --set checkpoint.at_end=false";
  CommandResult result =
      run_command("NCCL_ALGO=Ring " + std::string(OCTET_BINARY) + " train " + deck("node") + " " + steps);
  ASSERT_EQ(result.code, 0) << result.output;
  EXPECT_TRUE(says_once(result, "  node       "));
  EXPECT_TRUE(says_once(result, "\n    NUMA 0   package 0, CPU"));
  EXPECT_TRUE(says_once(result, "\n    pinning  "));
  EXPECT_TRUE(says_once(result, "NCCL_ALGO=Ring: NCCL may not choose"));
  EXPECT_TRUE(says_once(result, "\n  environment "));
  for (const char* launcher : {"OMPI_MCA_ess", "OMPI_MCA_orte", "OMPI_MCA_pmix"})
    EXPECT_EQ(result.output.find(launcher), std::string::npos) << result.output;

  EXPECT_TRUE(says_once(train(2, "node", steps + " --set run.pin=none"), "pinning  none: run.pin = none\n"));
}

struct Refusal {
  std::string more;
  int code;
  std::vector<std::string> words;
};

TEST_F(Train, BadDecksAreRefusedOnceWithTheCause) {
  const std::vector<Refusal> cases = {
      {"--set optimizer.weigth_decay=0.1", 2, {"weigth_decay", "weight_decay"}},
      {"--set optimizer.lr=3", 2, {"optimizer.lr"}},
      {"--set parallel.tensor=3", 2, {"parallel.tensor = 3", "1, 2"}},
      {"--set batch.global=7", 2, {"batch.global = 7", "4 or 8"}},
      {"--set parallel.data=1", 2, {"2 were started"}},
      {"--set data.train=/nowhere/train.h5", 3, {"/nowhere/train.h5"}},
      {"--set model.vocabulary=63", 3, {"vocabulary of 64", "model.vocabulary = 63"}},
      {"--set checkpoint.resume=/nowhere/step-00000999", 4, {"/nowhere/step-00000999"}},
      {"--set run.directory=/dev/null/run", 2, {"/dev/null/run"}},
      {"--frobnicate", 2, {"--frobnicate"}},
  };
  for (const Refusal& refusal : cases) {
    const CommandResult result = train(2, "never", refusal.more);
    EXPECT_EQ(result.code, refusal.code) << refusal.more << "\n" << result.output;
    EXPECT_TRUE(says_once(result, "octet: error:")) << refusal.more;
    for (const std::string& word : refusal.words) EXPECT_TRUE(says(result, word));
    EXPECT_FALSE(std::filesystem::exists(folder_ / "never/metrics.jsonl"));
  }
}

/// L05: six ranks and tensor 4.
TEST_F(Train, L05RanksThatTheLayoutDoesNotFill) {
  const CommandResult result = train(6, "never", "--set parallel.tensor=4");
  EXPECT_EQ(result.code, 2);
  EXPECT_TRUE(says_once(result, "4 or 8"));
}

/// D04: 5 samples for a batch of 8.
TEST_F(Train, D04DatasetSmallerThanABatch) {
  write_tokens("train.h5", 5 * 16 + 1, 64);
  const CommandResult result = train(4, "never");
  EXPECT_EQ(result.code, 3);
  EXPECT_TRUE(says_once(result, "5 samples of 16"));
  EXPECT_TRUE(says(result, "batch.global = 8"));
  write_tokens("validation.h5", 16, 64);
  write_tokens("train.h5", 4000, 64);
  EXPECT_EQ(train(2, "never").code, 3);
}

/// D07: cut files are found before anything is built.
TEST_F(Train, D07TruncatedTokenFile) {
  const std::string path = folder_ / "train.h5";
  const auto size = std::filesystem::file_size(path);
  for (const auto cut : {size - 1, size / 2, std::uintmax_t{0}}) {
    std::filesystem::resize_file(path, cut);
    const CommandResult result = train(2, "never");
    EXPECT_EQ(result.code, 3) << result.output;
    EXPECT_TRUE(says(result, path));
  }
}

/// C06, C08: a damaged checkpoint, one of another model, and one from the future.
TEST_F(Train, CheckpointsThatCannotBeTrustedAreRefused) {
  ASSERT_EQ(train(2, "run", "--set run.steps=3").code, 0);
  const std::string step = folder_ / "run/checkpoints/step-00000003",
                    resume = "--set checkpoint.resume=" + step + " ";
  CommandResult result = train(2, "next", resume + "--set model.layers=3");
  EXPECT_EQ(result.code, 4);
  EXPECT_TRUE(says(result, "model.layers"));
  result = train(2, "next", resume + "--set run.steps=3 --set optimizer.lr=2e-2");
  EXPECT_EQ(result.code, 4);
  EXPECT_TRUE(says(result, "checkpoint.allow_changes"));

  const std::string shard = step + "/shard-00001-of-00002.h5";
  std::fstream file(shard, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(-100, std::ios::end);
  const char byte = static_cast<char>(file.peek() ^ 4);
  file.seekp(-100, std::ios::end);
  file.put(byte);
  file.close();
  result = train(2, "next", resume + "--set run.steps=3");
  EXPECT_EQ(result.code, 4);
  EXPECT_TRUE(says(result, "shard-00001-of-00002.h5"));

  std::ifstream manifest(step + "/manifest.json");
  auto object = nlohmann::json::parse(manifest);
  bool found = false;
  for (const char* key : {"format", "format_version", "version"}) {
    if (object.contains(key) && object[key].is_number()) object[key] = 2, found = true;
  }
  ASSERT_TRUE(found);
  std::ofstream(step + "/manifest.json") << object.dump();
  result = train(2, "next", resume + "--set run.steps=3");
  EXPECT_EQ(result.code, 4);
  EXPECT_TRUE(says(result, "newer"));
}

/// D02: an id outside the vocabulary names file, document and place, and ends all ranks, on one tensor rank
/// as on two.
TEST_F(Train, D02TokenIdOutsideTheVocabulary) {
  write_tokens("big.h5", 4000, 300);
  const std::string wide = folder_ / "wide.h5";
  data_test::write_tokens(wide, std::vector<std::int32_t>(4000, 1), 64, 4);
  for (std::int64_t at = 5; at < 4000; at += 16) data_test::overwrite_token(wide, at, 64);
  for (const std::string& tensor : {std::string("1"), std::string("2")}) {
    const std::string layout = "--set parallel.tensor=" + tensor + " --set data.train=";
    CommandResult result = train(2, "never", layout + (folder_ / "big.h5"));
    EXPECT_EQ(result.code, 3);
    EXPECT_TRUE(says(result, "vocabulary of 300"));
    result = train(2, "started-" + tensor, layout + wide);
    EXPECT_EQ(result.code, 3) << result.output;
    EXPECT_TRUE(says(result, wide));
    EXPECT_TRUE(says(result, "document 0"));
    EXPECT_TRUE(says(result, "64"));
  }
}

}  // namespace
}  // namespace octet
