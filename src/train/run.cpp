#include "octet/train/run.h"

#include <algorithm>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <fstream>
#include <optional>

#include "octet/base/error.h"
#include "octet/config/resolve.h"
#include "octet/config/version.h"
#include "octet/runtime/device_choice.h"
#include "octet/runtime/environment.h"
#include "octet/runtime/rank_placement.h"
#include "octet/train/metrics.h"
#include "octet/train/report.h"
#include "octet/train/restart.h"

namespace octet {

namespace {

constexpr double kGiB = 1024.0 * 1024.0 * 1024.0;

void say(const World& world, const std::string& text) {
  if (world.rank() != 0) return;
  std::fputs((text + "\n").c_str(), stdout);
  std::fflush(stdout);
}

/// The token files of a run, checked against the deck.
struct RunData {
  std::optional<TokenFile> train, validation;

  explicit RunData(const Deck& deck) {
    train.emplace(deck.data.train);
    check(*train, "data.train", deck);
    const std::int64_t samples = samples_in(*train, deck.batch.sequence);
    if (samples < deck.batch.global) {
      fail(ErrorKind::kData,
           "data.train = {} has {} tokens, {} samples of {}; one step takes batch.global = {}",
           deck.data.train, train->info().tokens, samples, deck.batch.sequence, deck.batch.global);
    }
    if (deck.data.validation.empty()) return;
    validation.emplace(deck.data.validation);
    check(*validation, "data.validation", deck);
    if (samples_in(*validation, deck.batch.sequence) < 1) {
      fail(ErrorKind::kData, "data.validation = {} has {} tokens; a sample of batch.sequence = {} needs {}",
           deck.data.validation, validation->info().tokens, deck.batch.sequence, deck.batch.sequence + 1);
    }
  }
  static void check(const TokenFile& file, const char* key, const Deck& deck) {
    if (file.info().vocabulary <= deck.model.vocabulary) return;
    fail(ErrorKind::kData, "{} = {} was made with a vocabulary of {}, but model.vocabulary = {}", key,
         file.path(), file.info().vocabulary, deck.model.vocabulary);
  }
};

/// Makes the run folder and proves that it can be written. Rank 0's work.
void prepare_directory(const Deck& deck) {
  const std::filesystem::path directory = deck.run.directory;
  std::error_code error;
  std::filesystem::create_directories(directory / "checkpoints", error);
  if (error)
    fail(ErrorKind::kUsage, "run.directory = {} cannot be made: {}", directory.string(), error.message());
  const std::filesystem::path probe = directory / ".writable";
  if (!(std::ofstream(probe) << "octet\n")) {
    fail(ErrorKind::kUsage, "run.directory = {} cannot be written", directory.string());
  }
  std::filesystem::remove(probe, error);
}

class Trainer {
 public:
  Trainer(const World& world, Deck deck, RunData& data, DeviceChoice choice)
      : world_(world),
        deck_(std::move(deck)),
        data_(data),
        device_(std::move(choice.device)),
        engine_(world, deck_, *device_, choice.shared) {
    MPI_Comm_dup(world.ranks(), &checkpoint_ranks_);
    flops_ = flops_per_token(engine_.shape(), deck_.batch.sequence);
  }
  ~Trainer() {
    if (std::uncaught_exceptions() == 0) MPI_Comm_free(&checkpoint_ranks_);
  }

  void report(const std::vector<std::string>& places, const std::string& nodes) const {
    say(world_, startup_report(world_, deck_, engine_, *device_, places, nodes, *data_.train,
                               data_.validation ? &*data_.validation : nullptr));
  }
  void start(const std::optional<CheckpointInfo>& checkpoint);
  int run();

 private:
  bool due(std::int64_t every) const { return every > 0 && position_.step % every == 0; }
  void take_result();
  void log(const StepResult& result);
  void check_replicas();
  void evaluate();
  void save();
  void status(const char* state, const char* reason, bool resume) const {
    if (world_.rank() == 0) write_status(deck_.run.directory, state, reason, position_.step, resume);
  }

  const World& world_;
  Deck deck_;
  RunData& data_;
  std::unique_ptr<Device> device_;
  Engine engine_;
  MPI_Comm checkpoint_ranks_ = MPI_COMM_NULL;
  double flops_ = 0.0;
  std::optional<MetricsFile> metrics_;
  RunPosition position_;  ///< of the newest step queued; tokens and updates of the newest taken
  std::int64_t taken_step_ = 0, saved_step_ = -1;
  std::int64_t skipped_ = 0, skipped_in_a_row_ = 0;
  // Since the last log line.
  std::int64_t steps_ = 0;
  double step_ms_ = 0.0, data_ms_ = 0.0, tokens_ = 0.0;
};

void Trainer::start(const std::optional<CheckpointInfo>& checkpoint) {
  if (checkpoint) {
    load_run(engine_, *checkpoint, checkpoint_ranks_);
    const CheckpointState& state = checkpoint->state;
    position_ = {state.step, state.samples, state.tokens, state.updates};
    saved_step_ = state.step;
    say(world_, fmt::format("resumed from {} at step {}: saved as {}, running as {}",
                            checkpoint->path.string(), state.step, state.layout, engine_.layout()));
  } else {
    engine_.initialise();
  }
  taken_step_ = position_.step;
  world_.together([&] {
    if (world_.rank() != 0) return;
    const std::filesystem::path directory = deck_.run.directory;
    metrics_.emplace(directory / "metrics.jsonl", position_.step);
    std::ofstream(directory / "deck.cfg") << write_deck(deck_);
    std::ofstream(directory / "versions.txt") << version_report();
  });
  status("running", "", true);
}

int Trainer::run() {
  const SampleOrder order(samples_in(*data_.train, deck_.batch.sequence),
                          static_cast<std::uint64_t>(deck_.run.seed));
  // A run that begins at or past the step to stop after has stopped there before: it goes on.
  const bool stops = deck_.run.stop_after > position_.step && deck_.run.stop_after < deck_.run.steps;
  const std::int64_t last = stops ? deck_.run.stop_after : deck_.run.steps;
  if (position_.step < last) say(world_, log_heading());
  BatchLoader loader(*data_.train, order, engine_.cut(), position_.samples,
                     static_cast<int>(deck_.data.prefetch) + 2, *device_);
  bool tuned = false;
  while (position_.step < last) {
    const std::vector<MicroBatch>& batches = loader.next();
    data_ms_ += loader.waited_ms();
    if (!tuned) {
      tuned = true;
      const std::string tuning = engine_.tune(batches);
      if (!tuning.empty()) say(world_, tuning);
    }
    ++position_.step;
    position_.samples += deck_.batch.global;
    engine_.step(batches, due(deck_.log.every) || position_.step == last);
    const bool pause = due(deck_.run.evaluate_every) || due(deck_.run.check_replicas) ||
                       due(deck_.checkpoint.every) || position_.step == last;
    while (engine_.pending() > (pause ? 0 : 1)) take_result();
    if (due(deck_.run.check_replicas)) check_replicas();
    if (due(deck_.run.evaluate_every) || (position_.step == last && data_.validation)) evaluate();
    if (due(deck_.checkpoint.every) || (position_.step == last && (stops || deck_.checkpoint.at_end))) save();
  }
  status(stops ? "stopped" : "done", stops ? "run.stop_after" : "", stops);
  std::int64_t planned = 0;
  for (const auto& [name, bytes] : engine_.memory()) planned += bytes;
  say(world_,
      fmt::format("memory of rank 0: {:.2f} GiB planned, {:.2f} GiB in use",
                  static_cast<double>(planned) / kGiB, static_cast<double>(device_->memory_used()) / kGiB));
  say(world_,
      stops ? fmt::format("stopped after step {} as run.stop_after says; run again to go on", position_.step)
            : fmt::format("done: {} steps, {} tokens", position_.step, position_.tokens));
  return stops ? kStoppedOnRequest : 0;
}

void Trainer::take_result() {
  const StepResult result = engine_.result();
  ++taken_step_;
  position_.tokens += static_cast<std::int64_t>(result.tokens);
  position_.updates = result.updates;
  ++steps_;
  step_ms_ += result.step_ms;
  tokens_ += result.tokens;
  if (result.skipped) {
    ++skipped_;
    ++skipped_in_a_row_;
    say(world_, fmt::format("step {} skipped: {}", taken_step_,
                            result.tokens > 0 ? "loss or gradient is not finite"
                                              : "no target token in the whole batch"));
    if (skipped_in_a_row_ >= deck_.run.max_skipped) {
      status("failed", "diverged", false);
      fail(ErrorKind::kDiverged,
           "{} steps in a row were skipped, up to step {} (run.max_skipped = {}); the last checkpoint is "
           "step {}",
           skipped_in_a_row_, taken_step_, deck_.run.max_skipped, saved_step_);
    }
  } else {
    skipped_in_a_row_ = 0;
  }
  if (taken_step_ % std::max<std::int64_t>(deck_.log.every, 1) == 0 || taken_step_ == deck_.run.steps)
    log(result);
}

void Trainer::log(const StepResult& result) {
  LogLine line;
  line.step = taken_step_;
  line.steps = deck_.run.steps;
  line.last = result;
  const double steps = static_cast<double>(steps_), seconds = step_ms_ / 1e3;
  line.step_ms = step_ms_ / steps;
  line.data_ms = data_ms_ / steps;
  line.comm_ms = result.comm_ms;
  line.tokens_per_second = seconds > 0 ? tokens_ / seconds / world_.size() : 0.0;
  line.tflops = line.tokens_per_second * flops_ / 1e12;
  line.mfu = device_->peak_flops() > 0 ? line.tflops * 1e12 / device_->peak_flops() : -1.0;
  line.tokens = position_.tokens;
  line.memory_used = device_->memory_used();
  line.memory_total = device_->memory_total();
  line.skipped = skipped_;
  line.eta_seconds = static_cast<double>(deck_.run.steps - taken_step_) * line.step_ms / 1e3;
  say(world_, log_text(line));
  if (metrics_) metrics_->write(line);
  steps_ = 0;
  step_ms_ = data_ms_ = tokens_ = 0.0;
}

void Trainer::evaluate() {
  const Evaluation evaluation = engine_.evaluate(*data_.validation, deck_.run.evaluate_samples);
  say(world_, fmt::format("validation loss {:.4f} at step {} over {:.0f} tokens", evaluation.loss,
                          position_.step, evaluation.tokens));
  if (metrics_) metrics_->write_evaluation(position_.step, evaluation);
}

void Trainer::check_replicas() {
  const std::string difference = engine_.find_differing_replica();
  engine_.restart_clock();
  if (difference.empty()) return;
  status("failed", "replicas differ", true);
  fail(ErrorKind::kDiverged, "replicas have come apart at step {}: {}", position_.step, difference);
}

void Trainer::save() {
  if (saved_step_ == position_.step) return;
  save_run(engine_, deck_, position_, data_.train->info().tokens_hash, checkpoint_ranks_);
  saved_step_ = position_.step;
  status("running", "", true);
  say(world_, fmt::format("checkpoint step-{:08} written", position_.step));
}

}  // namespace

int run_training(const World& world, const std::vector<std::string>& files,
                 const std::vector<std::string>& assignments) {
  Deck deck;
  world.together([&] {
    deck = read_deck(files, assignments);
    resolve_deck(deck, world.size());
  });
  std::optional<RunData> data;
  world.together([&] { data.emplace(deck); });
  world.together([&] {
    if (world.rank() == 0) prepare_directory(deck);
  });
  std::optional<CheckpointInfo> checkpoint;
  std::vector<std::string> notes;
  world.together([&] {
    checkpoint = find_checkpoint(deck, &notes);
    if (checkpoint) check_same_run(*checkpoint, deck, data->train->info().tokens_hash, &notes);
  });
  DeviceChoice choice = open_device(world, deck.run);
  const Device& device = *choice.device;
  world.together([&] { check_fp8(deck.precision.fp8, device.name(), device.compute_capability()); });
  // Before any thread is started and memory is allocated, which then lie where the rank runs.
  const RankPlacement placement = place_ranks(world, device, deck.run.pin == "auto");
  notes.insert(notes.end(), placement.notes.begin(), placement.notes.end());
  const std::string environment = describe_environment(world);
  if (!environment.empty()) notes.push_back(environment);
  const auto places = world.gather(fmt::format("{} {}", world.host(), device.name()));
  try {
    Trainer trainer(world, deck, *data, std::move(choice));
    trainer.report(places, placement.nodes);
    for (const std::string& note : notes) say(world, note);
    trainer.start(checkpoint);
    return trainer.run();
  } catch (const Error& error) {
    // Divergence and checkpoint failures are agreed on by all ranks; anything else the others cannot know of.
    if (error.kind() == ErrorKind::kDiverged || error.kind() == ErrorKind::kCheckpoint) throw;
    world.abort(error);
  } catch (const std::exception& error) {
    world.abort(error);
  }
}

}  // namespace octet
