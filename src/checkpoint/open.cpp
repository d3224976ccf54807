#include <algorithm>
#include <cstdlib>

#include "files.h"
#include "manifest.h"
#include "octet/base/error.h"
#include "octet/checkpoint/checkpoint.h"
#include "step_directories.h"

namespace octet {
namespace {

using Path = std::filesystem::path;

constexpr std::size_t kNamesShown = 5;

/// The checkpoints of a directory for a message, those with the nearest steps first; empty when there are
/// none.
std::string nearby(const Path& directory, std::int64_t step) {
  std::error_code ignored;
  if (!std::filesystem::is_directory(directory, ignored)) return "";
  std::vector<checkpoint::StepDirectory> found = checkpoint::list_steps(directory);
  std::erase_if(found, [](const checkpoint::StepDirectory& entry) { return entry.temporary; });
  std::stable_sort(found.begin(), found.end(), [&](const auto& a, const auto& b) {
    return std::abs(a.step - step) < std::abs(b.step - step);
  });
  if (found.size() > kNamesShown) found.resize(kNamesShown);
  std::string names;
  for (const checkpoint::StepDirectory& entry : found) names += (names.empty() ? "" : ", ") + entry.name;
  return names;
}

/// The number at the end of a name such as step-00001000; a high one when there is none, so that the newest
/// checkpoints count as nearest.
std::int64_t step_wanted(const Path& path) {
  const std::string name = path.filename().string();
  const std::size_t last = name.find_last_not_of("0123456789");
  const std::string digits = last == std::string::npos ? name : name.substr(last + 1);
  return digits.empty() || digits.size() > 17 ? std::int64_t{1} << 60 : std::stoll(digits);
}

bool is_there(const Path& path) {
  std::error_code error;
  const bool found = std::filesystem::exists(path, error);
  if (error) fail(ErrorKind::kCheckpoint, "cannot look at {}: {}", path.string(), error.message());
  return found;
}

void require_existing(const Path& path) {
  if (is_there(path)) return;
  Path parent = path.parent_path();
  if (parent.empty()) parent = ".";
  if (!is_there(parent))
    fail(ErrorKind::kCheckpoint, "checkpoint {} does not exist, nor does {}", path.string(), parent.string());
  const std::string names = nearby(parent, step_wanted(path));
  fail(ErrorKind::kCheckpoint, "checkpoint {} does not exist; {} holds {}", path.string(), parent.string(),
       names.empty() ? "no checkpoints" : names);
}

void check_file(const Path& directory, const CheckpointInfo::File& file) {
  const Path path = directory / file.name;
  std::error_code error;
  const std::uintmax_t bytes = std::filesystem::file_size(path, error);
  if (error)
    fail(ErrorKind::kCheckpoint, "{} is missing or unreadable: {} (the manifest says {} bytes)",
         path.string(), error.message(), file.bytes);
  if (bytes != static_cast<std::uintmax_t>(file.bytes))
    fail(ErrorKind::kCheckpoint, "{} has {} bytes, the manifest says {}", path.string(), bytes, file.bytes);
}

/// A trailing slash gone, so that parent and name are what they look like.
Path without_slash(const Path& path) {
  return path.has_filename() || !path.has_parent_path() ? path : path.parent_path();
}

}  // namespace

CheckpointInfo open_checkpoint(const std::filesystem::path& step_directory) {
  const Path path = without_slash(step_directory);
  require_existing(path);
  std::error_code ignored;
  const Path manifest = path / checkpoint::kManifestName;
  if (!std::filesystem::is_regular_file(manifest, ignored)) {
    const std::string names = nearby(path, std::int64_t{1} << 60);
    fail(ErrorKind::kCheckpoint, "{} is not a complete checkpoint (no {}){}", path.string(),
         checkpoint::kManifestName, names.empty() ? "" : "; below it are " + names);
  }
  CheckpointInfo info = checkpoint::parse_manifest(manifest, checkpoint::read_text(manifest));
  info.path = path;
  for (const CheckpointInfo::File& file : info.files) check_file(path, file);
  return info;
}

std::optional<CheckpointInfo> newest_checkpoint(const std::filesystem::path& directory,
                                                std::vector<std::string>* skipped) {
  if (!is_there(directory)) return std::nullopt;
  for (const checkpoint::StepDirectory& step : checkpoint::list_steps(directory)) {
    const Path path = directory / step.name;
    std::string cause = fmt::format("{} is left from an interrupted save", path.string());
    try {
      if (!step.temporary) return open_checkpoint(path);
    } catch (const Error& problem) {
      cause = problem.what();
    }
    if (skipped != nullptr) skipped->push_back(cause);
  }
  return std::nullopt;
}

}  // namespace octet
