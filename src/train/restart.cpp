#include "octet/train/restart.h"

#include <algorithm>
#include <filesystem>
#include <map>

#include "octet/base/error.h"
#include "octet/config/version.h"

namespace octet {

namespace {

std::filesystem::path checkpoint_directory(const Deck& deck) {
  return std::filesystem::path(deck.run.directory) / "checkpoints";
}

bool starts_with_any(const std::string& key, std::initializer_list<const char*> prefixes) {
  return std::any_of(prefixes.begin(), prefixes.end(),
                     [&](const char* prefix) { return key.starts_with(prefix); });
}

enum class Change { kModel, kRun, kHarmless };

/// What a difference in a key means for a run that goes on.
Change weight_of(const std::string& key, const Deck& deck) {
  // How weights begin is history once there are weights.
  if (key == "model.init_deviation" || key == "model.zero_head") return Change::kHarmless;
  if (key.starts_with("model.")) return Change::kModel;
  // Masters are the same numbers in either form, and 8-bit weights wherever they are made.
  if (key == "optimizer.master" || key == "precision.fp8_keep_weights" || key == "precision.fp8_gather")
    return Change::kHarmless;
  if (key == "run.steps") return deck.schedule.kind == "constant" ? Change::kHarmless : Change::kRun;
  if (key == "batch.micro" || key == "data.train") return Change::kHarmless;  // data are compared by content
  if (starts_with_any(key,
                      {"batch.", "optimizer.", "schedule.", "precision.", "run.seed", "data.mask_documents"}))
    return Change::kRun;
  return Change::kHarmless;
}

/// State boxes of the engine with host memory behind them.
struct HostBoxes {
  std::vector<std::vector<float>> memory;
  std::vector<SavedBox> boxes;

  explicit HostBoxes(const std::vector<ParameterStore::StateBox>& from) {
    for (const auto& box : from) {
      memory.emplace_back(static_cast<std::size_t>(box.box.size()));
      boxes.push_back({box.name, box.rows, box.cols, box.box, memory.back().data()});
    }
  }
  /// A whole tensor.
  void add(const std::string& name, const Tensor& shape) {
    memory.emplace_back(static_cast<std::size_t>(shape.size()));
    boxes.push_back({name, shape.rows, shape.cols, {0, 0, shape.rows, shape.cols}, memory.back().data()});
  }
};

constexpr const char* kFp8History = "fp8/largest_magnitudes";

}  // namespace

std::optional<CheckpointInfo> find_checkpoint(const Deck& deck, std::vector<std::string>* notes) {
  if (deck.checkpoint.resume == "none") {
    notes->push_back("starting fresh: checkpoint.resume = none");
    return std::nullopt;
  }
  if (deck.checkpoint.resume != "auto") return open_checkpoint(deck.checkpoint.resume);
  std::vector<std::string> skipped;
  auto found = newest_checkpoint(checkpoint_directory(deck), &skipped);
  for (const std::string& line : skipped) notes->push_back("skipped checkpoint " + line);
  if (!found)
    notes->push_back(fmt::format("starting fresh: no checkpoint in {}", checkpoint_directory(deck).string()));
  return found;
}

void check_same_run(const CheckpointInfo& info, const Deck& deck, const std::string& train_hash,
                    std::vector<std::string>* notes) {
  const std::map<std::string, std::string> saved(info.state.deck.begin(), info.state.deck.end());
  std::vector<std::string> model, run;
  for (const auto& [key, value] : deck_values(deck)) {
    const auto at = saved.find(key);
    if (at == saved.end() || at->second == value) continue;
    const std::string line = fmt::format("  {:<28} {:<24} {}", key, at->second, value);
    switch (weight_of(key, deck)) {
      case Change::kModel:
        model.push_back(line);
        break;
      case Change::kRun:
        run.push_back(line);
        break;
      case Change::kHarmless:
        if (!key.starts_with("parallel.") && key != "batch.micro") {
          notes->push_back(
              fmt::format("{}: checkpoint has {}, the deck's {} is used", key, at->second, value));
        }
        break;
    }
  }
  const std::string head = fmt::format("  {:<28} {:<24} {}", "key", "checkpoint", "deck");
  if (!model.empty()) {
    fail(ErrorKind::kCheckpoint, "checkpoint {} is of another model:\n{}\n{}", info.path.string(), head,
         fmt::join(model, "\n"));
  }
  if (info.state.train_hash != train_hash) {
    run.push_back(
        fmt::format("  {:<28} {:<24} {}", "data.train (content)", info.state.train_hash, train_hash));
  }
  if (run.empty()) return;
  if (!deck.checkpoint.allow_changes) {
    fail(ErrorKind::kCheckpoint,
         "the deck alters the run that checkpoint {} belongs to:\n{}\n{}\nSet checkpoint.allow_changes = "
         "true to go on with the deck's values",
         info.path.string(), head, fmt::join(run, "\n"));
  }
  notes->push_back("checkpoint.allow_changes: the deck's values are used from here on:\n" + head + "\n" +
                   fmt::format("{}", fmt::join(run, "\n")));
}

void save_run(Engine& engine, const Deck& deck, const RunPosition& position, const std::string& train_hash,
              MPI_Comm ranks) {
  const auto boxes = engine.store().saved_boxes();
  HostBoxes host(boxes);
  for (std::size_t i = 0; i < boxes.size(); ++i)
    engine.store().read(engine.stream(), boxes[i], host.boxes[i].data);
  int rank = 0;
  MPI_Comm_rank(ranks, &rank);
  if (const Tensor history = engine.fp8_history(); history && rank == 0) {  // the same on all ranks
    host.add(kFp8History, history);
    engine.device().copy(engine.stream(), host.memory.back().data(), history.data, history.bytes());
  }
  engine.stream().synchronize();
  const CheckpointState state{position.step,   position.samples, position.tokens, position.updates,
                              engine.layout(), version(),        train_hash,      deck_values(deck)};
  save_checkpoint(checkpoint_directory(deck), state, host.boxes, deck.checkpoint.keep, ranks);
  engine.restart_clock();
}

void load_run(Engine& engine, const CheckpointInfo& info, MPI_Comm ranks) {
  const auto boxes = engine.store().held_boxes();
  HostBoxes host(boxes);
  // A run that had no scales from earlier steps, or another number of them, begins them anew.
  const Tensor history = engine.fp8_history();
  const auto saved = info.tensors.find(kFp8History);
  const bool remembered = history && saved != info.tensors.end() && saved->second.rows == history.rows &&
                          saved->second.cols == history.cols;
  if (remembered) host.add(kFp8History, history);
  load_checkpoint(info, host.boxes, ranks);
  std::vector<const float*> values;
  for (std::size_t i = 0; i < boxes.size(); ++i) values.push_back(host.boxes[i].data);
  engine.store().write(engine.stream(), boxes, values);
  if (remembered) engine.restore_fp8_history(host.memory.back());
  engine.restored(info.state.updates);
}

}  // namespace octet
