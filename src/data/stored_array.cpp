#include "stored_array.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "octet/base/error.h"

namespace octet {
namespace {

void read_bytes(int descriptor, const std::string& path, std::uint64_t offset, std::int64_t count,
                std::byte* out) {
  while (count > 0) {
    const ssize_t got = pread(descriptor, out, static_cast<std::size_t>(count), static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0)
      fail(ErrorKind::kData, "{}: reading {} bytes at byte {} failed: {}", path, count, offset,
           got < 0 ? std::strerror(errno) : "the file has become shorter");
    out += got;
    offset += static_cast<std::uint64_t>(got);
    count -= got;
  }
}

std::vector<std::uint64_t> chunk_offsets(hid_t dataset, const StoredArray& array, const std::string& path,
                                         const char* name) {
  std::vector<std::uint64_t> offsets;
  for (std::int64_t begin = 0; begin < array.count; begin += array.chunk) {
    const hsize_t coordinate = static_cast<hsize_t>(begin);
    unsigned skipped_filters = 0;
    haddr_t address = HADDR_UNDEF;
    hsize_t stored_bytes = 0;
    if (H5Dget_chunk_info_by_coord(dataset, &coordinate, &skipped_filters, &address, &stored_bytes) < 0)
      fail(ErrorKind::kData, "{}: chunk {} of /{} cannot be found: {}", path, begin / array.chunk, name,
           hdf5::last_error());
    offsets.push_back(address == HADDR_UNDEF ? StoredArray::kAbsent : address);
  }
  return offsets;
}

}  // namespace

StoredArray locate(hid_t dataset, const std::string& path, const char* name, std::int64_t file_bytes) {
  hdf5::Space space(H5Dget_space(dataset));
  hdf5::Type type(H5Dget_type(dataset));
  hdf5::Properties properties(H5Dget_create_plist(dataset));
  if (H5Sget_simple_extent_ndims(space) != 1)
    fail(ErrorKind::kData, "{}: /{} has {} dimensions, expected 1", path, name,
         H5Sget_simple_extent_ndims(space));
  if (H5Pget_nfilters(properties) > 0)
    fail(ErrorKind::kData,
         "{}: /{} is compressed; octet reads uncompressed datasets (h5repack -f NONE IN OUT makes one)", path,
         name);

  StoredArray array;
  array.element_bytes = static_cast<int>(H5Tget_size(type));
  array.count = H5Sget_simple_extent_npoints(space);
  array.chunk = array.count;
  const H5D_layout_t layout = H5Pget_layout(properties);
  if (layout == H5D_CHUNKED) {
    hsize_t chunk = 0;
    H5Pget_chunk(properties, 1, &chunk);
    array.chunk = static_cast<std::int64_t>(chunk);
    H5Pget_fill_value(properties, H5T_NATIVE_UINT64, &array.fill);
    array.chunk_at = chunk_offsets(dataset, array, path, name);
  } else if (layout == H5D_CONTIGUOUS && array.count > 0) {
    const haddr_t address = H5Dget_offset(dataset);
    if (address == HADDR_UNDEF)
      fail(ErrorKind::kData, "{}: /{} has {} elements but none was written to this file", path, name,
           array.count);
    array.chunk_at = {address};
  } else if (array.count > 0) {
    fail(ErrorKind::kData, "{}: /{} is neither contiguous nor chunked", path, name);
  }

  const auto chunk_bytes = static_cast<std::uint64_t>(array.chunk * array.element_bytes);
  for (const std::uint64_t at : array.chunk_at)
    if (at != StoredArray::kAbsent && at + chunk_bytes > static_cast<std::uint64_t>(file_bytes))
      fail(ErrorKind::kData, "{}: truncated: /{} needs {} bytes, the file has {}", path, name,
           at + chunk_bytes, file_bytes);
  return array;
}

void read_stored(const StoredArray& array, int descriptor, const std::string& path, std::int64_t begin,
                 std::int64_t count, std::byte* out) {
  OCTET_ASSERT(begin >= 0 && count >= 0 && begin + count <= array.count);
  while (count > 0) {
    const std::int64_t inside = begin % array.chunk;
    const std::int64_t part = std::min(count, array.chunk - inside);
    const std::uint64_t at = array.chunk_at[static_cast<std::size_t>(begin / array.chunk)];
    if (at == StoredArray::kAbsent) {
      for (std::int64_t i = 0; i < part; ++i)
        std::memcpy(out + i * array.element_bytes, &array.fill,
                    static_cast<std::size_t>(array.element_bytes));
    } else {
      read_bytes(descriptor, path, at + static_cast<std::uint64_t>(inside * array.element_bytes),
                 part * array.element_bytes, out);
    }
    out += part * array.element_bytes;
    begin += part;
    count -= part;
  }
}

}  // namespace octet
