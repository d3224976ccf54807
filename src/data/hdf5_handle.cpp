#include "hdf5_handle.h"

#include <cstring>
#include <vector>

#include "octet/base/error.h"

namespace octet::hdf5 {
namespace {

herr_t take_first(unsigned, const H5E_error2_t* entry, void* text) {
  auto& out = *static_cast<std::string*>(text);
  if (out.empty() && entry->desc != nullptr) out = entry->desc;
  return 0;
}

}  // namespace

Quiet::Quiet() {
  H5Eget_auto2(H5E_DEFAULT, &print_, &print_data_);
  H5Eset_auto2(H5E_DEFAULT, nullptr, nullptr);
}

Quiet::~Quiet() {
  H5Eset_auto2(H5E_DEFAULT, print_, print_data_);
}

std::string last_error() {
  std::string text;
  H5Ewalk2(H5E_DEFAULT, H5E_WALK_UPWARD, take_first, &text);
  return text.empty() ? "no reason given" : text;
}

Properties file_access() {
  Properties access(H5Pcreate(H5P_FILE_ACCESS));
  H5Pset_file_locking(access, false, true);
  H5Pset_libver_bounds(access, H5F_LIBVER_V18, H5F_LIBVER_V110);
  return access;
}

std::string type_name(hid_t type) {
  const H5T_class_t kind = H5Tget_class(type);
  if (kind == H5T_STRING) return "string";
  if (kind != H5T_INTEGER && kind != H5T_FLOAT) return fmt::format("HDF5 class {}", static_cast<int>(kind));
  const char* stem = kind == H5T_FLOAT ? "float" : H5Tget_sign(type) == H5T_SGN_NONE ? "uint" : "int";
  const std::size_t size = H5Tget_size(type);
  const bool big = size > 1 && H5Tget_order(type) == H5T_ORDER_BE;
  return fmt::format("{}{}{}", stem, 8 * size, big ? " big-endian" : "");
}

std::optional<std::int64_t> read_integer(hid_t object, const char* name) {
  if (H5Aexists(object, name) <= 0) return std::nullopt;
  Attribute attribute(H5Aopen(object, name, H5P_DEFAULT));
  Type type(H5Aget_type(attribute));
  Space space(H5Aget_space(attribute));
  std::int64_t value = 0;
  if (H5Tget_class(type) != H5T_INTEGER || H5Sget_simple_extent_npoints(space) != 1 ||
      H5Aread(attribute, H5T_NATIVE_INT64, &value) < 0)
    return std::nullopt;
  return value;
}

std::optional<std::string> read_string(hid_t object, const char* name) {
  if (H5Aexists(object, name) <= 0) return std::nullopt;
  Attribute attribute(H5Aopen(object, name, H5P_DEFAULT));
  Type type(H5Aget_type(attribute));
  Space space(H5Aget_space(attribute));
  if (H5Tget_class(type) != H5T_STRING || H5Sget_simple_extent_npoints(space) != 1) return std::nullopt;
  if (H5Tis_variable_str(type) > 0) {
    char* text = nullptr;
    if (H5Aread(attribute, type, &text) < 0) return std::nullopt;
    std::string value = text == nullptr ? "" : text;
    H5free_memory(text);
    return value;
  }
  std::vector<char> text(H5Tget_size(type) + 1, '\0');
  if (H5Aread(attribute, type, text.data()) < 0) return std::nullopt;
  return std::string(text.data());
}

void write_integer(hid_t object, const char* name, std::int64_t value) {
  if (H5Aexists(object, name) > 0) H5Adelete(object, name);
  Space scalar(H5Screate(H5S_SCALAR));
  Attribute attribute(H5Acreate2(object, name, H5T_STD_I64LE, scalar, H5P_DEFAULT, H5P_DEFAULT));
  if (H5Awrite(attribute, H5T_NATIVE_INT64, &value) < 0)
    fail(ErrorKind::kData, "HDF5 attribute {} could not be written: {}", name, last_error());
}

void write_string(hid_t object, const char* name, const std::string& value) {
  constexpr std::size_t kLongest = 32768;
  const std::string text = value.size() <= kLongest ? value : value.substr(0, kLongest) + " ...";
  Type type(H5Tcopy(H5T_C_S1));
  H5Tset_size(type, text.size() + 1);
  H5Tset_cset(type, H5T_CSET_UTF8);
  Space scalar(H5Screate(H5S_SCALAR));
  Attribute attribute(H5Acreate2(object, name, type, scalar, H5P_DEFAULT, H5P_DEFAULT));
  if (H5Awrite(attribute, type, text.c_str()) < 0)
    fail(ErrorKind::kData, "HDF5 attribute {} could not be written: {}", name, last_error());
}

}  // namespace octet::hdf5
