#include "input_files.h"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <set>
#include <utility>

#include "octet/base/error.h"

namespace octet {
namespace {

namespace fs = std::filesystem;

bool looks_binary(const std::string& path) {
  std::vector<char> head(65536);
  std::ifstream file(path, std::ios::binary);
  if (!file) fail(ErrorKind::kData, "{}: cannot be opened: {}", path, std::strerror(errno));
  file.read(head.data(), static_cast<std::streamsize>(head.size()));
  return std::memchr(head.data(), '\0', static_cast<std::size_t>(file.gcount())) != nullptr;
}

std::vector<std::string> files_below(const std::string& directory) {
  std::vector<std::string> paths;
  try {
    for (auto entry = fs::recursive_directory_iterator(directory); entry != fs::end(entry); ++entry) {
      const bool hidden = entry->path().filename().string().starts_with('.');
      if (hidden && entry->is_directory()) entry.disable_recursion_pending();
      if (!hidden && entry->is_regular_file()) paths.push_back(entry->path().string());
    }
  } catch (const fs::filesystem_error& error) {
    fail(ErrorKind::kData, "{}: cannot be listed: {}", directory, error.what());
  }
  std::sort(paths.begin(), paths.end());
  return paths;
}

/// Collects files and remembers which it has seen, under whatever name.
class Collector {
 public:
  void add(const std::string& path) {
    struct stat status = {};
    if (stat(path.c_str(), &status) != 0)
      fail(ErrorKind::kData, "{}: cannot be read: {}", path, std::strerror(errno));
    if (!seen_.emplace(status.st_dev, status.st_ino).second) {
      ++found_.repeated;
    } else if (looks_binary(path)) {
      if (found_.binary++ == 0) found_.first_binary = path;
    } else if (status.st_size > 0) {
      found_.files.push_back({path, status.st_size});
      found_.bytes += status.st_size;
    }
  }
  InputFiles take() { return std::move(found_); }

 private:
  InputFiles found_;
  std::set<std::pair<dev_t, ino_t>> seen_;
};

}  // namespace

InputFiles find_input_files(const std::vector<std::string>& inputs) {
  Collector collector;
  for (const std::string& input : inputs) {
    std::error_code error;
    const fs::file_status status = fs::status(input, error);
    if (fs::is_directory(status)) {
      for (const std::string& path : files_below(input)) collector.add(path);
    } else if (fs::is_regular_file(status)) {
      collector.add(input);
    } else {
      fail(ErrorKind::kUsage, "input {}: {}", input,
           fs::exists(status) ? "neither a file nor a directory"
           : error            ? error.message()
                              : "does not exist");
    }
  }
  return collector.take();
}

}  // namespace octet
