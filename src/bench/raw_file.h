#pragma once

#include <cstdint>
#include <filesystem>

namespace octet {

/// Plain files, as the disk's own measure. Every failure throws Error(kUsage) with path and reason.

/// Writes a new file and returns once it is on the disk.
void write_raw(const std::filesystem::path& path, const void* data, std::int64_t bytes);
/// Reads the first `bytes` bytes, in pieces of some MiB.
void read_raw(const std::filesystem::path& path, void* data, std::int64_t bytes);
/// Asks the system to forget the pages it holds of a file, which it may decline.
void drop_cached(const std::filesystem::path& path);
/// The share, 0 … 1, of a file's pages that the system holds in memory; 1 where it does not say.
double cached_share(const std::filesystem::path& path);

}  // namespace octet
