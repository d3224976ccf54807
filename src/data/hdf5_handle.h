#pragma once

#include <hdf5.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

namespace octet::hdf5 {

/// Owns one HDF5 identifier; closes it with `Close` and never throws then. HDF5 is not thread-safe: only the
/// thread that sets a run up may hold these.
template <herr_t (*Close)(hid_t)>
class Handle {
 public:
  explicit Handle(hid_t id = -1) : id_(id) {}
  ~Handle() { reset(); }
  Handle(Handle&& other) noexcept : id_(std::exchange(other.id_, -1)) {}
  Handle& operator=(Handle&& other) noexcept {
    reset();
    id_ = std::exchange(other.id_, -1);
    return *this;
  }
  operator hid_t() const { return id_; }
  bool valid() const { return id_ >= 0; }
  /// Closes now; false where HDF5 reports a failure, such as a full disk on the last flush.
  bool reset() { return id_ < 0 || Close(std::exchange(id_, -1)) >= 0; }

 private:
  hid_t id_;
};

using File = Handle<H5Fclose>;
using Dataset = Handle<H5Dclose>;
using Space = Handle<H5Sclose>;
using Type = Handle<H5Tclose>;
using Attribute = Handle<H5Aclose>;
using Properties = Handle<H5Pclose>;

/// Keeps HDF5 from printing its error stack while it lives; we report in our own words.
class Quiet {
 public:
  Quiet();
  ~Quiet();
  Quiet(const Quiet&) = delete;
  Quiet& operator=(const Quiet&) = delete;

 private:
  H5E_auto2_t print_ = nullptr;
  void* print_data_ = nullptr;
};

/// What HDF5 says about the innermost cause of its last failure.
std::string last_error();

/// File access without file locks, which some parallel file systems refuse; readable by HDF5 1.8 and later.
Properties file_access();

/// Type as users write it: "uint16", "int32", "float32 big-endian", "string".
std::string type_name(hid_t type);

std::optional<std::int64_t> read_integer(hid_t object, const char* name);
std::optional<std::string> read_string(hid_t object, const char* name);
void write_integer(hid_t object, const char* name, std::int64_t value);
/// Texts beyond 32 KiB are cut and end with " ...", since an attribute has 64 KiB at most.
void write_string(hid_t object, const char* name, const std::string& value);

}  // namespace octet::hdf5
