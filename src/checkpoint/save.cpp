#include <nlohmann/json.hpp>

#include "agreement.h"
#include "files.h"
#include "manifest.h"
#include "octet/base/error.h"
#include "octet/checkpoint/checkpoint.h"
#include "shard_file.h"
#include "step_directories.h"

namespace octet {
namespace {

using checkpoint::run_together;
using Path = std::filesystem::path;

void check_box(const SavedBox& saved) {
  const Box whole{0, 0, saved.global_rows, saved.global_cols};
  if (saved.tensor.empty() || saved.data == nullptr || intersect(saved.box, whole) != saved.box)
    fail(ErrorKind::kCheckpoint,
         "internal error: tensor \"{}\" of shape [{}, {}] has a box without data or outside it: offset [{}, "
         "{}], "
         "extent [{}, {}]",
         saved.tensor, saved.global_rows, saved.global_cols, saved.box.row, saved.box.col, saved.box.rows,
         saved.box.cols);
}

std::vector<SavedBox> without_empty(const std::vector<SavedBox>& boxes) {
  std::vector<SavedBox> kept;
  for (const SavedBox& saved : boxes)
    if (saved.box.size() != 0) kept.push_back(saved);
  return kept;
}

/// This rank's boxes as a text for rank 0.
std::string table_of(const std::vector<SavedBox>& boxes) {
  const std::vector<std::string> datasets = checkpoint::dataset_names(boxes);
  nlohmann::json table = nlohmann::json::array();
  for (std::size_t i = 0; i < boxes.size(); ++i) {
    const SavedBox& saved = boxes[i];
    table.push_back({saved.tensor, saved.global_rows, saved.global_cols, datasets[i], saved.box.row,
                     saved.box.col, saved.box.rows, saved.box.cols});
  }
  return table.dump();
}

void add_table(const std::string& table, int rank, int count,
               std::map<std::string, CheckpointInfo::TensorInfo>& all) {
  for (const auto& row : nlohmann::json::parse(table)) {
    const std::string name = row[0];
    const std::int64_t rows = row[1], cols = row[2];
    CheckpointInfo::TensorInfo& tensor =
        all.try_emplace(name, CheckpointInfo::TensorInfo{rows, cols, {}}).first->second;
    if (tensor.rows != rows || tensor.cols != cols)
      fail(ErrorKind::kCheckpoint, "internal error: tensor {} has shape [{}, {}] on rank {}, [{}, {}] before",
           name, rows, cols, rank, tensor.rows, tensor.cols);
    tensor.parts.push_back({checkpoint::shard_name(rank, count), row[3], {row[4], row[5], row[6], row[7]}});
  }
}

/// All tensors, from the tables of all ranks; throws unless their boxes cover each of them once.
std::map<std::string, CheckpointInfo::TensorInfo> merge(const std::vector<std::string>& tables) {
  std::map<std::string, CheckpointInfo::TensorInfo> tensors;
  const int count = static_cast<int>(tables.size());
  for (int rank = 0; rank < count; ++rank) add_table(tables[rank], rank, count, tensors);
  for (const auto& [name, tensor] : tensors)
    if (const auto problem = checkpoint::coverage_problem(name, tensor))
      fail(ErrorKind::kCheckpoint, "internal error: {}", *problem);
  return tensors;
}

CheckpointInfo::File described(const Path& path) {
  return {path.filename().string(), static_cast<std::int64_t>(std::filesystem::file_size(path)),
          checkpoint::hash_of_file(path)};
}

/// Rank 0, once every shard is on the disk: index, then manifest, which makes the directory complete.
void finish(const Path& temporary, CheckpointInfo& info, const std::vector<std::string>& shards) {
  for (const std::string& text : shards) {
    const nlohmann::json file = nlohmann::json::parse(text);
    info.files.push_back({file[0], file[1], file[2]});
  }
  const Path index = temporary / checkpoint::kIndexName;
  checkpoint::write_index(index, info);
  info.files.push_back(described(index));
  checkpoint::sync_directory(temporary);
  checkpoint::write_text_durably(temporary / checkpoint::kManifestName, checkpoint::manifest_text(info));
}

/// Rank 0: an empty temporary directory, with the leftovers of earlier saves gone.
void make_temporary(const Path& temporary) {
  std::filesystem::create_directories(temporary.parent_path());
  checkpoint::remove_temporaries(temporary.parent_path());
  std::filesystem::create_directory(temporary);
}

/// The work of all ranks up to a complete temporary directory.
void write_all(const Path& temporary, CheckpointInfo info, const std::vector<SavedBox>& boxes,
               MPI_Comm ranks) {
  const int rank = checkpoint::rank_in(ranks), count = checkpoint::rank_count(ranks);
  const std::vector<std::string> tables = checkpoint::gather_texts(table_of(boxes), ranks);
  run_together(ranks, [&] {
    if (rank != 0) return;
    info.tensors = merge(tables);
    make_temporary(temporary);
  });
  std::string shard;
  run_together(ranks, [&] {
    const Path path = temporary / checkpoint::shard_name(rank, count);
    checkpoint::write_shard(path, {info.identity, rank, count}, boxes);
    const CheckpointInfo::File file = described(path);
    shard = nlohmann::json({file.name, file.bytes, file.xxh3_128}).dump();
  });
  const std::vector<std::string> shards = checkpoint::gather_texts(shard, ranks);
  run_together(ranks, [&] {
    if (rank == 0) finish(temporary, info, shards);
  });
}

}  // namespace

void save_checkpoint(const std::filesystem::path& directory, const CheckpointState& state,
                     const std::vector<SavedBox>& all_boxes, std::int64_t keep, MPI_Comm ranks) {
  const int rank = checkpoint::rank_in(ranks);
  const std::vector<SavedBox> boxes = without_empty(all_boxes);
  run_together(ranks, [&] {
    for (const SavedBox& saved : boxes) check_box(saved);
  });
  CheckpointInfo info;
  info.state = state;
  info.identity = checkpoint::broadcast_text(rank == 0 ? checkpoint::random_identity() : "", 0, ranks);
  const std::string name = checkpoint::step_name(state.step);
  const Path temporary = directory / checkpoint::temporary_name(state.step, info.identity);
  try {
    write_all(temporary, info, boxes, ranks);
    run_together(ranks, [&] {
      if (rank == 0) checkpoint::publish(temporary, directory / name);
    });
  } catch (const Error&) {
    std::error_code ignored;
    if (rank == 0) std::filesystem::remove_all(temporary, ignored);
    throw;
  }
  run_together(ranks, [&] {
    if (rank != 0) return;
    checkpoint::write_text_durably(directory / "latest", name + "\n");
    checkpoint::prune(directory, keep, name);
  });
}

}  // namespace octet
