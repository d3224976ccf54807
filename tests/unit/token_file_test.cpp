#include "octet/data/token_file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <hdf5.h>
#include <sys/file.h>
#include <xxhash.h>

#include <numeric>

#include "support/data_support.h"
#include "support/seed.h"

namespace octet {
namespace {

using data_test::contains;
using data_test::error_of;
using data_test::overwrite_token;
using data_test::random_tokens;
using data_test::write_tokens;

class TokenFileTest : public ::testing::Test {
 protected:
  data_test::TemporaryDirectory directory_;
  std::mt19937_64 random_{test::test_seed()};

  std::string open_error(const std::string& path) {
    return error_of(ErrorKind::kData, [&] { TokenFile file(path); });
  }
};

std::vector<std::int32_t> all_tokens(const TokenFile& file) {
  std::vector<std::int32_t> tokens(static_cast<std::size_t>(file.info().tokens));
  file.read(0, tokens);
  return tokens;
}

/// What a foreign program might write; every member may be made wrong.
struct ForeignFile {
  hid_t type = H5T_STD_U16LE;
  std::vector<std::uint64_t> offsets = {0, 4, 10};
  std::int64_t version = 1, complete = 1, tokens = 10, chunk = 0, deflate = 0, filled_from = 0;
  std::int64_t vocabulary = 1000;

  void integer(hid_t file, const char* name, std::int64_t value) const {
    const hid_t space = H5Screate(H5S_SCALAR);
    const hid_t attribute = H5Acreate2(file, name, H5T_STD_I32LE, space, H5P_DEFAULT, H5P_DEFAULT);
    H5Awrite(attribute, H5T_NATIVE_INT64, &value);
    H5Aclose(attribute);
    H5Sclose(space);
  }

  /// The format attribute is of variable length, as h5py writes it. Token i is i % vocabulary.
  void write(const std::string& path) const {
    const hid_t file = H5Fcreate(path.c_str(), H5F_ACC_TRUNC, H5P_DEFAULT, H5P_DEFAULT);
    const hid_t text_type = H5Tcopy(H5T_C_S1);
    H5Tset_size(text_type, H5T_VARIABLE);
    const hid_t scalar = H5Screate(H5S_SCALAR);
    const hid_t format = H5Acreate2(file, "format", text_type, scalar, H5P_DEFAULT, H5P_DEFAULT);
    const char* name = "octet-tokens";
    H5Awrite(format, text_type, &name);
    H5Aclose(format);
    H5Sclose(scalar);
    H5Tclose(text_type);
    integer(file, "version", version);
    integer(file, "complete", complete);
    integer(file, "vocabulary", vocabulary);
    const std::int64_t documents = static_cast<std::int64_t>(offsets.size()) - 1;
    integer(file, "document_count", documents);
    write_count(file);
    write_tokens(file);
    const hsize_t count = offsets.size();
    const hid_t space = H5Screate_simple(1, &count, nullptr);
    const hid_t data =
        H5Dcreate2(file, "documents", H5T_STD_U64LE, space, H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT);
    H5Dwrite(data, H5T_NATIVE_UINT64, H5S_ALL, H5S_ALL, H5P_DEFAULT, offsets.data());
    H5Dclose(data);
    H5Sclose(space);
    H5Fclose(file);
  }

 private:
  void write_count(hid_t file) const {
    const hid_t space = H5Screate(H5S_SCALAR);
    const hid_t attribute = H5Acreate2(file, "token_count", H5T_STD_I64LE, space, H5P_DEFAULT, H5P_DEFAULT);
    H5Awrite(attribute, H5T_NATIVE_INT64, &tokens);
    H5Aclose(attribute);
    H5Sclose(space);
  }

  void write_tokens(hid_t file) const {
    const hsize_t size = static_cast<hsize_t>(tokens);
    const hid_t space = H5Screate_simple(1, &size, nullptr);
    const hid_t properties = H5Pcreate(H5P_DATASET_CREATE);
    const hsize_t chunk_size = static_cast<hsize_t>(chunk);
    if (chunk > 0) H5Pset_chunk(properties, 1, &chunk_size);
    if (deflate > 0) H5Pset_deflate(properties, static_cast<unsigned>(deflate));
    const hid_t data = H5Dcreate2(file, "tokens", type, space, H5P_DEFAULT, properties, H5P_DEFAULT);
    const hsize_t start = static_cast<hsize_t>(filled_from), count = size - start;
    std::vector<std::int64_t> values(count);
    for (hsize_t i = 0; i < count; ++i) values[i] = static_cast<std::int64_t>(start + i) % vocabulary;
    const hid_t memory = H5Screate_simple(1, &count, nullptr);
    H5Sselect_hyperslab(space, H5S_SELECT_SET, &start, nullptr, &count, nullptr);
    H5Dwrite(data, H5T_NATIVE_INT64, memory, space, H5P_DEFAULT, values.data());
    H5Sclose(memory);
    H5Dclose(data);
    H5Pclose(properties);
    H5Sclose(space);
  }
};

TEST_F(TokenFileTest, ReturnsTheDocumentsThatWereWritten) {
  TokenFileInfo info;
  info.vocabulary = 50257;
  info.end_of_document = 50256;
  info.tokenizer = "gpt2";
  info.tokenizer_hash = "0123";
  info.source = "somewhere";
  info.command_line = "octet pack";
  const std::string path = directory_ / "a.h5";
  std::vector<std::int32_t> expected;
  std::vector<std::uint64_t> offsets = {0};
  TokenFileWriter writer(path, info);
  for (int d = 0; d < 20; ++d) {
    const auto document = random_tokens(random_, random_() % 30000, info.vocabulary);
    writer.add_document(document);
    expected.insert(expected.end(), document.begin(), document.end());
    offsets.push_back(expected.size());
  }
  writer.finish();

  const TokenFile file(path);
  EXPECT_EQ(file.info().documents, 20);
  EXPECT_EQ(file.info().token_bytes, 2);
  EXPECT_EQ(file.info().vocabulary, 50257);
  EXPECT_EQ(file.info().end_of_document, 50256);
  EXPECT_EQ(file.info().tokenizer, "gpt2");
  EXPECT_EQ(file.info().tokenizer_hash, "0123");
  EXPECT_EQ(file.info().source, "somewhere");
  EXPECT_EQ(file.info().command_line, "octet pack");
  EXPECT_TRUE(std::equal(offsets.begin(), offsets.end(), file.offsets().begin(), file.offsets().end()));
  EXPECT_EQ(all_tokens(file), expected);
  const std::vector<std::uint16_t> stored(expected.begin(), expected.end());
  EXPECT_EQ(file.hash(), fmt::format("{:016x}", XXH3_64bits(stored.data(), 2 * stored.size())));
  EXPECT_EQ(file.hash(), file.info().tokens_hash);

  for (int trial = 0; trial < 50; ++trial) {
    const std::size_t begin = random_() % expected.size();
    std::vector<std::int32_t> part(random_() % (expected.size() - begin) + 1);
    file.read(static_cast<std::int64_t>(begin), part);
    ASSERT_TRUE(std::equal(part.begin(), part.end(), expected.begin() + static_cast<std::ptrdiff_t>(begin)));
  }
}

TEST_F(TokenFileTest, LossMaskIsStoredAndDefaultsToOnes) {
  TokenFileInfo info;
  info.vocabulary = 100;
  info.has_mask = true;
  TokenFileWriter writer(directory_ / "a.h5", info);
  const std::vector<std::int32_t> tokens = {1, 2, 3};
  writer.add_document(tokens, std::vector<std::uint8_t>{0, 1, 0});
  writer.add_document(tokens);
  writer.finish();
  const TokenFile file(directory_ / "a.h5");
  ASSERT_TRUE(file.info().has_mask);
  std::vector<std::uint8_t> mask(5);
  file.read_mask(1, mask);
  EXPECT_EQ(mask, (std::vector<std::uint8_t>{1, 0, 1, 1, 1}));

  write_tokens(directory_ / "b.h5", tokens, 100);
  std::vector<std::uint8_t> ones(3, 7);
  TokenFile(directory_ / "b.h5").read_mask(0, ones);
  EXPECT_EQ(ones, (std::vector<std::uint8_t>{1, 1, 1}));
}

// Case D01: 16-bit storage must never wrap.
TEST_F(TokenFileTest, SixtyFiveThousandFiveHundredThirtySixIdsFitTwoBytesAndOneMoreDoesNot) {
  write_tokens(directory_ / "two.h5", {0, 65535}, 65536);
  const TokenFile two(directory_ / "two.h5");
  EXPECT_EQ(two.info().token_bytes, 2);
  EXPECT_EQ(all_tokens(two), (std::vector<std::int32_t>{0, 65535}));

  write_tokens(directory_ / "four.h5", {65536}, 65537);
  const TokenFile four(directory_ / "four.h5");
  EXPECT_EQ(four.info().token_bytes, 4);
  EXPECT_EQ(all_tokens(four), (std::vector<std::int32_t>{65536}));

  write_tokens(directory_ / "llama.h5", {70000}, 128256);
  EXPECT_EQ(all_tokens(TokenFile(directory_ / "llama.h5")), (std::vector<std::int32_t>{70000}));

  EXPECT_TRUE(
      contains(error_of(ErrorKind::kData, [&] { write_tokens(directory_ / "no.h5", {70000}, 128256, 2); }),
               {"no.h5", "128256", "65536"}));
  EXPECT_TRUE(contains(error_of(ErrorKind::kData,
                                [&] {
                                  write_tokens(directory_ / "no.h5", {1, 70000}, 65536, 2);
                                }),
                       {"offset 1", "70000", "65536"}));
}

// Case D01: the width comes from the HDF5 type; signed, float and other-endian types are refused by name.
TEST_F(TokenFileTest, SignedFloatAndBigEndianTokensAreRefusedByName) {
  const std::vector<std::pair<hid_t, const char*>> types = {{H5T_STD_I16LE, "int16"},
                                                            {H5T_STD_I32LE, "int32"},
                                                            {H5T_IEEE_F32LE, "float32"},
                                                            {H5T_STD_U64LE, "uint64"},
                                                            {H5T_STD_U16BE, "uint16 big-endian"}};
  for (const auto& [type, name] : types) {
    ForeignFile foreign;
    foreign.type = type;
    foreign.write(directory_ / "a.h5");
    EXPECT_TRUE(contains(open_error(directory_ / "a.h5"),
                         {"a.h5", "has type " + std::string(name) + ",", "uint16 or uint32"}));
  }
  ForeignFile foreign;
  foreign.type = H5T_STD_U32LE;
  foreign.write(directory_ / "a.h5");
  EXPECT_EQ(TokenFile(directory_ / "a.h5").info().token_bytes, 4);
}

// Case D02: an id outside the vocabulary is found with document, offset, id and vocabulary; never reduced
// modulo.
TEST_F(TokenFileTest, IdOutsideTheVocabularyIsNamedWithDocumentAndOffset) {
  const std::string path = directory_ / "a.h5";
  TokenFileInfo info;
  info.vocabulary = 260;
  TokenFileWriter writer(path, info);
  for (int d = 0; d < 100; ++d) {
    auto document = random_tokens(random_, 1000, 256);
    if (d == 57) document[123] = 256;
    writer.add_document(document);
  }
  writer.finish();
  const TokenFile file(path);
  EXPECT_NO_THROW(file.check_ids(257));
  EXPECT_TRUE(contains(error_of(ErrorKind::kData, [&] { file.check_ids(256); }),
                       {path, "document 57, offset 123 (token 57123)", "id 256", "256 ids"}));
}

TEST_F(TokenFileTest, NegativeIdIsRefusedOnWritingAndItsBitsOnReading) {
  EXPECT_TRUE(contains(error_of(ErrorKind::kData,
                                [&] {
                                  write_tokens(directory_ / "a.h5", {1, 2, -1}, 256);
                                }),
                       {"offset 2", "id -1", "256"}));
  write_tokens(directory_ / "b.h5", {0, 1}, 2, 4);
  const TokenFile file(directory_ / "b.h5");
  EXPECT_TRUE(contains(error_of(ErrorKind::kData,
                                [&] {
                                  file.check_range(0, std::vector<std::int32_t>{0, -1}, 2);
                                }),
                       {"offset 1", "id 4294967295"}));
}

// Case D03: a token file longer than 2^31 tokens, sparse so that it takes a few megabytes of disk.
TEST_F(TokenFileTest, TokensBeyondTwoToThe31AreExact) {
  ForeignFile foreign;
  foreign.tokens = 3'000'000'000;
  foreign.chunk = 1 << 20;
  foreign.type = H5T_STD_U32LE;
  foreign.vocabulary = 2'000'000'000;
  foreign.filled_from = 3'000'000'000 - 500'000;
  foreign.offsets = {0, 2'900'000'000, 3'000'000'000};
  const std::string path = directory_ / "big.h5";
  foreign.write(path);
  ASSERT_LT(std::filesystem::file_size(path), std::uintmax_t{16} << 20);

  const TokenFile file(path);
  EXPECT_EQ(file.info().tokens, 3'000'000'000);
  std::vector<std::int32_t> tokens(1025, -1);
  file.read(std::int64_t{2'200'000} * 1024, tokens);
  EXPECT_EQ(std::accumulate(tokens.begin(), tokens.end(), std::int64_t{0}), 0);
  const std::int64_t begin = 3'000'000'000 - 500'000 - 10;
  file.read(begin, tokens);
  for (std::size_t i = 0; i < tokens.size(); ++i)
    ASSERT_EQ(tokens[i],
              i < 10 ? 0 : static_cast<std::int32_t>((begin + static_cast<std::int64_t>(i)) % 2'000'000'000));
  file.read(3'000'000'000 - 1025, tokens);
  EXPECT_EQ(tokens.back(), 999'999'999);
}

TEST_F(TokenFileTest, ChunksOfAnySizeReadLikeOneContiguousArray) {
  for (const std::int64_t chunk : {1, 3, 7, 999, 1000}) {
    ForeignFile foreign;
    foreign.tokens = 1000;
    foreign.offsets = {0, 1000};
    foreign.chunk = chunk;
    foreign.write(directory_ / "a.h5");
    std::vector<std::int32_t> expected(1000);
    std::iota(expected.begin(), expected.end(), 0);
    EXPECT_EQ(all_tokens(TokenFile(directory_ / "a.h5")), expected);
  }
}

TEST_F(TokenFileTest, CompressedTokensAreRefusedWithTheRemedy) {
  ForeignFile foreign;
  foreign.chunk = 5;
  foreign.deflate = 1;
  foreign.write(directory_ / "a.h5");
  EXPECT_TRUE(contains(open_error(directory_ / "a.h5"), {"compressed", "h5repack"}));
}

// Case D07: a shortened file is refused with the file's name, the actual and the expected size.
TEST_F(TokenFileTest, TruncatedFileIsRefusedWithBothSizes) {
  const std::string path = directory_ / "a.h5";
  write_tokens(path, random_tokens(random_, 100'000, 50'000), 50'000);
  const auto size = std::filesystem::file_size(path);
  for (const auto kept : {size - 1, size / 2}) {
    std::filesystem::resize_file(path, kept);
    EXPECT_TRUE(contains(open_error(path), {path, "truncated", std::to_string(kept), std::to_string(size)}));
  }
  std::filesystem::resize_file(path, 0);
  EXPECT_TRUE(contains(open_error(path), {path, "0 bytes"}));
  std::filesystem::remove(path);
  EXPECT_TRUE(contains(open_error(path), {path, "No such file"}));
  EXPECT_TRUE(contains(open_error(directory_.path().string()), {"not a regular file"}));
}

// Case D07: a preparer that stops half way leaves nothing under the name that a run would open.
TEST_F(TokenFileTest, UnfinishedWriterLeavesNothingBehind) {
  const std::string path = directory_ / "a.h5";
  {
    TokenFileInfo info;
    info.vocabulary = 256;
    info.has_mask = true;
    TokenFileWriter writer(path, info);
    writer.add_document(random_tokens(random_, 100'000, 256));
    EXPECT_FALSE(std::filesystem::exists(path));
  }
  EXPECT_TRUE(std::filesystem::is_empty(directory_.path()));
  write_tokens(path, {1, 2}, 256);
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(directory_.path()), {}), 1);
}

TEST_F(TokenFileTest, MissingCompletionFlagIsRefused) {
  ForeignFile foreign;
  foreign.complete = 0;
  foreign.write(directory_ / "a.h5");
  EXPECT_TRUE(contains(open_error(directory_ / "a.h5"), {"a.h5", "incomplete"}));
}

TEST_F(TokenFileTest, OtherVersionIsRefusedWithBothNumbers) {
  ForeignFile foreign;
  foreign.version = 2;
  foreign.write(directory_ / "a.h5");
  EXPECT_TRUE(contains(open_error(directory_ / "a.h5"), {"version 2", "version 1"}));
}

// Case D07: offsets that disagree with the tokens.
TEST_F(TokenFileTest, OffsetsMustRiseFromZeroToTheTokenCount) {
  const std::vector<std::pair<std::vector<std::uint64_t>, const char*>> wrong = {
      {{0, 4, 9}, "ends at 9, expected the token count 10"},
      {{0, 4, 11}, "ends at 11"},
      {{1, 4, 10}, "begins at 1"},
      {{0, 7, 4, 10}, "falls from 7 to 4 at document 1"}};
  for (const auto& [offsets, message] : wrong) {
    ForeignFile foreign;
    foreign.offsets = offsets;
    foreign.write(directory_ / "a.h5");
    EXPECT_TRUE(contains(open_error(directory_ / "a.h5"), {"a.h5", message}));
  }
}

// Case D07: a flipped byte changes the hash.
TEST_F(TokenFileTest, FlippedByteChangesTheHash) {
  const std::string path = directory_ / "a.h5";
  const auto tokens = random_tokens(random_, 10'000, 256);
  write_tokens(path, tokens, 256, 4);
  const std::string before = TokenFile(path).hash();
  overwrite_token(path, 5000, tokens[5000] ^ 1u);
  const TokenFile damaged(path);
  EXPECT_NE(damaged.hash(), before);
  EXPECT_EQ(damaged.info().tokens_hash, before);
}

TEST_F(TokenFileTest, EmptyFileHasNoTokensAndOpens) {
  TokenFileInfo info;
  info.vocabulary = 256;
  TokenFileWriter writer(directory_ / "a.h5", info);
  writer.finish();
  const TokenFile file(directory_ / "a.h5");
  EXPECT_EQ(file.info().tokens, 0);
  EXPECT_EQ(file.info().documents, 0);
  EXPECT_EQ(file.hash(), file.info().tokens_hash);
}

// Case D10: file systems without locks, or with a lock left behind, must not stop a reader.
TEST_F(TokenFileTest, LocksOnTheFileDoNotMatter) {
  write_tokens(directory_ / "a.h5", {1, 2}, 256);
  const int descriptor = open((directory_ / "a.h5").c_str(), O_RDONLY);
  ASSERT_EQ(flock(descriptor, LOCK_EX | LOCK_NB), 0);
  EXPECT_EQ(TokenFile(directory_ / "a.h5").info().tokens, 2);
  close(descriptor);
}

TEST_F(TokenFileTest, UnwritableTargetIsNamed) {
  EXPECT_TRUE(
      contains(error_of(ErrorKind::kData, [&] { write_tokens(directory_ / "missing/a.h5", {1}, 256); }),
               {"missing/a.h5", "No such file"}));
}

}  // namespace
}  // namespace octet
