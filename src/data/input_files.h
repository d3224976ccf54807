#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace octet {

/// A file of text to read.
struct InputFile {
  std::string path;
  std::int64_t bytes = 0;
};

struct InputFiles {
  std::vector<InputFile> files;
  std::int64_t bytes = 0;  ///< of all files
  std::int64_t binary = 0, repeated = 0;
  std::string first_binary;
};

/// The files that `inputs` name, in order: directories recursively, sorted by path, without hidden entries.
/// Leaves out binary files (a NUL in the first 64 KiB), files met before under another name, and empty files.
/// Throws Error(kUsage) for an input that is missing or neither file nor directory, Error(kData) for a file
/// that cannot be read.
InputFiles find_input_files(const std::vector<std::string>& inputs);

}  // namespace octet
