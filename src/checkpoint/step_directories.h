#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace octet::checkpoint {

/// A directory of one step below a run's checkpoint directory.
struct StepDirectory {
  std::int64_t step = 0;
  std::string name;
  bool temporary = false;  ///< of a save under way, or left by one that was interrupted
};

/// Such as step-00001000.
std::string step_name(std::int64_t step);

/// Such as step-00001000.tmp-1f2e3d4c: invisible to loaders, removed by the next save.
std::string temporary_name(std::int64_t step, const std::string& identity);

/// The step directories in `directory`, highest step first.
std::vector<StepDirectory> list_steps(const std::filesystem::path& directory);

/// Removes what interrupted saves left.
void remove_temporaries(const std::filesystem::path& directory);

/// Renames a finished temporary directory to its final name, in place of an older one of that name, and makes
/// the rename durable.
void publish(const std::filesystem::path& temporary, const std::filesystem::path& destination);

/// Removes complete checkpoints but the newest `keep` and the one named `written`. 0 keeps all.
void prune(const std::filesystem::path& directory, std::int64_t keep, const std::string& written);

}  // namespace octet::checkpoint
