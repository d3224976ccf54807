#include "octet/data/packer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "octet/data/bytes_tokenizer.h"
#include "octet/data/inspect.h"
#include "octet/data/token_file.h"
#include "support/data_support.h"
#include "support/seed.h"

namespace octet {
namespace {

using data_test::contains;
using data_test::error_of;
using data_test::write_text;

class PackerTest : public ::testing::Test {
 protected:
  data_test::TemporaryDirectory directory_;
  std::mt19937_64 random_{test::test_seed()};

  PackOptions options(const std::vector<std::string>& inputs) {
    PackOptions options;
    for (const std::string& input : inputs) options.inputs.push_back(directory_ / input);
    options.output = directory_ / "train.h5";
    options.progress = false;
    return options;
  }

  /// Text of `bytes` random bytes other than NUL, with many line feeds and separators.
  std::string random_text(std::size_t bytes) {
    std::string text(bytes, ' ');
    for (char& c : text) {
      const auto dice = random_() % 8;
      c = dice == 0 ? '\n' : dice == 1 ? '%' : dice == 2 ? '\r' : static_cast<char>(1 + random_() % 255);
    }
    return text;
  }
};

/// The documents of a file as text; every one must end with the end-of-document id and hold it nowhere else.
std::vector<std::string> documents_of(const std::string& path) {
  const TokenFile file(path);
  std::vector<std::string> documents;
  for (std::size_t d = 0; d < static_cast<std::size_t>(file.info().documents); ++d) {
    std::vector<std::int32_t> ids(file.offsets()[d + 1] - file.offsets()[d]);
    file.read(static_cast<std::int64_t>(file.offsets()[d]), ids);
    EXPECT_EQ(ids.back(), 256);
    EXPECT_EQ(std::count(ids.begin(), ids.end(), 256), 1);
    documents.emplace_back(ids.begin(), ids.end() - 1);
  }
  return documents;
}

std::string bytes_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

TEST_F(PackerTest, EveryByteOfATextIsOneToken) {
  std::string text;
  for (int c = 1; c < 256; ++c) text += static_cast<char>(c);
  text += std::string(70'000, 'x') + '\0' + "after a late NUL";
  write_text(directory_ / "a.txt", text);
  const PackSummary summary = pack(options({"a.txt"}));
  EXPECT_EQ(documents_of(directory_ / "train.h5"), std::vector<std::string>{text});
  EXPECT_EQ(summary.train.tokens, static_cast<std::int64_t>(text.size()) + 1);
  EXPECT_EQ(summary.train.bytes, static_cast<std::int64_t>(text.size()));
  const TokenFile file(directory_ / "train.h5");
  EXPECT_EQ(file.info().vocabulary, 257);
  EXPECT_EQ(file.info().end_of_document, 256);
  EXPECT_EQ(file.info().token_bytes, 2);
  EXPECT_EQ(file.info().tokenizer, "bytes");
}

TEST_F(PackerTest, DirectoriesAreReadRecursivelyInSortedOrderWithoutBinaryHiddenAndLinkedFiles) {
  write_text(directory_ / "in/b/two", "two");
  write_text(directory_ / "in/a.txt", "one");
  write_text(directory_ / "in/c", "three");
  write_text(directory_ / "in/empty", "");
  write_text(directory_ / "in/program", std::string("\x7f"
                                                    "ELF\0\0",
                                                    6));
  write_text(directory_ / "in/.git/config", "hidden");
  std::filesystem::create_symlink("c", directory_ / "in/d");
  PackOptions all = options({"in"});
  all.inputs.push_back(directory_ / "in/a.txt");
  const PackSummary summary = pack(all);
  EXPECT_EQ(documents_of(all.output), (std::vector<std::string>{"one", "two", "three"}));
  EXPECT_EQ(summary.files, 3);
  EXPECT_EQ(summary.binary_files, 1);
  EXPECT_EQ(summary.first_binary_file, directory_ / "in/program");
  EXPECT_EQ(summary.repeated_files, 2);
}

TEST_F(PackerTest, SeparatorLinesEndDocumentsAndEmptyOnesAreLeftOut) {
  write_text(directory_ / "a", "%\none\nmore\n%\n%\r\n%%\n %\n100%\n%\nlast");
  write_text(directory_ / "b", "new file\n%");
  PackOptions separated = options({"a", "b"});
  separated.separator = "%";
  pack(separated);
  EXPECT_EQ(documents_of(separated.output),
            (std::vector<std::string>{"one\nmore\n", "%%\n %\n100%\n", "last", "new file\n"}));
}

/// The documents of one file, by a plain reading of the rule.
std::vector<std::string> split_plainly(const std::string& text, const std::string& separator) {
  std::vector<std::string> documents = {""};
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find('\n', begin), text.size() - 1);
    const std::string line = text.substr(begin, end - begin + 1);
    if (line == separator || line == separator + "\n" || line == separator + "\r\n" ||
        line == separator + "\r")
      documents.emplace_back();
    else
      documents.back() += line;
    begin = end + 1;
  }
  std::erase(documents, "");
  return documents;
}

TEST_F(PackerTest, DocumentsAreCutTheSameWhereverPiecesOfALargeFileEnd) {
  for (const std::string separator : {"%", "%%"}) {
    const std::string text = random_text((9 << 20) + random_() % 1000);  // several pieces of 4 MiB
    write_text(directory_ / "a", text);
    PackOptions separated = options({"a"});
    separated.separator = separator;
    separated.overwrite = true;
    pack(separated);
    EXPECT_EQ(documents_of(separated.output), split_plainly(text, separator));
  }
}

TEST_F(PackerTest, SeparatorAcrossTheEndOfAPieceIsFound) {
  constexpr std::size_t kPiece = 4 << 20;
  for (std::size_t before = 0; before < 4; ++before) {
    const std::string text = std::string(kPiece - 3 + before, 'x') + "\n%\nend";
    write_text(directory_ / "a", text);
    PackOptions separated = options({"a"});
    separated.separator = "%";
    separated.overwrite = true;
    pack(separated);
    EXPECT_EQ(documents_of(separated.output),
              (std::vector<std::string>{std::string(kPiece - 3 + before, 'x') + "\n", "end"}));
  }
}

TEST_F(PackerTest, OutputIsTheSameForAnyNumberOfThreads) {
  for (int f = 0; f < 60; ++f)
    write_text(directory_ / fmt::format("in/{}", f), random_text(random_() % (f == 7 ? 10'000'000 : 20'000)));
  PackOptions parallel = options({"in"});
  parallel.separator = "%";
  parallel.validation = directory_ / "validation.h5";
  parallel.validation_fraction = 0.2;
  parallel.overwrite = true;
  parallel.threads = 1;
  pack(parallel);
  const std::string train = bytes_of(parallel.output), validation = bytes_of(parallel.validation);
  for (const int threads : {2, 7}) {
    parallel.threads = threads;
    pack(parallel);
    EXPECT_TRUE(bytes_of(parallel.output) == train) << threads;
    EXPECT_TRUE(bytes_of(parallel.validation) == validation) << threads;
  }
}

TEST_F(PackerTest, ValidationTakesItsShareAndTogetherNothingIsLost) {
  constexpr int kDocuments = 4000;
  std::string text;
  std::vector<std::string> expected;
  for (int d = 0; d < kDocuments; ++d) {
    expected.push_back(fmt::format("document {}\n", d));
    text += expected.back() + "--\n";
  }
  write_text(directory_ / "a", text);
  PackOptions split = options({"a"});
  split.separator = "--";
  split.validation = directory_ / "validation.h5";
  split.validation_fraction = 0.25;
  split.seed = random_();
  split.overwrite = true;
  pack(split);
  const auto train = documents_of(split.output), validation = documents_of(split.validation);
  EXPECT_NEAR(static_cast<double>(validation.size()), 0.25 * kDocuments,
              6 * std::sqrt(0.25 * 0.75 * kDocuments));
  std::vector<std::string> together = train;
  together.insert(together.end(), validation.begin(), validation.end());
  std::sort(together.begin(), together.end());
  std::sort(expected.begin(), expected.end());
  EXPECT_EQ(together, expected);

  ++split.seed;
  pack(split);
  EXPECT_NE(documents_of(split.validation), validation);
}

TEST_F(PackerTest, TwoDocumentsFillBothSplitsWhateverTheFraction) {
  write_text(directory_ / "a", "first");
  write_text(directory_ / "b", "second");
  PackOptions split = options({"a", "b"});
  split.validation = directory_ / "validation.h5";
  split.validation_fraction = 1e-6;
  pack(split);
  EXPECT_EQ(documents_of(split.output), std::vector<std::string>{"first"});
  EXPECT_EQ(documents_of(split.validation), std::vector<std::string>{"second"});
}

TEST_F(PackerTest, TheOnlyFileWithoutSeparatorIsCutNearItsEnd) {
  const std::string text = random_text((5 << 20) + 3);
  write_text(directory_ / "a", text);
  for (const double fraction : {0.1, 0.5, 0.9}) {
    PackOptions split = options({"a"});
    split.validation = directory_ / "validation.h5";
    split.validation_fraction = fraction;
    split.overwrite = true;
    pack(split);
    const auto train = documents_of(split.output), validation = documents_of(split.validation);
    ASSERT_EQ(train.size(), 1u);
    ASSERT_EQ(validation.size(), 1u);
    EXPECT_EQ(train[0] + validation[0], text);
    EXPECT_NEAR(static_cast<double>(validation[0].size()), fraction * static_cast<double>(text.size()), 1.0);
  }
}

TEST_F(PackerTest, EntropyIsThatOfSingleTokens) {
  const std::string text = random_text(10'000);
  write_text(directory_ / "a", text);
  const PackSummary summary = pack(options({"a"}));
  std::map<int, int> counts = {{256, 1}};
  for (const char c : text) ++counts[static_cast<unsigned char>(c)];
  long double entropy = 0;
  for (const auto& [id, count] : counts) {
    const long double share = static_cast<long double>(count) / static_cast<long double>(text.size() + 1);
    entropy -= share * std::log(share);
  }
  EXPECT_NEAR(summary.train.entropy, static_cast<double>(entropy), 1e-12);
  EXPECT_TRUE(contains(inspect_token_file(directory_ / "train.h5", {}),
                       {fmt::format("{:.4f} nats/token", static_cast<double>(entropy))}));
}

TEST_F(PackerTest, RefusalsNameWhatIsWrongAndLeaveNothingBehind) {
  write_text(directory_ / "a", "text");
  write_text(directory_ / "separators", "%\n%\n");
  write_text(directory_ / "one", "text\n%\n");
  write_text(directory_ / "binary", std::string(10, '\0'));
  const auto refusal = [&](ErrorKind kind, const PackOptions& wrong) {
    return error_of(kind, [&] { pack(wrong); });
  };

  EXPECT_TRUE(contains(refusal(ErrorKind::kUsage, options({})), {"no input"}));
  EXPECT_TRUE(contains(refusal(ErrorKind::kUsage, options({"missing"})), {directory_ / "missing"}));
  EXPECT_TRUE(contains(refusal(ErrorKind::kData, options({"binary"})), {directory_ / "binary", "1 binary"}));
  PackOptions wrong = options({"separators"});
  wrong.separator = "%";
  EXPECT_TRUE(contains(refusal(ErrorKind::kData, wrong), {"only separators"}));
  wrong = options({"one"});
  wrong.separator = "%";
  wrong.validation = directory_ / "validation.h5";
  EXPECT_TRUE(contains(refusal(ErrorKind::kData, wrong), {"only one document"}));
  wrong.validation_fraction = 1.0;
  EXPECT_TRUE(contains(refusal(ErrorKind::kUsage, wrong), {"fraction is 1", "less than 1"}));
  wrong = options({"a"});
  wrong.output = directory_ / "nowhere/train.h5";
  EXPECT_TRUE(contains(refusal(ErrorKind::kUsage, wrong), {"there is no directory", "nowhere"}));
  wrong.output = directory_ / "a";
  EXPECT_TRUE(contains(refusal(ErrorKind::kUsage, wrong), {directory_ / "a", "exists", "--overwrite"}));
  wrong.overwrite = true;
  EXPECT_TRUE(contains(refusal(ErrorKind::kUsage, wrong), {directory_ / "a", "one of the inputs"}));
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(directory_.path()), {}), 4);
}

TEST_F(PackerTest, InspectShowsTheDocumentAndTheSamplesOfAnEpoch) {
  write_text(directory_ / "a", "first\n%\nsecond \x1b[31m document\n%\n" + std::string(100, 'z'));
  PackOptions separated = options({"a"});
  separated.separator = "%";
  separated.command_line = "octet pack --separator %";
  pack(separated);
  const std::string report = inspect_token_file(separated.output, {.document = 1, .sequence = 8});
  EXPECT_TRUE(contains(report, {"documents         3", "uint16", "bytes", "OK", "octet pack --separator %",
                                "second \\x1b[31m document\n"}));
  const std::int64_t tokens = TokenFile(separated.output).info().tokens;
  EXPECT_TRUE(contains(report, {fmt::format("{} an epoch of 8 tokens", (tokens - 1) / 8)}));
  EXPECT_TRUE(
      contains(error_of(ErrorKind::kUsage, [&] { inspect_token_file(separated.output, {.document = 3}); }),
               {"no document 3", "has 3"}));
}

// Case D07: inspect finds a flipped byte by the hash. Case D02: and an id outside the vocabulary by its
// place.
TEST_F(PackerTest, InspectRefusesDamage) {
  const std::string path = directory_ / "a.h5";
  auto tokens = data_test::random_tokens(random_, 1000, 256);
  data_test::write_tokens(path, tokens, 256, 4);
  EXPECT_TRUE(contains(inspect_token_file(path, {}), {"OK"}));
  data_test::overwrite_token(path, 77, 256);
  EXPECT_TRUE(
      contains(error_of(ErrorKind::kData, [&] { inspect_token_file(path, {}); }), {path, "hash FAILED"}));
  EXPECT_TRUE(contains(error_of(ErrorKind::kData, [&] { inspect_token_file(path, {.check_hash = false}); }),
                       {path, "offset 77", "id 256", "256 ids"}));
}

}  // namespace
}  // namespace octet
