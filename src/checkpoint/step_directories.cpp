#include "step_directories.h"

#include <fcntl.h>
#include <stdio.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>

#include "files.h"
#include "octet/base/error.h"
#include "octet/checkpoint/checkpoint.h"

namespace octet::checkpoint {
namespace {

constexpr std::string_view kPrefix = "step-";
constexpr std::string_view kTemporary = ".tmp-";

std::optional<StepDirectory> parse(const std::string& name) {
  if (!name.starts_with(kPrefix)) return std::nullopt;
  StepDirectory result;
  result.name = name;
  const char* const end = name.data() + name.size();
  const auto [rest, error] = std::from_chars(name.data() + kPrefix.size(), end, result.step);
  if (error != std::errc{} || result.step < 0) return std::nullopt;
  result.temporary = std::string_view(rest, end).starts_with(kTemporary);
  if (rest != end && !result.temporary) return std::nullopt;
  return result;
}

/// Swaps two directories at once, so that at no moment neither is there. False where the file system cannot.
bool exchange(const std::filesystem::path& a, const std::filesystem::path& b) {
  if (::renameat2(AT_FDCWD, a.c_str(), AT_FDCWD, b.c_str(), RENAME_EXCHANGE) == 0) return true;
  if (errno == EINVAL || errno == ENOSYS || errno == ENOTSUP) return false;
  fail(ErrorKind::kCheckpoint, "cannot exchange {} and {}: {}", a.string(), b.string(), std::strerror(errno));
}

/// Removes a checkpoint under a temporary name, so that a half removed one is never taken for a complete one.
void retire(const std::filesystem::path& directory, const StepDirectory& old) {
  const std::filesystem::path hidden = directory / temporary_name(old.step, random_identity());
  std::filesystem::rename(directory / old.name, hidden);
  std::filesystem::remove_all(hidden);
}

/// Where directories cannot be exchanged: the old one comes back if the new one cannot take its place.
void replace_in_two_steps(const std::filesystem::path& temporary, const std::filesystem::path& destination) {
  std::filesystem::path aside = temporary;
  aside += "-replaced";
  std::filesystem::rename(destination, aside);
  std::error_code error;
  std::filesystem::rename(temporary, destination, error);
  if (error) {
    std::filesystem::rename(aside, destination);
    fail(ErrorKind::kCheckpoint, "cannot rename {} to {}: {}", temporary.string(), destination.string(),
         error.message());
  }
  std::filesystem::remove_all(aside);
}

bool is_complete(const std::filesystem::path& path) {
  try {
    open_checkpoint(path);
    return true;
  } catch (const Error&) {
    return false;
  }
}

}  // namespace

std::string step_name(std::int64_t step) {
  return fmt::format("{}{:08}", kPrefix, step);
}

std::string temporary_name(std::int64_t step, const std::string& identity) {
  return fmt::format("{}{}{}", step_name(step), kTemporary, identity.substr(0, 8));
}

std::vector<StepDirectory> list_steps(const std::filesystem::path& directory) {
  std::vector<StepDirectory> steps;
  std::error_code error;
  std::filesystem::directory_iterator entries(directory, error);
  if (error) fail(ErrorKind::kCheckpoint, "cannot list {}: {}", directory.string(), error.message());
  for (const auto& entry : entries)
    if (std::optional<StepDirectory> step = parse(entry.path().filename().string())) steps.push_back(*step);
  std::sort(steps.begin(), steps.end(), [](const StepDirectory& a, const StepDirectory& b) {
    return std::pair(a.step, a.name) > std::pair(b.step, b.name);
  });
  return steps;
}

void remove_temporaries(const std::filesystem::path& directory) {
  for (const StepDirectory& step : list_steps(directory))
    if (step.temporary) std::filesystem::remove_all(directory / step.name);
}

void publish(const std::filesystem::path& temporary, const std::filesystem::path& destination) {
  const std::filesystem::path parent = destination.parent_path();
  if (!std::filesystem::exists(destination)) {
    std::filesystem::rename(temporary, destination);
  } else if (exchange(temporary, destination)) {
    std::filesystem::remove_all(temporary);
  } else {
    replace_in_two_steps(temporary, destination);
  }
  sync_directory(parent);
}

void prune(const std::filesystem::path& directory, std::int64_t keep, const std::string& written) {
  if (keep == 0) return;
  std::int64_t complete = 0;
  for (const StepDirectory& step : list_steps(directory)) {
    if (step.temporary || !is_complete(directory / step.name)) continue;
    if (++complete > keep && step.name != written) retire(directory, step);
  }
}

}  // namespace octet::checkpoint
