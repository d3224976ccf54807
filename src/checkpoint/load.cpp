#include <fcntl.h>

#include <algorithm>
#include <cstring>

#include "agreement.h"
#include "files.h"
#include "manifest.h"
#include "octet/base/error.h"
#include "octet/checkpoint/checkpoint.h"
#include "shard_file.h"

namespace octet {
namespace {

using checkpoint::PosixFile;
using checkpoint::run_together;

constexpr std::int64_t kElement = sizeof(float);
/// Row pieces from this size on are read one by one; of smaller ones, the whole saved rows are read at once.
constexpr std::int64_t kPieceBytes = 65536;
constexpr std::int64_t kBufferBytes = std::int64_t{16} << 20;
constexpr std::size_t kProblemsShown = 5;

/// A part of the checkpoint and a wanted box that have elements in common.
struct Overlap {
  const CheckpointInfo::Part* part;
  const SavedBox* wanted;
  Box common;
};

/// Throws naming up to five tensors that the checkpoint lacks or has in another shape.
void check_shapes(const CheckpointInfo& info, const std::vector<SavedBox>& boxes) {
  std::map<std::string, std::string> problems;
  for (const SavedBox& wanted : boxes) {
    const auto found = info.tensors.find(wanted.tensor);
    if (found == info.tensors.end())
      problems[wanted.tensor] = fmt::format("{} is missing, wanted [{}, {}]", wanted.tensor,
                                            wanted.global_rows, wanted.global_cols);
    else if (found->second.rows != wanted.global_rows || found->second.cols != wanted.global_cols)
      problems[wanted.tensor] =
          fmt::format("{} has shape [{}, {}], wanted [{}, {}]", wanted.tensor, found->second.rows,
                      found->second.cols, wanted.global_rows, wanted.global_cols);
  }
  if (problems.empty()) return;
  std::string text;
  std::size_t shown = 0;
  for (const auto& [name, problem] : problems)
    if (shown++ < kProblemsShown) text += "\n  " + problem;
  if (shown > kProblemsShown) text += fmt::format("\n  and {} more", shown - kProblemsShown);
  fail(ErrorKind::kCheckpoint, "checkpoint {} does not hold the model wanted:{}", info.path.string(), text);
}

/// What each file has to give, by file name.
std::map<std::string, std::vector<Overlap>> plan(const CheckpointInfo& info,
                                                 const std::vector<SavedBox>& boxes) {
  std::map<std::string, std::vector<Overlap>> by_file;
  for (const SavedBox& wanted : boxes) {
    std::int64_t elements = 0;
    for (const CheckpointInfo::Part& part : info.tensors.at(wanted.tensor).parts) {
      const std::optional<Box> common = intersect(part.box, wanted.box);
      if (!common) continue;
      by_file[part.file].push_back({&part, &wanted, *common});
      elements += common->size();
    }
    if (elements != wanted.box.size())
      fail(ErrorKind::kCheckpoint, "{} holds {} of the {} elements wanted of tensor {}", info.path.string(),
           elements, wanted.box.size(), wanted.tensor);
  }
  return by_file;
}

/// Reads an overlap whose part begins at `offset` of the file.
void read_overlap(const PosixFile& file, std::int64_t offset, const Overlap& overlap) {
  const Box& part = overlap.part->box;
  const Box& wanted = overlap.wanted->box;
  const Box& common = overlap.common;
  const std::int64_t from = (common.row - part.row) * part.cols + (common.col - part.col);
  float* const to =
      overlap.wanted->data + (common.row - wanted.row) * wanted.cols + (common.col - wanted.col);
  const bool contiguous = common.rows == 1 || (common.cols == part.cols && common.cols == wanted.cols);
  if (contiguous) {
    file.read_at(to, common.size() * kElement, offset + from * kElement);
    return;
  }
  const std::int64_t piece = common.cols * kElement;
  if (piece >= kPieceBytes) {
    for (std::int64_t row = 0; row < common.rows; ++row)
      file.read_at(to + row * wanted.cols, piece, offset + (from + row * part.cols) * kElement);
    return;
  }
  const std::int64_t rows_at_once =
      std::clamp<std::int64_t>(kBufferBytes / (part.cols * kElement), 1, common.rows);
  std::vector<float> buffer(static_cast<std::size_t>((rows_at_once - 1) * part.cols + common.cols));
  for (std::int64_t first = 0; first < common.rows; first += rows_at_once) {
    const std::int64_t rows = std::min(rows_at_once, common.rows - first);
    file.read_at(buffer.data(), ((rows - 1) * part.cols + common.cols) * kElement,
                 offset + (from + first * part.cols) * kElement);
    for (std::int64_t row = 0; row < rows; ++row)
      std::memcpy(to + (first + row) * wanted.cols, buffer.data() + row * part.cols,
                  static_cast<std::size_t>(piece));
  }
}

void read_file(const CheckpointInfo& info, const std::string& name, const std::vector<Overlap>& overlaps) {
  const std::optional<checkpoint::ShardLabel> label = checkpoint::expected_label(info, name);
  if (!label) fail(ErrorKind::kCheckpoint, "{} is not the name of a shard", (info.path / name).string());
  std::vector<const CheckpointInfo::Part*> parts;
  for (const Overlap& overlap : overlaps) parts.push_back(overlap.part);
  const std::vector<std::int64_t> offsets = checkpoint::dataset_offsets(info.path / name, *label, parts);
  const PosixFile file(info.path / name, O_RDONLY);
  for (std::size_t i = 0; i < overlaps.size(); ++i) read_overlap(file, offsets[i], overlaps[i]);
}

/// Every shard is hashed by one rank, in turn.
void check_hashes(const CheckpointInfo& info, int rank, int count) {
  int turn = 0;
  for (const CheckpointInfo::File& file : info.files)
    if (checkpoint::expected_label(info, file.name) && turn++ % count == rank)
      checkpoint::check_hash(info, file);
}

}  // namespace

void load_checkpoint(const CheckpointInfo& info, const std::vector<SavedBox>& boxes, MPI_Comm ranks) {
  const std::string identity = checkpoint::broadcast_text(info.identity, 0, ranks);
  run_together(ranks, [&] {
    if (info.identity != identity)
      fail(ErrorKind::kCheckpoint,
           "the ranks load different checkpoints: {} has identity {}, that of rank 0 has {}",
           info.path.string(), info.identity, identity);
    check_shapes(info, boxes);
  });
  run_together(ranks, [&] { check_hashes(info, checkpoint::rank_in(ranks), checkpoint::rank_count(ranks)); });
  run_together(ranks, [&] {
    for (const auto& [name, overlaps] : plan(info, boxes)) read_file(info, name, overlaps);
  });
}

}  // namespace octet
