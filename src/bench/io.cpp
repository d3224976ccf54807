#include <algorithm>
#include <chrono>
#include <filesystem>
#include <optional>

#include "octet/base/rng.h"
#include "octet/bench/session.h"
#include "octet/checkpoint/checkpoint.h"
#include "octet/config/version.h"
#include "raw_file.h"
#include "token_reading.h"

namespace octet {

namespace {

namespace fs = std::filesystem;

constexpr int kRepetitions = 3;
constexpr std::int64_t kColumns = 1024;  ///< of the state's one matrix

/// The folder of the measurement, inside the run folder; gone with the object.
class Scratch {
 public:
  explicit Scratch(BenchSession& session)
      : world_(session.world), path_(fs::path(session.deck.run.directory) / "bench-io") {
    world_.together([&] {
      if (world_.rank() != 0) return;
      std::error_code error;
      fs::remove_all(path_, error);
      fs::create_directories(path_, error);
      if (error)
        fail(ErrorKind::kUsage, "run.directory: {} cannot be made: {}", path_.string(), error.message());
    });
  }
  ~Scratch() {
    if (world_.rank() != 0) return;
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  const fs::path& path() const { return path_; }

 private:
  const World& world_;
  fs::path path_;
};

class IoBench {
 public:
  IoBench(BenchSession& session, const fs::path& folder, PartResult& result)
      : session_(session), world_(session.world), folder_(folder), result_(result) {
    rows_ = std::max<std::int64_t>(1, session.limits.io_bytes / (kColumns * 4));
    state_.resize(static_cast<std::size_t>(rows_ * kColumns));
    for (std::size_t i = 0; i < state_.size(); ++i)
      state_[i] = static_cast<float>(mix(static_cast<std::uint64_t>(world_.rank()), i) >> 40);
    MPI_Comm_dup(world_.ranks(), &ranks_);
  }
  ~IoBench() {
    if (std::uncaught_exceptions() == 0) MPI_Comm_free(&ranks_);
  }
  IoBench(const IoBench&) = delete;
  IoBench& operator=(const IoBench&) = delete;

  void run() {
    std::vector<double> raw_write, write, raw_read, read;
    for (int i = 1; i <= kRepetitions; ++i) {
      const fs::path raw = folder_ / fmt::format("raw-{}", world_.rank());
      raw_write.push_back(seconds([&] { world_.together([&] { write_raw(raw, state_.data(), bytes()); }); }));
      raw_read.push_back(read_back(raw, raw_cached_, raw_right_,
                                   [&] { world_.together([&] { read_raw(raw, back_.data(), bytes()); }); }));
      fs::remove(raw);

      CheckpointState about;
      about.step = i;
      about.program = version();
      write.push_back(seconds([&] { save_checkpoint(folder_, about, {box(state_)}, 1, ranks_); }));
      const std::optional<CheckpointInfo> saved = newest_checkpoint(folder_, &skipped_);
      if (!saved)
        fail(ErrorKind::kCheckpoint, "{} holds no checkpoint after one was written", folder_.string());
      const fs::path shard = saved->path / saved->files.at(static_cast<std::size_t>(world_.rank())).name;
      read.push_back(
          read_back(shard, cached_, right_, [&] { load_checkpoint(*saved, {box(back_)}, ranks_); }));
    }
    const double all = static_cast<double>(bytes()) * world_.size();
    const double raw_write_s = median(raw_write), raw_read_s = median(raw_read);
    add("raw write and fsync", all, raw_write_s, raw_write_s, {}, {});
    add("checkpoint write", all, median(write), raw_write_s, {}, session_.everywhere(right_));
    add("raw read", all, raw_read_s, raw_read_s, raw_cached_, session_.everywhere(raw_right_));
    add("checkpoint read", all, median(read), raw_read_s, cached_, session_.everywhere(right_));
  }

  /// Tokens through the batch loader, as training reads them.
  void tokens(const std::string& path, const char* what, const TokenSource& source) {
    std::optional<TokenFile> file;
    double cached = 0.0;
    world_.together([&] {
      file.emplace(path);
      drop_cached(path);
      cached = cached_share(path);
    });
    MPI_Allreduce(MPI_IN_PLACE, &cached, 1, MPI_DOUBLE, MPI_MAX, world_.ranks());
    TokenReading reading;
    world_.together([&] { reading = read_tokens(session_, *file, source); });
    double slowest = reading.seconds, tokens = static_cast<double>(reading.tokens);
    MPI_Allreduce(MPI_IN_PLACE, &slowest, 1, MPI_DOUBLE, MPI_MAX, world_.ranks());
    MPI_Allreduce(MPI_IN_PLACE, &tokens, 1, MPI_DOUBLE, MPI_SUM, world_.ranks());
    add(what, tokens * file->info().token_bytes, slowest, 0.0, cached, session_.everywhere(reading.correct),
        tokens);
  }

 private:
  std::int64_t bytes() const { return static_cast<std::int64_t>(state_.size()) * 4; }
  SavedBox box(std::vector<float>& values) const {
    return {"parameters/bench",
            rows_ * world_.size(),
            kColumns,
            {rows_ * world_.rank(), 0, rows_, kColumns},
            values.data()};
  }
  /// From when all ranks begin until the last one is done.
  double seconds(const std::function<void()>& work) const {
    MPI_Barrier(world_.ranks());
    const auto begin = std::chrono::steady_clock::now();
    work();
    double time = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    MPI_Allreduce(MPI_IN_PLACE, &time, 1, MPI_DOUBLE, MPI_MAX, world_.ranks());
    return time;
  }
  /// Reads what was written, `path` being this rank's part of it, and compares.
  double read_back(const fs::path& path, double& cached, bool& right, const std::function<void()>& read) {
    back_.assign(state_.size(), -1.0f);
    double share = 0.0;
    world_.together([&] {
      drop_cached(path);
      share = cached_share(path);
    });
    MPI_Allreduce(MPI_IN_PLACE, &share, 1, MPI_DOUBLE, MPI_MAX, world_.ranks());
    cached = std::max(cached, share);
    const double time = seconds(read);
    right = right && back_ == state_;
    return time;
  }
  static double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
  }
  void add(const char* what, double bytes, double time, double raw, std::optional<double> cached,
           std::optional<bool> correct, double tokens = 0.0) {
    nlohmann::json row = {
        {"what", what}, {"mb", bytes / 1e6}, {"time_ms", time * 1e3}, {"gb_s", bytes / time / 1e9}};
    if (raw > 0) row["percent_of_raw"] = 100 * raw / time;
    if (tokens > 0) row["mtokens_s"] = tokens / time / 1e6;
    if (cached) row["percent_cached"] = 100 * *cached;
    if (correct) row["correct"] = *correct;
    result_.table.add(std::move(row));
  }

  BenchSession& session_;
  const World& world_;
  fs::path folder_;
  PartResult& result_;
  MPI_Comm ranks_ = MPI_COMM_NULL;
  std::int64_t rows_ = 0;
  std::vector<float> state_, back_;
  std::vector<std::string> skipped_;
  double raw_cached_ = 0.0, cached_ = 0.0;
  bool raw_right_ = true, right_ = true;
};

}  // namespace

PartResult bench_io(BenchSession& session) {
  PartResult result{"",
                    ResultTable({{"what", "what"},
                                 {"mb", "all ranks MB"},
                                 {"time_ms", "time ms", 2},
                                 {"gb_s", "GB/s", 3},
                                 {"percent_of_raw", "% of raw", 0},
                                 {"mtokens_s", "Mtokens/s", 2},
                                 {"percent_cached", "% in page cache", 0},
                                 {"correct", "correct"}}),
                    {},
                    {}};
  Scratch scratch(session);
  result.title = fmt::format("{} MiB a rank, in {}", session.limits.io_bytes >> 20, scratch.path().string());
  {
    IoBench bench(session, scratch.path(), result);
    bench.run();
    const std::string made = (scratch.path() / "tokens.h5").string();
    session.world.together([&] {
      if (session.world.rank() == 0) write_known_tokens(session, made);
    });
    bench.tokens(made, "tokens, batch loader", known_tokens(session));
    if (fs::exists(session.deck.data.train))
      bench.tokens(session.deck.data.train, "tokens of data.train", tokens_of_file(session.deck.data.train));
  }
  MPI_Barrier(session.world.ranks());
  result.notes.push_back(
      "medians of three, by the wall clock of the slowest rank; a checkpoint write hashes and syncs, a read "
      "checks the hash; % in page cache: the most that the system still held in memory of a file after being "
      "asked to forget it, just before it was read; tokens are counted once a rank that reads them");
  return result;
}

}  // namespace octet
