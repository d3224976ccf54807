#pragma once

#include <mpi.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "octet/base/box.h"

namespace octet {

/// One box of a global tensor in host memory: contiguous float32, row-major in the box.
struct SavedBox {
  std::string tensor;  ///< such as "parameters/layers.0.attention.q.weight"
  std::int64_t global_rows = 0, global_cols = 0;
  Box box;
  float* data = nullptr;  ///< box.size() elements
};

/// What a checkpoint knows beside its tensors; stored in manifest.json.
struct CheckpointState {
  std::int64_t step = 0;     ///< steps done
  std::int64_t samples = 0;  ///< samples consumed
  std::int64_t tokens = 0;   ///< target tokens trained on
  std::int64_t updates = 0;  ///< optimizer updates done
  std::string layout;        ///< such as "data 4 × tensor 2, ZeRO 1", for messages
  std::string program;       ///< version of octet
  std::string train_hash;    ///< hash of the training tokens
  std::vector<std::pair<std::string, std::string>> deck;
};

/// Saves one checkpoint as `directory`/step-00001000: every rank its boxes in a shard file of its own, then
/// the commit order of ARCHITECTURE.md. Collective over `ranks` (duplicated by the caller for checkpoints
/// alone). Boxes of all ranks must cover every tensor once. Keeps the newest `keep` complete checkpoints (0:
/// all). If any rank fails, all ranks throw the same Error(kCheckpoint), what was written is removed and
/// older checkpoints stay.
void save_checkpoint(const std::filesystem::path& directory, const CheckpointState& state,
                     const std::vector<SavedBox>& boxes, std::int64_t keep, MPI_Comm ranks);

/// The manifest's view of a complete checkpoint.
struct CheckpointInfo {
  std::filesystem::path path;
  CheckpointState state;
  int format = 1;
  struct File {
    std::string name;
    std::int64_t bytes = 0;
    std::string xxh3_128;
  };
  std::string identity;  ///< random, the same in all files of one checkpoint
  std::vector<File> files;
  /// Where a box of a tensor lies on disk.
  struct Part {
    std::string file, dataset;
    Box box;
  };
  struct TensorInfo {
    std::int64_t rows = 0, cols = 0;
    std::vector<Part> parts;  ///< cover the tensor once
  };
  std::map<std::string, TensorInfo> tensors;
};

/// Reads and checks manifest.json of a step directory: exists, format not newer than this program, every file
/// present with its size. Throws Error(kCheckpoint) naming the file, expected and actual.
CheckpointInfo open_checkpoint(const std::filesystem::path& step_directory);

/// The newest complete checkpoint of a run's checkpoint directory; incomplete ones are skipped and each named
/// in `skipped`. Nothing when there is none.
std::optional<CheckpointInfo> newest_checkpoint(const std::filesystem::path& directory,
                                                std::vector<std::string>* skipped);

/// Fills the boxes from the checkpoint, whatever boxes it was saved in. Verifies the hash of every file it
/// reads bytes from (each file by one rank at least, collective over `ranks`). Throws Error(kCheckpoint) for
/// damage (file, expected and actual hash), a missing tensor or another shape.
void load_checkpoint(const CheckpointInfo& info, const std::vector<SavedBox>& boxes, MPI_Comm ranks);

/// Every hash checked, and that boxes cover every tensor once; a line a problem, empty when sound.
std::vector<std::string> verify_checkpoint(const CheckpointInfo& info);

}  // namespace octet
