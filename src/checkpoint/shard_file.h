#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "octet/checkpoint/checkpoint.h"

namespace octet::checkpoint {

/// What a shard says about itself, in its root attributes.
struct ShardLabel {
  std::string identity;  ///< of the checkpoint
  int number = 0, count = 1;

  bool operator==(const ShardLabel&) const = default;
};

/// Such as shard-00003-of-00008.h5.
std::string shard_name(int number, int count);

/// The path of each box's dataset: /<tensor>/box_<n>, n counting the tensor's boxes in this shard.
std::vector<std::string> dataset_names(const std::vector<SavedBox>& boxes);

/// Writes a shard and syncs it: one contiguous float32 dataset a box, its bytes by plain pwrite.
void write_shard(const std::filesystem::path& path, const ShardLabel& label,
                 const std::vector<SavedBox>& boxes);

ShardLabel read_label(const std::filesystem::path& path);
std::string describe(const ShardLabel& label);

/// File offsets of the datasets of these parts, all of one shard. Throws unless the shard bears `label` and
/// every dataset is contiguous float32 of its part's extent.
std::vector<std::int64_t> dataset_offsets(const std::filesystem::path& path, const ShardLabel& label,
                                          const std::vector<const CheckpointInfo::Part*>& parts);

/// Throws if the file's hash is not the recorded one, naming both and, for a shard, what its label says.
void check_hash(const CheckpointInfo& info, const CheckpointInfo::File& file);

/// The label that a shard of this name must bear; nothing for other files.
std::optional<ShardLabel> expected_label(const CheckpointInfo& info, const std::string& file_name);

}  // namespace octet::checkpoint
