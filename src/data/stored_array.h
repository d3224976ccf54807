#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "hdf5_handle.h"

namespace octet {

/// Where the elements of a one-dimensional HDF5 dataset lie in the file. Reading takes plain `pread`, so it
/// needs no HDF5 and may be done by any thread; unlike a memory map, a failing disk is an error, not a
/// signal.
struct StoredArray {
  int element_bytes = 0;
  std::int64_t count = 0;  ///< elements
  std::int64_t chunk = 0;  ///< elements a chunk; `count` where contiguous
  std::vector<std::uint64_t>
      chunk_at;            ///< byte offset in the file of each chunk, kAbsent for one never written
  std::uint64_t fill = 0;  ///< value of elements never written

  static constexpr std::uint64_t kAbsent = ~std::uint64_t{0};
};

/// Finds the bytes of an unfiltered, contiguous or chunked dataset. Throws Error(kData) that names the file
/// and dataset when it is compressed, of another rank, not written, or reaches beyond `file_bytes`.
StoredArray locate(hid_t dataset, const std::string& path, const char* name, std::int64_t file_bytes);

/// Copies elements [begin, begin + count) as stored. Throws Error(kData) when the file cannot be read.
void read_stored(const StoredArray& array, int descriptor, const std::string& path, std::int64_t begin,
                 std::int64_t count, std::byte* out);

}  // namespace octet
