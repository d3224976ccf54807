#include "hdf5_file.h"

#include <algorithm>

#include "octet/base/error.h"

namespace octet::checkpoint {
namespace {

constexpr hsize_t kAlignment = 65536;

/// The innermost reason on HDF5's error stack, which holds the system's errno text where there is one.
std::string reason() {
  std::string text;
  const auto take_first = [](unsigned, const H5E_error2_t* entry, void* result) -> herr_t {
    auto* found = static_cast<std::string*>(result);
    if (found->empty() && entry->desc != nullptr) *found = entry->desc;
    return 0;
  };
  H5Ewalk2(H5E_DEFAULT, H5E_WALK_UPWARD, take_first, &text);
  H5Eclear2(H5E_DEFAULT);
  return text.empty() ? "HDF5 gives no reason" : text;
}

/// Access properties of all our files. No locks: a shard has one writer, and readers come after its rename.
Hdf5Handle access_properties() {
  H5Eset_auto2(H5E_DEFAULT, nullptr, nullptr);
  Hdf5Handle properties(H5Pcreate(H5P_FILE_ACCESS), &H5Pclose, "HDF5 file access properties");
  check_hdf5(H5Pset_alignment(properties, kAlignment, kAlignment), "HDF5 alignment");
  check_hdf5(H5Pset_libver_bounds(properties, H5F_LIBVER_V18, H5F_LIBVER_V110), "HDF5 version bounds");
  check_hdf5(H5Pset_file_locking(properties, false, true), "HDF5 file locking");
  return properties;
}

Hdf5Handle open_attribute(hid_t object, const char* name) {
  return {H5Aopen(object, name, H5P_DEFAULT), &H5Aclose, fmt::format("attribute {}", name)};
}

}  // namespace

Hdf5Handle::Hdf5Handle(hid_t id, Close close, const std::string& subject) : id_(id), close_(close) {
  if (id < 0) fail(ErrorKind::kCheckpoint, "{}: {}", subject, reason());
}

Hdf5Handle::~Hdf5Handle() {
  if (id_ >= 0) close_(id_);
}

void Hdf5Handle::close(const std::string& subject) {
  check_hdf5(close_(std::exchange(id_, -1)), subject);
}

void check_hdf5(herr_t status, const std::string& subject) {
  if (status < 0) fail(ErrorKind::kCheckpoint, "{}: {}", subject, reason());
}

Hdf5Handle create_hdf5(const MemoryFile& memory, const std::filesystem::path& target) {
  std::filesystem::path scratch = target;
  scratch += ".metadata";
  const std::string subject = fmt::format("cannot create {}", scratch.string());
  Hdf5Handle file(H5Fcreate(scratch.c_str(), H5F_ACC_EXCL, H5P_DEFAULT, access_properties()), &H5Fclose,
                  subject);
  std::filesystem::remove(scratch);
  void* descriptor = nullptr;
  check_hdf5(H5Fget_vfd_handle(file, H5P_DEFAULT, &descriptor), subject);
  memory.take_over(*static_cast<int*>(descriptor));
  return file;
}

Hdf5Handle open_hdf5(const std::filesystem::path& path) {
  return {H5Fopen(path.c_str(), H5F_ACC_RDONLY, access_properties()), &H5Fclose,
          fmt::format("cannot open {} as HDF5", path.string())};
}

void write_text_attribute(hid_t object, const char* name, const std::string& text) {
  const std::string subject = fmt::format("attribute {}", name);
  const Hdf5Handle type(H5Tcopy(H5T_C_S1), &H5Tclose, subject);
  check_hdf5(H5Tset_size(type, text.size() + 1), subject);
  const Hdf5Handle space(H5Screate(H5S_SCALAR), &H5Sclose, subject);
  const Hdf5Handle attribute(H5Acreate2(object, name, type, space, H5P_DEFAULT, H5P_DEFAULT), &H5Aclose,
                             subject);
  check_hdf5(H5Awrite(attribute, type, text.c_str()), subject);
}

void write_integers_attribute(hid_t object, const char* name, const std::vector<std::int64_t>& values) {
  const std::string subject = fmt::format("attribute {}", name);
  const hsize_t count = values.size();
  const Hdf5Handle space(count == 1 ? H5Screate(H5S_SCALAR) : H5Screate_simple(1, &count, nullptr), &H5Sclose,
                         subject);
  const Hdf5Handle attribute(H5Acreate2(object, name, H5T_STD_I64LE, space, H5P_DEFAULT, H5P_DEFAULT),
                             &H5Aclose, subject);
  check_hdf5(H5Awrite(attribute, H5T_NATIVE_INT64, values.data()), subject);
}

std::string read_text_attribute(hid_t object, const char* name) {
  const std::string subject = fmt::format("attribute {}", name);
  const Hdf5Handle attribute = open_attribute(object, name);
  const Hdf5Handle type(H5Aget_type(attribute), &H5Tclose, subject);
  if (H5Tget_class(type) != H5T_STRING || H5Tis_variable_str(type) > 0)
    fail(ErrorKind::kCheckpoint, "{} is not a text of fixed length", subject);
  std::string text(H5Tget_size(type), '\0');
  check_hdf5(H5Aread(attribute, type, text.data()), subject);
  text.resize(std::min(text.find('\0'), text.size()));  // shorter texts are padded with zeros
  return text;
}

std::int64_t read_integer_attribute(hid_t object, const char* name) {
  const std::string subject = fmt::format("attribute {}", name);
  const Hdf5Handle attribute = open_attribute(object, name);
  const Hdf5Handle space(H5Aget_space(attribute), &H5Sclose, subject);
  if (H5Sget_simple_extent_npoints(space) != 1) fail(ErrorKind::kCheckpoint, "{} is not one number", subject);
  std::int64_t value = 0;
  check_hdf5(H5Aread(attribute, H5T_NATIVE_INT64, &value), subject);
  return value;
}

}  // namespace octet::checkpoint
