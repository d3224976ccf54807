#pragma once

#include <optional>
#include <string>

#include "octet/checkpoint/checkpoint.h"

namespace octet::checkpoint {

constexpr const char* kManifestName = "manifest.json";
constexpr const char* kIndexName = "index.h5";

/// manifest.json of a checkpoint. Its last key is the XXH3-128 of the compact dump of all others.
std::string manifest_text(const CheckpointInfo& info);

/// The reverse. Throws Error(kCheckpoint) naming `path` for a newer or unknown format and for damage.
CheckpointInfo parse_manifest(const std::filesystem::path& path, const std::string& text);

/// Why the parts do not cover the tensor exactly once; nothing when they do.
std::optional<std::string> coverage_problem(const std::string& name,
                                            const CheckpointInfo::TensorInfo& tensor);

/// Writes and syncs index.h5: shape and boxes of every tensor, and a virtual dataset of each over the shards,
/// for h5py and h5dump. The loader does not read it; a missing shard shows as NaN there.
void write_index(const std::filesystem::path& path, const CheckpointInfo& info);

}  // namespace octet::checkpoint
