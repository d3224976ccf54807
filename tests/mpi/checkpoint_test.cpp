#include "octet/checkpoint/checkpoint.h"

#include <gtest/gtest.h>
#include <mpi.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/resource.h>

#include <cstring>
#include <fstream>
#include <functional>
#include <random>

#include "octet/base/error.h"
#include "octet/base/rng.h"
#include "support/seed.h"

namespace octet {
namespace {

using Path = std::filesystem::path;

struct Tensor2 {
  const char* name;
  std::int64_t rows, cols;
};
/// Odd sizes, a vector, fewer rows than ranks, and rows long enough for pieces to be read one by one.
constexpr Tensor2 kTensors[] = {{"parameters/a.weight", 37, 53},
                                {"optimizer/m/a.norm", 1, 101},
                                {"parameters/few", 3, 1000},
                                {"optimizer/v/wide", 9, 40'000}};

/// The parts of a matrix that belong to one rank of a layout.
using Layout = std::function<std::vector<Box>(std::int64_t rows, std::int64_t cols, int rank, int count)>;

std::vector<Box> by_rows(std::int64_t rows, std::int64_t cols, int rank, int count) {
  const std::int64_t begin = rows * rank / count, end = rows * (rank + 1) / count;
  return {{begin, 0, end - begin, cols}};
}
std::vector<Box> by_columns(std::int64_t rows, std::int64_t cols, int rank, int count) {
  const std::int64_t begin = cols * rank / count, end = cols * (rank + 1) / count;
  return {{0, begin, rows, end - begin}};
}
std::vector<Box> by_flat_slices(std::int64_t rows, std::int64_t cols, int rank, int count) {
  std::vector<Box> boxes;
  for (const FlatBox& part :
       boxes_of_range({0, 0, rows, cols}, rows * cols * rank / count, rows * cols * (rank + 1) / count))
    boxes.push_back(part.box);
  return boxes;
}
std::vector<Box> on_last_rank(std::int64_t rows, std::int64_t cols, int rank, int count) {
  if (rank != count - 1) return {};
  return {{0, 0, rows, cols}};
}

struct Held {
  std::vector<std::vector<float>> memory;
  std::vector<SavedBox> boxes;
};

class CheckpointRanks : public testing::Test {
 protected:
  void SetUp() override {
    MPI_Comm_dup(MPI_COMM_WORLD, &ranks_);
    MPI_Comm_rank(ranks_, &rank_);
    MPI_Comm_size(ranks_, &count_);
    char name[256] = {};
    if (rank_ == 0) {
      std::snprintf(name, sizeof name, "%soctet-checkpoint-XXXXXX", testing::TempDir().c_str());
      ASSERT_NE(::mkdtemp(name), nullptr);
      seed_ = test::test_seed();
    }
    MPI_Bcast(name, sizeof name, MPI_CHAR, 0, ranks_);
    MPI_Bcast(&seed_, 1, MPI_UINT64_T, 0, ranks_);
    directory_ = name;
  }
  void TearDown() override {
    MPI_Barrier(ranks_);
    if (rank_ == 0) std::filesystem::remove_all(directory_);
    MPI_Comm_free(&ranks_);
  }

  float value(const char* name, std::int64_t element) const {
    return normal_at(key_of(seed_, name), static_cast<std::uint64_t>(element));
  }

  /// This rank's boxes of all tensors, filled with their values or with zeros.
  Held hold(const Layout& layout, bool filled) const {
    Held held;
    for (const auto& [name, rows, cols] : kTensors)
      for (const Box& box : layout(rows, cols, rank_, count_)) {
        std::vector<float> values(box.size());
        for (std::int64_t i = 0; filled && i < box.size(); ++i)
          values[i] = value(name, (box.row + i / box.cols) * cols + box.col + i % box.cols);
        held.memory.push_back(std::move(values));
        held.boxes.push_back({name, rows, cols, box, held.memory.back().data()});
      }
    return held;
  }
  void save(std::int64_t step, const Layout& layout = by_rows) const {
    CheckpointState state;
    state.step = step;
    save_checkpoint(directory_, state, hold(layout, true).boxes, 0, ranks_);
  }
  Path step_path(int step) const { return directory_ / fmt::format("step-{:08}", step); }
  std::string shard(int number) const { return fmt::format("shard-{:05}-of-{:05}.h5", number, count_); }

  void on_root(const std::function<void()>& work) const {
    MPI_Barrier(ranks_);
    if (rank_ == 0) work();
    MPI_Barrier(ranks_);
  }
  /// The message of the error that `work` throws on this rank, checked to be that of every rank.
  std::string common_error(const std::function<void()>& work) const {
    char message[4096] = {}, first[4096] = {};
    try {
      work();
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kCheckpoint);
      std::strncpy(message, error.what(), sizeof message - 1);
    }
    std::memcpy(first, message, sizeof first);
    MPI_Bcast(first, sizeof first, MPI_CHAR, 0, ranks_);
    EXPECT_STREQ(message, first);
    return message;
  }
  std::size_t entries() const {
    const std::filesystem::directory_iterator all(directory_);
    return std::distance(begin(all), end(all));
  }

  MPI_Comm ranks_ = MPI_COMM_NULL;
  int rank_ = 0, count_ = 1;
  std::uint64_t seed_ = 0;
  Path directory_;
};

TEST_F(CheckpointRanks, AnyLayoutReadsWhatAnyLayoutWrote) {
  const std::pair<const char*, Layout> layouts[] = {{"rows", by_rows},
                                                    {"columns", by_columns},
                                                    {"flat slices", by_flat_slices},
                                                    {"last rank", on_last_rank}};
  int step = 0;
  for (const auto& [writer, saved] : layouts) {
    save(++step, saved);
    const CheckpointInfo info = open_checkpoint(step_path(step));
    EXPECT_TRUE(verify_checkpoint(info).empty());
    for (const auto& [reader, wanted] : layouts) {
      Held loaded = hold(wanted, false);
      load_checkpoint(info, loaded.boxes, ranks_);
      EXPECT_EQ(loaded.memory, hold(wanted, true).memory)
          << "saved by " << writer << ", loaded by " << reader;
    }
  }
}

TEST_F(CheckpointRanks, EveryRankMayReadTheSameBoxes) {
  save(1, by_columns);
  const auto everything = [](std::int64_t rows, std::int64_t cols, int, int) {
    return std::vector<Box>{{0, 0, rows, cols}};
  };
  Held loaded = hold(everything, false);
  load_checkpoint(open_checkpoint(step_path(1)), loaded.boxes, ranks_);
  EXPECT_EQ(loaded.memory, hold(everything, true).memory);
}

TEST_F(CheckpointRanks, FewerRanksReadWhatMoreWrote) {
  save(1, by_flat_slices);
  if (rank_ == 0) {
    std::vector<float> wide(9 * 40'000);
    load_checkpoint(open_checkpoint(step_path(1)),
                    {{"optimizer/v/wide", 9, 40'000, {0, 0, 9, 40'000}, wide.data()}}, MPI_COMM_SELF);
    for (std::int64_t i = 0; i < 9 * 40'000; ++i) ASSERT_EQ(wide[i], value("optimizer/v/wide", i)) << i;
  }
}

TEST_F(CheckpointRanks, WrongBoxesOnOneRankFailOnAllRanks) {
  save(1);
  const std::string message = common_error([&] {
    Held held = hold(by_rows, true);
    if (rank_ == count_ - 1) held.boxes.back().box.row -= 1;
    CheckpointState state;
    state.step = 2;
    save_checkpoint(directory_, state, held.boxes, 0, ranks_);
  });
  EXPECT_NE(message.find("optimizer/v/wide"), std::string::npos) << message;
  on_root([&] { EXPECT_EQ(entries(), 2u) << "step-00000001 and latest"; });
}

/// RLIMIT_FSIZE makes writes beyond it fail as a full disk does.
TEST_F(CheckpointRanks, FullDiskOnOneRankFailsOnAllRanksAndLeavesOlderCheckpoints) {
  save(1);
  struct rlimit before {};
  getrlimit(RLIMIT_FSIZE, &before);
  auto* const handler = ::signal(SIGXFSZ, SIG_IGN);
  struct rlimit tight = before;
  if (rank_ == count_ - 1) tight.rlim_cur = 20'000;
  setrlimit(RLIMIT_FSIZE, &tight);
  const std::string message = common_error([&] { save(2); });
  setrlimit(RLIMIT_FSIZE, &before);
  ::signal(SIGXFSZ, handler);
  EXPECT_NE(message.find(shard(count_ - 1)), std::string::npos) << message;
  EXPECT_NE(message.find("File too large"), std::string::npos) << message;
  on_root([&] { EXPECT_EQ(entries(), 2u) << "step-00000001 and latest"; });
  Held loaded = hold(by_rows, false);
  load_checkpoint(*newest_checkpoint(directory_, nullptr), loaded.boxes, ranks_);
  EXPECT_EQ(loaded.memory, hold(by_rows, true).memory);
}

TEST_F(CheckpointRanks, DirectoryThatCannotBeMadeFailsOnAllRanks) {
  on_root([&] { std::ofstream(directory_ / "file") << ""; });
  const std::string message = common_error([&] {
    save_checkpoint(directory_ / "file" / "checkpoints", {}, hold(by_rows, true).boxes, 0, ranks_);
  });
  EXPECT_NE(message.find("Not a directory"), std::string::npos) << message;
}

TEST_F(CheckpointRanks, DamagedShardFailsOnAllRanks) {
  save(1);
  const CheckpointInfo info = open_checkpoint(step_path(1));
  on_root([&] {
    const Path path = step_path(1) / shard(count_ - 1);
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    const auto at = static_cast<std::streamoff>(std::filesystem::file_size(path) - 100);
    file.seekg(at);
    const char flipped = static_cast<char>(file.get() ^ 16);
    file.seekp(at);
    file.put(flipped);
  });
  const std::string message =
      common_error([&] { load_checkpoint(info, hold(by_rows, false).boxes, ranks_); });
  EXPECT_NE(message.find(shard(count_ - 1) + " is damaged"), std::string::npos) << message;
}

TEST_F(CheckpointRanks, SwappedShardsAreCaughtByTheirLabels) {
  if (count_ < 2) GTEST_SKIP() << "needs two shards";
  save(1);
  const CheckpointInfo info = open_checkpoint(step_path(1));
  on_root([&] {
    std::filesystem::rename(step_path(1) / shard(0), step_path(1) / "other");
    std::filesystem::rename(step_path(1) / shard(1), step_path(1) / shard(0));
    std::filesystem::rename(step_path(1) / "other", step_path(1) / shard(1));
  });
  const std::string message =
      common_error([&] { load_checkpoint(info, hold(by_rows, false).boxes, ranks_); });
  EXPECT_NE(message.find(fmt::format("it says it is shard 1 of {}", count_)), std::string::npos) << message;
}

TEST_F(CheckpointRanks, MissingShardIsNamedOnAllRanks) {
  save(1);
  on_root([&] { std::filesystem::remove(step_path(1) / shard(count_ - 1)); });
  const std::string message = common_error([&] { open_checkpoint(step_path(1)); });
  EXPECT_NE(message.find(shard(count_ - 1) + " is missing"), std::string::npos) << message;
}

TEST_F(CheckpointRanks, RanksThatLoadDifferentCheckpointsAreRefused) {
  if (count_ < 2) GTEST_SKIP() << "needs two ranks";
  save(1);
  save(2);
  const std::string message = common_error([&] {
    load_checkpoint(open_checkpoint(step_path(rank_ == 1 ? 1 : 2)), hold(by_rows, false).boxes, ranks_);
  });
  EXPECT_NE(message.find("different checkpoints"), std::string::npos) << message;
}

}  // namespace
}  // namespace octet
