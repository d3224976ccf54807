#pragma once

#include <sys/wait.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <stdexcept>
#include <string>

namespace octet {

struct CommandResult {
  int code = -1;       ///< exit code; 128 + signal where a signal ended it
  std::string output;  ///< standard output and standard error together
};

/// Runs a shell command line to its end.
inline CommandResult run_command(const std::string& line) {
  CommandResult result;
  FILE* pipe = popen(("{ " + line + "; } 2>&1").c_str(), "r");
  if (pipe == nullptr) throw std::runtime_error("cannot start " + line);
  char buffer[4096];
  for (std::size_t n; (n = fread(buffer, 1, sizeof buffer, pipe)) > 0;) result.output.append(buffer, n);
  const int status = pclose(pipe);
  result.code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return result;
}

/// `octet ARGUMENTS` as one process.
inline CommandResult run_octet(const std::string& arguments) {
  return run_command(std::string(OCTET_BINARY) + " " + arguments);
}

/// `mpirun -np RANKS octet ARGUMENTS`.
inline CommandResult run_octet_ranks(int ranks, const std::string& arguments) {
  return run_command(std::string(OCTET_MPIRUN) + " --oversubscribe --allow-run-as-root --bind-to none -np " +
                     std::to_string(ranks) + " " + OCTET_BINARY + " " + arguments);
}

/// A new folder, removed with the object.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string name = (std::filesystem::temp_directory_path() / "octet-test-XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) throw std::runtime_error("cannot create " + name);
    path_ = name;
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }
  std::string operator/(const std::string& name) const { return (path_ / name).string(); }

 private:
  std::filesystem::path path_;
};

}  // namespace octet
