#pragma once

#include <optional>
#include <string>
#include <vector>

#include "octet/checkpoint/checkpoint.h"
#include "octet/config/deck.h"
#include "octet/runtime/world.h"
#include "octet/train/engine.h"

namespace octet {

/// Position of a run beside the engine's own state.
struct RunPosition {
  std::int64_t step = 0, samples = 0, tokens = 0, updates = 0;
};

/// The checkpoint that checkpoint.resume asks for; nothing when there is none to resume from, which only
/// `auto` and `none` allow. Lines worth telling are added to `notes`. Throws Error(kCheckpoint).
std::optional<CheckpointInfo> find_checkpoint(const Deck& deck, std::vector<std::string>* notes);

/// Compares the deck that a checkpoint was made with to the present one. Another model is refused with both
/// values; settings that alter the run (batch, data, optimizer, schedule, seed, precision) are refused unless
/// checkpoint.allow_changes. What else differs is told in `notes`. Throws Error(kCheckpoint).
void check_same_run(const CheckpointInfo& info, const Deck& deck, const std::string& train_hash,
                    std::vector<std::string>* notes);

/// Collective. Writes the engine's state as a checkpoint of this run; `ranks` is a communicator of its own.
void save_run(Engine& engine, const Deck& deck, const RunPosition& position, const std::string& train_hash,
              MPI_Comm ranks);

/// Collective. Fills the engine from a checkpoint.
void load_run(Engine& engine, const CheckpointInfo& info, MPI_Comm ranks);

}  // namespace octet
