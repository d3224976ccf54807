#pragma once

#include <hdf5.h>

#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "files.h"

namespace octet::checkpoint {

/// Owns one HDF5 identifier. HDF5 is not thread-safe here: one thread at a time.
class Hdf5Handle {
 public:
  using Close = herr_t (*)(hid_t);

  /// Takes `id`; throws Error(kCheckpoint) "<subject>: <HDF5's reason>" if it is invalid.
  Hdf5Handle(hid_t id, Close close, const std::string& subject);
  ~Hdf5Handle();
  Hdf5Handle(Hdf5Handle&& other) noexcept : id_(std::exchange(other.id_, -1)), close_(other.close_) {}
  Hdf5Handle& operator=(Hdf5Handle&&) = delete;

  operator hid_t() const { return id_; }
  /// Closes now, and throws if HDF5 could not write what was left.
  void close(const std::string& subject);

 private:
  hid_t id_;
  Close close_;
};

/// Throws Error(kCheckpoint) if an HDF5 call failed.
void check_hdf5(herr_t status, const std::string& subject);

/// A new HDF5 file whose bytes go to `memory`; datasets of 64 KiB and more start at multiples of 64 KiB. HDF5
/// insists on a name: for a moment there is an empty file beside the future `target`.
Hdf5Handle create_hdf5(const MemoryFile& memory, const std::filesystem::path& target);
Hdf5Handle open_hdf5(const std::filesystem::path& path);

void write_text_attribute(hid_t object, const char* name, const std::string& text);
void write_integers_attribute(hid_t object, const char* name, const std::vector<std::int64_t>& values);
std::string read_text_attribute(hid_t object, const char* name);
std::int64_t read_integer_attribute(hid_t object, const char* name);

}  // namespace octet::checkpoint
