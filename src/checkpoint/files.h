#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

namespace octet::checkpoint {

/// An open file. Every failure throws Error(kCheckpoint) with path, bytes and the system's reason.
class PosixFile {
 public:
  PosixFile(const std::filesystem::path& path, int flags);
  ~PosixFile();
  PosixFile(const PosixFile&) = delete;
  PosixFile& operator=(const PosixFile&) = delete;

  void write_at(const void* data, std::int64_t bytes, std::int64_t offset);
  void read_at(void* data, std::int64_t bytes, std::int64_t offset) const;
  /// Bytes read, fewer than asked for at the end of the file only.
  std::int64_t read_some(void* data, std::int64_t bytes, std::int64_t offset) const;
  /// Claims disk space for the first `bytes` bytes where the file system can, so that a full disk shows at
  /// once.
  void reserve(std::int64_t bytes);
  void resize(std::int64_t bytes);
  /// Returns once the bytes are on the disk.
  void sync();

 private:
  std::filesystem::path path_;
  int descriptor_ = -1;
};

/// A sparse file in memory, gone with the object. HDF5 writes its metadata into one, since a write that fails
/// on a full disk leaves HDF5 1.10 in a state that crashes at exit.
class MemoryFile {
 public:
  MemoryFile();
  ~MemoryFile();
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;

  /// Makes another open descriptor refer to this file.
  void take_over(int descriptor) const;
  /// Writes what is not a hole to the same offsets of `target`, and gives it the same size.
  void copy_to(PosixFile& target) const;

 private:
  int descriptor_ = -1;
};

/// Makes the names in a directory (creations, renames) durable.
void sync_directory(const std::filesystem::path& directory);

/// Writes a text file and syncs it; the file appears under its name only when it is whole.
void write_text_durably(const std::filesystem::path& path, const std::string& text);

std::string read_text(const std::filesystem::path& path);

/// XXH3-128 of a file's bytes, as 32 hexadecimal digits.
std::string hash_of_file(const std::filesystem::path& path);
std::string hash_of_text(const std::string& text);

/// A random number as 32 hexadecimal digits.
std::string random_identity();

}  // namespace octet::checkpoint
