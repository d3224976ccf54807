#include "octet/checkpoint/checkpoint.h"

#include <gtest/gtest.h>
#include <hdf5.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <fstream>
#include <random>
#include <sstream>
#include <thread>

#include "octet/base/error.h"
#include "support/seed.h"

namespace octet {
namespace {

using Path = std::filesystem::path;

/// The checkpoint functions are collective; these tests use MPI_COMM_SELF.
class MpiEnvironment : public testing::Environment {
 public:
  void SetUp() override {
    int initialized = 0;
    MPI_Initialized(&initialized);
    if (initialized) return;
    MPI_Init(nullptr, nullptr);
    owner_ = true;
  }
  void TearDown() override {
    if (owner_) MPI_Finalize();
  }

 private:
  bool owner_ = false;
};
[[maybe_unused]] testing::Environment* const environment =
    testing::AddGlobalTestEnvironment(new MpiEnvironment);

std::uint32_t random_bits() {
  static std::mt19937 source{test::test_seed()};
  return static_cast<std::uint32_t>(source());
}

/// Any bit pattern: NaNs, infinities, denormals and negative zeros included.
std::vector<float> random_floats(std::int64_t count) {
  std::vector<float> values(count);
  for (float& value : values) {
    const std::uint32_t bits = random_bits();
    std::memcpy(&value, &bits, sizeof value);
  }
  return values;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

std::string read(const Path& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

void write(const Path& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

/// Flips the bits of `mask` in one byte, in place.
void flip(const Path& path, std::size_t byte, int mask) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(static_cast<std::streamoff>(byte));
  const char flipped = static_cast<char>(file.get() ^ mask);
  file.seekp(static_cast<std::streamoff>(byte));
  file.put(flipped);
}

void flip_bit(const Path& path, std::size_t byte) {
  flip(path, byte, 1 << (random_bits() % 8));
}

std::string replaced(std::string text, const std::string& from, const std::string& to) {
  const std::size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return text.replace(at, from.size(), to);
}

/// The message of the checkpoint error that `work` throws; empty when it throws none.
template <typename Work>
std::string error_of(Work work) {
  try {
    work();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kCheckpoint);
    return error.what();
  }
  return "";
}

#define EXPECT_CONTAINS(text, part) EXPECT_NE((text).find(part), std::string::npos) << "text: " << (text)

class CheckpointTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string name = testing::TempDir() + "octet-checkpoint-XXXXXX";
    ASSERT_NE(::mkdtemp(name.data()), nullptr);
    directory_ = name;
  }
  void TearDown() override { std::filesystem::remove_all(directory_); }

  Path step_path(int step) const { return directory_ / fmt::format("step-{:08}", step); }

  CheckpointState state_at(std::int64_t step) const {
    CheckpointState state;
    state.step = step;
    state.samples = step * 8;
    state.tokens = (std::int64_t{1} << 40) + step;
    state.updates = step - 1;
    state.layout = "data 4 × tensor 2, ZeRO 1";
    state.program = "octet 0.1.0";
    state.train_hash = "0123456789abcdef";
    state.deck = {{"run.steps", "100"}, {"batch.global", "8"}, {"data.train", "a \"quoted\" path"}};
    return state;
  }

  /// A weight in two boxes and a moment in one; the weight is large enough to be aligned.
  std::vector<SavedBox> boxes() {
    return {{"parameters/w.weight", 200, 300, {0, 0, 200, 100}, left_.data()},
            {"parameters/w.weight", 200, 300, {0, 100, 200, 200}, right_.data()},
            {"optimizer/m/w.norm", 1, 77, {0, 0, 1, 77}, moment_.data()}};
  }
  void save(std::int64_t step, std::int64_t keep = 0) {
    save_checkpoint(directory_, state_at(step), boxes(), keep, MPI_COMM_SELF);
  }
  void load(const CheckpointInfo& info) {
    std::vector<float> weight(200 * 300), moment(77);
    load_checkpoint(info,
                    {{"parameters/w.weight", 200, 300, {0, 0, 200, 300}, weight.data()},
                     {"optimizer/m/w.norm", 1, 77, {0, 0, 1, 77}, moment.data()}},
                    MPI_COMM_SELF);
    EXPECT_TRUE(same_bits(weight, whole_weight()));
    EXPECT_TRUE(same_bits(moment, moment_));
  }
  std::vector<float> whole_weight() const {
    std::vector<float> whole;
    for (int row = 0; row < 200; ++row) {
      whole.insert(whole.end(), left_.begin() + row * 100, left_.begin() + (row + 1) * 100);
      whole.insert(whole.end(), right_.begin() + row * 200, right_.begin() + (row + 1) * 200);
    }
    return whole;
  }
  std::vector<std::string> names() const {
    std::vector<std::string> result;
    for (const auto& entry : std::filesystem::directory_iterator(directory_))
      result.push_back(entry.path().filename().string());
    std::sort(result.begin(), result.end());
    return result;
  }

  Path directory_;
  const std::string shard_ = "shard-00000-of-00001.h5";
  std::vector<float> left_ = random_floats(200 * 100), right_ = random_floats(200 * 200),
                     moment_ = random_floats(77);
};

TEST_F(CheckpointTest, RoundTripIsBitExactWithState) {
  save(7);
  const CheckpointInfo info = open_checkpoint(step_path(7));
  load(info);
  const CheckpointState expected = state_at(7);
  EXPECT_EQ(info.state.step, 7);
  EXPECT_EQ(info.state.samples, expected.samples);
  EXPECT_EQ(info.state.tokens, expected.tokens);
  EXPECT_EQ(info.state.updates, expected.updates);
  EXPECT_EQ(info.state.layout, expected.layout);
  EXPECT_EQ(info.state.program, expected.program);
  EXPECT_EQ(info.state.train_hash, expected.train_hash);
  EXPECT_EQ(info.state.deck, expected.deck);
  EXPECT_EQ(info.tensors.at("parameters/w.weight").rows, 200);
  EXPECT_TRUE(verify_checkpoint(info).empty());
  EXPECT_EQ(read(directory_ / "latest"), "step-00000007\n");
}

TEST_F(CheckpointTest, PathInDeckThatIsNotUtf8DoesNotStopTheSave) {
  CheckpointState state = state_at(1);
  state.deck.emplace_back("data.validation", "caf\xe9.h5");
  save_checkpoint(directory_, state, boxes(), 0, MPI_COMM_SELF);
  load(open_checkpoint(step_path(1)));
}

TEST_F(CheckpointTest, Hdf5ReadsShardsAndIndexAfterTheDirectoryMoved) {
  save(1);
  const Path moved = directory_ / "elsewhere";
  std::filesystem::rename(step_path(1), moved);
  const auto read_dataset = [&](const std::string& file_name, const char* name, std::int64_t count) {
    std::vector<float> values(count);
    const hid_t file = H5Fopen((moved / file_name).c_str(), H5F_ACC_RDONLY, H5P_DEFAULT);
    const hid_t dataset = H5Dopen2(file, name, H5P_DEFAULT);
    EXPECT_GE(H5Dread(dataset, H5T_IEEE_F32LE, H5S_ALL, H5S_ALL, H5P_DEFAULT, values.data()), 0) << name;
    H5Dclose(dataset);
    H5Fclose(file);
    return values;
  };
  EXPECT_TRUE(same_bits(read_dataset(shard_, "/parameters/w.weight/box_1", 200 * 200), right_));
  EXPECT_TRUE(same_bits(read_dataset(shard_, "/optimizer/m/w.norm/box_0", 77), moment_));
  EXPECT_TRUE(same_bits(read_dataset("index.h5", "/parameters/w.weight", 200 * 300), whole_weight()));
  std::filesystem::remove(moved / shard_);
  for (const float value : read_dataset("index.h5", "/optimizer/m/w.norm", 77))
    EXPECT_TRUE(std::isnan(value));
}

TEST_F(CheckpointTest, LargeDatasetsStartAtMultiplesOf64KiB) {
  save(1);
  const hid_t file = H5Fopen((step_path(1) / shard_).c_str(), H5F_ACC_RDONLY, H5P_DEFAULT);
  for (const char* name : {"/parameters/w.weight/box_0", "/parameters/w.weight/box_1"}) {
    const hid_t dataset = H5Dopen2(file, name, H5P_DEFAULT);
    EXPECT_EQ(H5Dget_offset(dataset) % 65536, 0u) << name;
    H5Dclose(dataset);
  }
  H5Fclose(file);
  EXPECT_LT(std::filesystem::file_size(step_path(1) / shard_), 240000u + 3 * 65536u);
}

TEST_F(CheckpointTest, FlippedBitInWeightOrMomentIsFound) {
  for (const std::vector<float>* values : {&left_, &moment_}) {
    save(1);
    const CheckpointInfo info = open_checkpoint(step_path(1));
    const std::string needle(reinterpret_cast<const char*>(values->data()), 64);
    const std::size_t at = read(step_path(1) / shard_).find(needle);
    ASSERT_NE(at, std::string::npos);
    flip_bit(step_path(1) / shard_, at + random_bits() % 64);
    const std::string message = error_of([&] { load(info); });
    EXPECT_CONTAINS(message, shard_ + " is damaged");
    EXPECT_CONTAINS(message, info.files[0].xxh3_128);
    ASSERT_EQ(verify_checkpoint(info).size(), 1u);
    EXPECT_CONTAINS(verify_checkpoint(info)[0], shard_);
  }
}

TEST_F(CheckpointTest, FlippedBitAnywhereInManifestIsFound) {
  save(1);
  const Path manifest = step_path(1) / "manifest.json";
  const std::string good = read(manifest);
  for (std::size_t byte = 0; byte + 1 < good.size(); ++byte) {
    const int mask = 1 << (random_bits() % 8);
    flip(manifest, byte, mask);
    EXPECT_CONTAINS(error_of([&] { open_checkpoint(step_path(1)); }), "manifest");
    if (HasFailure()) FAIL() << "byte " << byte << " of\n" << read(manifest);
    flip(manifest, byte, mask);
  }
}

TEST_F(CheckpointTest, FlippedBitInIndexIsFoundByVerifyAndDoesNotStopLoading) {
  save(1);
  flip_bit(step_path(1) / "index.h5", random_bits() % std::filesystem::file_size(step_path(1) / "index.h5"));
  const CheckpointInfo info = open_checkpoint(step_path(1));
  ASSERT_EQ(verify_checkpoint(info).size(), 1u);
  EXPECT_CONTAINS(verify_checkpoint(info)[0], "index.h5 is damaged");
  load(info);
}

TEST_F(CheckpointTest, ShardCutByOneByteNamesBothSizes) {
  save(1);
  const Path shard = step_path(1) / shard_;
  const auto bytes = std::filesystem::file_size(shard);
  const CheckpointInfo info = open_checkpoint(step_path(1));
  std::filesystem::resize_file(shard, bytes - 1);
  EXPECT_CONTAINS(error_of([&] { open_checkpoint(step_path(1)); }),
                  fmt::format("{} has {} bytes, the manifest says {}", shard.string(), bytes - 1, bytes));
  EXPECT_CONTAINS(error_of([&] { load(info); }), "is damaged");
}

TEST_F(CheckpointTest, MissingShardIsNamed) {
  save(1);
  std::filesystem::remove(step_path(1) / shard_);
  EXPECT_CONTAINS(error_of([&] { open_checkpoint(step_path(1)); }), shard_ + " is missing");
}

TEST_F(CheckpointTest, ShardOfAnotherCheckpointIsForeign) {
  save(1);
  save(2);
  std::filesystem::copy_file(step_path(1) / shard_, step_path(2) / shard_,
                             std::filesystem::copy_options::overwrite_existing);
  const std::string other = open_checkpoint(step_path(1)).identity;
  EXPECT_CONTAINS(error_of([&] { load(open_checkpoint(step_path(2))); }), "of checkpoint " + other);
}

TEST_F(CheckpointTest, NewerFormatAsksForAnUpgradeAndUnknownFormatsAreRefused) {
  save(1);
  const Path manifest = step_path(1) / "manifest.json";
  const std::string good = read(manifest);
  const auto message_for = [&](const std::string& version) {
    write(manifest, replaced(good, "\"version\": 1", "\"version\": " + version));
    return error_of([&] { open_checkpoint(step_path(1)); });
  };
  EXPECT_CONTAINS(message_for("2"),
                  "written by a newer octet (format 2, this program reads up to 1): upgrade");
  for (const char* version : {"0", "-1", "\"1\"", "1.5", "null", "true"})
    EXPECT_CONTAINS(message_for(version), fmt::format("format version {} is unknown", version));
}

TEST_F(CheckpointTest, MissingPathNamesTheNearestCheckpoints) {
  for (const int step : {10, 20, 30, 40, 50, 60, 70}) save(step);
  const std::string message = error_of([&] { open_checkpoint(step_path(999)); });
  EXPECT_CONTAINS(message, "step-00000999 does not exist");
  EXPECT_CONTAINS(message, "holds step-00000070, step-00000060, step-00000050, step-00000040, step-00000030");
  EXPECT_CONTAINS(error_of([&] { open_checkpoint(step_path(21)); }), "holds step-00000020, step-00000030");
  EXPECT_CONTAINS(error_of([&] { open_checkpoint(directory_ / "no" / "such"); }), "nor does");
}

TEST_F(CheckpointTest, DirectoryWithoutManifestIsIncompleteAndNamesCheckpointsBelow) {
  save(10);
  const std::string message = error_of([&] { open_checkpoint(directory_); });
  EXPECT_CONTAINS(message, "is not a complete checkpoint (no manifest.json)");
  EXPECT_CONTAINS(message, "step-00000010");
}

TEST_F(CheckpointTest, NewestSkipsIncompleteOnesAndSaysWhy) {
  EXPECT_FALSE(newest_checkpoint(directory_ / "absent", nullptr).has_value());
  EXPECT_FALSE(newest_checkpoint(directory_, nullptr).has_value());
  for (const int step : {10, 20, 30, 40}) save(step);
  std::filesystem::rename(step_path(40), directory_ / "step-00000040.tmp-0badcafe");
  std::filesystem::remove(step_path(30) / "manifest.json");
  std::filesystem::resize_file(step_path(20) / shard_, 100);
  ASSERT_EQ(read(directory_ / "latest"), "step-00000040\n");
  std::vector<std::string> skipped;
  const auto newest = newest_checkpoint(directory_, &skipped);
  ASSERT_TRUE(newest.has_value());
  EXPECT_EQ(newest->path, step_path(10));
  ASSERT_EQ(skipped.size(), 3u);
  EXPECT_CONTAINS(skipped[0], "step-00000040.tmp-0badcafe is left from an interrupted save");
  EXPECT_CONTAINS(skipped[1], "step-00000030 is not a complete checkpoint (no manifest.json)");
  EXPECT_CONTAINS(skipped[2], "has 100 bytes");
}

TEST_F(CheckpointTest, NewestComparesStepsAsNumbers) {
  save(99'999'999);
  save(100'000'000);
  EXPECT_EQ(newest_checkpoint(directory_, nullptr)->state.step, 100'000'000);
}

TEST_F(CheckpointTest, RetentionKeepsTheNewestCompleteOnesAndTheOneJustWritten) {
  for (const int step : {10, 20, 30, 40}) save(step);
  std::filesystem::remove(step_path(40) / "manifest.json");
  save(50, 2);
  EXPECT_EQ(names(), (std::vector<std::string>{"latest", "step-00000030", "step-00000040", "step-00000050"}));
  save(5, 1);
  EXPECT_EQ(names(), (std::vector<std::string>{"latest", "step-00000005", "step-00000040", "step-00000050"}));
  EXPECT_EQ(read(directory_ / "latest"), "step-00000005\n");
}

TEST_F(CheckpointTest, SavingAStepAgainReplacesIt) {
  save(10);
  const std::string first = open_checkpoint(step_path(10)).identity;
  moment_ = random_floats(77);
  save(10);
  const CheckpointInfo info = open_checkpoint(step_path(10));
  EXPECT_NE(info.identity, first);
  load(info);
  EXPECT_EQ(names(), (std::vector<std::string>{"latest", "step-00000010"}));
}

TEST_F(CheckpointTest, LeftoverOfAnInterruptedSaveDoesNotBlockTheSameStep) {
  std::filesystem::create_directories(directory_ / "step-00000010.tmp-0badcafe");
  write(directory_ / "step-00000010.tmp-0badcafe" / shard_, "half");
  std::filesystem::create_directories(step_path(10));
  write(step_path(10) / shard_, "half");
  save(10);
  load(open_checkpoint(step_path(10)));
  EXPECT_EQ(names(), (std::vector<std::string>{"latest", "step-00000010"}));
}

TEST_F(CheckpointTest, KilledAtAnyMomentTheNewestCheckpointIsSound) {
  save(1);
  std::int64_t step = 1;
  for (int round = 0; round < 12; ++round) {
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      while (true) save(++step, 2);
    }
    std::this_thread::sleep_for(std::chrono::microseconds(random_bits() % 60'000));
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
    const auto newest = newest_checkpoint(directory_, nullptr);
    ASSERT_TRUE(newest.has_value());
    EXPECT_GE(newest->state.step, step);
    step = newest->state.step;
    EXPECT_TRUE(verify_checkpoint(*newest).empty());
    load(*newest);
  }
}

TEST_F(CheckpointTest, DirectoryThatCannotBeMadeIsNamed) {
  write(directory_ / "file", "");
  const Path below = directory_ / "file" / "checkpoints";
  const std::string message =
      error_of([&] { save_checkpoint(below, state_at(1), boxes(), 0, MPI_COMM_SELF); });
  EXPECT_CONTAINS(message, below.string());
  EXPECT_CONTAINS(message, "Not a directory");
}

/// RLIMIT_FSIZE makes writes beyond it fail as a full disk does.
TEST_F(CheckpointTest, FailedWriteLeavesOlderCheckpointsAndNothingElse) {
  save(10);
  struct rlimit before {};
  getrlimit(RLIMIT_FSIZE, &before);
  auto* const handler = ::signal(SIGXFSZ, SIG_IGN);
  for (const rlim_t limit : {rlim_t{1000}, rlim_t{100'000}}) {
    struct rlimit tight = before;
    tight.rlim_cur = limit;
    setrlimit(RLIMIT_FSIZE, &tight);
    const std::string message = error_of([&] { save(20, 1); });
    setrlimit(RLIMIT_FSIZE, &before);
    EXPECT_CONTAINS(message, shard_);
    EXPECT_CONTAINS(message, "File too large");
    EXPECT_EQ(names(), (std::vector<std::string>{"latest", "step-00000010"}));
  }
  ::signal(SIGXFSZ, handler);
  load(*newest_checkpoint(directory_, nullptr));
  save(20, 1);
  load(open_checkpoint(step_path(20)));
}

TEST_F(CheckpointTest, BoxesMustCoverEveryTensorOnce) {
  const auto save_boxes = [&](std::vector<SavedBox> some) {
    return error_of([&] { save_checkpoint(directory_, state_at(1), some, 0, MPI_COMM_SELF); });
  };
  std::vector<SavedBox> gap = boxes();
  gap[1].box.rows = 199;
  EXPECT_CONTAINS(save_boxes(gap),
                  "boxes of tensor parameters/w.weight hold 59800 elements, its shape [200, 300]");
  std::vector<SavedBox> twice = boxes();
  twice[1].box.col = 99;
  EXPECT_CONTAINS(save_boxes(twice), "elements in two boxes, from offset [0, 99], extent [200, 1]");
  std::vector<SavedBox> outside = boxes();
  outside[1].box.row = 1;
  EXPECT_CONTAINS(save_boxes(outside), "outside it");
  std::vector<SavedBox> other_shape = boxes();
  other_shape[1].global_rows = 201;
  EXPECT_CONTAINS(save_boxes(other_shape), "[201, 300]");
  EXPECT_TRUE(names().empty());
}

TEST_F(CheckpointTest, WantedTensorsMustExistInTheirShape) {
  save(1);
  const CheckpointInfo info = open_checkpoint(step_path(1));
  std::vector<float> room(200 * 301);
  std::vector<SavedBox> wanted = {{"parameters/w.weight", 200, 301, {0, 0, 200, 301}, room.data()}};
  for (int i = 0; i < 6; ++i)
    wanted.push_back({fmt::format("parameters/x{}", i), 2, 3, {0, 0, 2, 3}, room.data()});
  const std::string message = error_of([&] { load_checkpoint(info, wanted, MPI_COMM_SELF); });
  EXPECT_CONTAINS(message, "parameters/w.weight has shape [200, 300], wanted [200, 301]");
  EXPECT_CONTAINS(message, "parameters/x0 is missing, wanted [2, 3]");
  EXPECT_CONTAINS(message, "and 2 more");
}

TEST_F(CheckpointTest, EveryPartOfAMatrixCanBeReadByItself) {
  // Rows of 100 KiB: pieces both above and below the size from which they are read one by one.
  const std::int64_t rows = 20, cols = 25'600;
  std::vector<float> whole = random_floats(rows * cols);
  save_checkpoint(directory_, state_at(1), {{"wide", rows, cols, {0, 0, rows, cols}, whole.data()}}, 0,
                  MPI_COMM_SELF);
  const CheckpointInfo info = open_checkpoint(step_path(1));
  for (int round = 0; round < 30; ++round) {
    Box box;
    box.row = random_bits() % rows;
    box.rows = 1 + random_bits() % (rows - box.row);
    box.col = random_bits() % cols;
    box.cols = round % 5 == 0 ? cols - box.col : 1 + random_bits() % (cols - box.col);
    if (round % 7 == 0) box = {box.row, 0, box.rows, cols};
    std::vector<float> part(box.size()), expected;
    load_checkpoint(info, {{"wide", rows, cols, box, part.data()}}, MPI_COMM_SELF);
    for (std::int64_t row = box.row; row < box.row + box.rows; ++row)
      expected.insert(expected.end(), whole.begin() + row * cols + box.col,
                      whole.begin() + row * cols + box.col + box.cols);
    EXPECT_TRUE(same_bits(part, expected));
  }
}

}  // namespace
}  // namespace octet
