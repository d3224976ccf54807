#include <gtest/gtest.h>

#include <fstream>

#include "octet/config/deck.h"
#include "system/run_command.h"

namespace octet {
namespace {

testing::AssertionResult says(const CommandResult& result, const std::string& part) {
  if (result.output.find(part) != std::string::npos) return testing::AssertionSuccess();
  return testing::AssertionFailure() << "`" << part << "` is not in:\n" << result.output;
}

int occurrences(const std::string& text, const std::string& part) {
  int count = 0;
  for (auto at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

TEST(CommandLine, VersionNamesTheLibraries) {
  const CommandResult result = run_octet("--version");
  EXPECT_EQ(result.code, 0);
  for (const char* library : {"octet ", "compiler ", "MPI ", "HDF5 ", "BLAS ", "Boost ", "CUDA "}) {
    EXPECT_TRUE(says(result, library));
  }
}

TEST(CommandLine, HelpListsCommandsAndExplainsEach) {
  const CommandResult overview = run_octet("help");
  EXPECT_EQ(overview.code, 0);
  for (const std::string name : {"train", "pack", "inspect", "bench", "help"}) {
    EXPECT_TRUE(says(overview, "octet " + name));
    const CommandResult page = run_octet("help " + name);
    EXPECT_EQ(page.code, 0);
    EXPECT_TRUE(says(page, "octet " + name));
  }
  EXPECT_EQ(run_octet("--help").output, overview.output);
}

TEST(CommandLine, HelpDeckListsEveryKey) {
  const CommandResult result = run_octet("help deck");
  EXPECT_EQ(result.code, 0);
  for (const auto& [name, value] : deck_values(Deck()))
    EXPECT_TRUE(says(result, name + " = " + value + "  "));
}

TEST(CommandLine, UnknownCommandNamesTheNearest) {
  const CommandResult result = run_octet("tarin");
  EXPECT_EQ(result.code, 2);
  EXPECT_TRUE(says(result, "octet: error: unknown command tarin; did you mean train?"));
  EXPECT_EQ(run_octet("").code, 2);
  EXPECT_EQ(run_octet("help xylophone").code, 2);
}

TEST(CommandLine, UnknownKeysStopTrainingBeforeItBeginsWithOneMessage) {
  const TemporaryFolder folder;
  std::ofstream(folder / "bad.cfg") << "learning_rate = 1e-4\n[optimizer]\nweigth_decay = 0.1\nlr = 3\n";
  const CommandResult result = run_octet("train " + (folder / "bad.cfg") + " --set model.num-layers=2");
  EXPECT_EQ(result.code, 2);
  EXPECT_TRUE(says(result, "bad.cfg:1: unknown key learning_rate; did you mean optimizer.lr?"));
  EXPECT_TRUE(
      says(result, "bad.cfg:3: unknown key optimizer.weigth_decay; did you mean optimizer.weight_decay?"));
  EXPECT_TRUE(says(result, "bad.cfg:4: optimizer.lr = 3 is not allowed"));
  EXPECT_TRUE(says(result, "--set: unknown key model.num-layers; did you mean model.layers?"));
  EXPECT_EQ(occurrences(result.output, "octet: error:"), 1);
}

TEST(CommandLine, MissingDeckIsNamedOnceByAllRanks) {
  const CommandResult result = run_octet_ranks(2, "train /nowhere/missing.cfg");
  EXPECT_EQ(result.code, 2);
  EXPECT_EQ(occurrences(result.output, "/nowhere/missing.cfg: cannot read the deck: No such file"), 1)
      << result.output;
}

TEST(CommandLine, EveryDeckInInputsIsRead) {
  for (const auto& entry :
       std::filesystem::recursive_directory_iterator(std::filesystem::path(OCTET_SOURCE_DIR) / "inputs")) {
    if (entry.path().extension() != ".cfg") continue;
    EXPECT_NO_THROW(read_deck({entry.path()}, {})) << entry.path();
  }
}

TEST(CommandLine, PackedTextIsInspected) {
  const TemporaryFolder folder;
  std::ofstream(folder / "text.txt") << "first\n%\nsecond, longer\n%\nthird\n";
  const CommandResult packed =
      run_octet("pack --separator % --output " + (folder / "text.h5") + " " + (folder / "text.txt"));
  EXPECT_EQ(packed.code, 0) << packed.output;
  const CommandResult inspected = run_octet("inspect " + (folder / "text.h5"));
  EXPECT_EQ(inspected.code, 0) << inspected.output;
  EXPECT_TRUE(says(inspected, "257"));  // the vocabulary: bytes and the end of a document
  EXPECT_TRUE(says(inspected, "bytes"));
}

TEST(CommandLine, InspectingWhatIsNoTokenFileFailsAsData) {
  const TemporaryFolder folder;
  std::ofstream(folder / "text.h5") << "no HDF5";
  const CommandResult result = run_octet("inspect " + (folder / "text.h5"));
  EXPECT_EQ(result.code, 3) << result.output;
  EXPECT_TRUE(says(result, folder / "text.h5"));
}

}  // namespace
}  // namespace octet
