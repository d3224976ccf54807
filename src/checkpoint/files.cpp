#include "files.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "octet/base/error.h"

namespace octet::checkpoint {
namespace {

/// Linux moves at most 2 GiB - 4 KiB in one call.
constexpr std::int64_t kBytesPerCall = std::int64_t{1} << 30;
constexpr std::int64_t kHashBuffer = std::int64_t{8} << 20;

std::string hexadecimal(XXH128_hash_t hash) {
  return fmt::format("{:016x}{:016x}", static_cast<std::uint64_t>(hash.high64),
                     static_cast<std::uint64_t>(hash.low64));
}

}  // namespace

PosixFile::PosixFile(const std::filesystem::path& path, int flags)
    : path_(path), descriptor_(::open(path.c_str(), flags | O_CLOEXEC, 0666)) {
  if (descriptor_ < 0)
    fail(ErrorKind::kCheckpoint, "cannot open {}: {}", path_.string(), std::strerror(errno));
}

PosixFile::~PosixFile() {
  ::close(descriptor_);
}

void PosixFile::write_at(const void* data, std::int64_t bytes, std::int64_t offset) {
  const char* from = static_cast<const char*>(data);
  std::int64_t left = bytes;
  while (left > 0) {
    const ssize_t done = ::pwrite(descriptor_, from, std::min(left, kBytesPerCall), offset);
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0)
      fail(ErrorKind::kCheckpoint, "cannot write {} ({} bytes at offset {}): {}", path_.string(), left,
           offset, std::strerror(done < 0 ? errno : ENOSPC));
    from += done;
    offset += done;
    left -= done;
  }
}

std::int64_t PosixFile::read_some(void* data, std::int64_t bytes, std::int64_t offset) const {
  char* to = static_cast<char*>(data);
  std::int64_t total = 0;
  while (total < bytes) {
    const ssize_t done =
        ::pread(descriptor_, to + total, std::min(bytes - total, kBytesPerCall), offset + total);
    if (done < 0 && errno == EINTR) continue;
    if (done < 0)
      fail(ErrorKind::kCheckpoint, "cannot read {} ({} bytes at offset {}): {}", path_.string(), bytes,
           offset, std::strerror(errno));
    if (done == 0) break;
    total += done;
  }
  return total;
}

void PosixFile::read_at(void* data, std::int64_t bytes, std::int64_t offset) const {
  const std::int64_t done = read_some(data, bytes, offset);
  if (done != bytes)
    fail(ErrorKind::kCheckpoint, "{} ends early: {} bytes wanted at offset {}, {} found", path_.string(),
         bytes, offset, done);
}

void PosixFile::reserve(std::int64_t bytes) {
  if (bytes == 0 || ::fallocate(descriptor_, 0, 0, bytes) == 0 || errno == EOPNOTSUPP || errno == ENOSYS)
    return;
  fail(ErrorKind::kCheckpoint, "cannot reserve {} bytes for {}: {}", bytes, path_.string(),
       std::strerror(errno));
}

void PosixFile::resize(std::int64_t bytes) {
  if (::ftruncate(descriptor_, bytes) != 0)
    fail(ErrorKind::kCheckpoint, "cannot give {} a size of {} bytes: {}", path_.string(), bytes,
         std::strerror(errno));
}

void PosixFile::sync() {
  if (::fsync(descriptor_) != 0)
    fail(ErrorKind::kCheckpoint, "cannot sync {}: {}", path_.string(), std::strerror(errno));
}

MemoryFile::MemoryFile() : descriptor_(::memfd_create("octet-checkpoint", MFD_CLOEXEC)) {
  if (descriptor_ < 0) fail(ErrorKind::kCheckpoint, "cannot make a file in memory: {}", std::strerror(errno));
}

MemoryFile::~MemoryFile() {
  ::close(descriptor_);
}

void MemoryFile::take_over(int descriptor) const {
  if (::dup3(descriptor_, descriptor, O_CLOEXEC) < 0)
    fail(ErrorKind::kCheckpoint, "cannot redirect a file to memory: {}", std::strerror(errno));
}

void MemoryFile::copy_to(PosixFile& target) const {
  target.resize(::lseek(descriptor_, 0, SEEK_END));
  std::vector<char> buffer;
  off_t begin = ::lseek(descriptor_, 0, SEEK_DATA);
  while (begin >= 0) {
    const off_t end = ::lseek(descriptor_, begin, SEEK_HOLE);
    buffer.resize(static_cast<std::size_t>(end - begin));
    if (::pread(descriptor_, buffer.data(), buffer.size(), begin) != end - begin)
      fail(ErrorKind::kCheckpoint, "cannot read a file in memory: {}", std::strerror(errno));
    target.write_at(buffer.data(), end - begin, begin);
    begin = ::lseek(descriptor_, end, SEEK_DATA);
  }
}

void sync_directory(const std::filesystem::path& directory) {
  PosixFile(directory, O_RDONLY | O_DIRECTORY).sync();
}

void write_text_durably(const std::filesystem::path& path, const std::string& text) {
  std::filesystem::path temporary = path;
  temporary += ".tmp";
  {
    PosixFile file(temporary, O_WRONLY | O_CREAT | O_TRUNC);
    file.write_at(text.data(), static_cast<std::int64_t>(text.size()), 0);
    file.sync();
  }
  std::filesystem::rename(temporary, path);
  sync_directory(path.parent_path());
}

std::string read_text(const std::filesystem::path& path) {
  const PosixFile file(path, O_RDONLY);
  std::string text(std::filesystem::file_size(path), '\0');
  file.read_at(text.data(), static_cast<std::int64_t>(text.size()), 0);
  return text;
}

std::string hash_of_file(const std::filesystem::path& path) {
  const PosixFile file(path, O_RDONLY);
  const std::unique_ptr<XXH3_state_t, decltype(&XXH3_freeState)> state(XXH3_createState(), &XXH3_freeState);
  XXH3_128bits_reset(state.get());
  std::vector<char> buffer(static_cast<std::size_t>(kHashBuffer));
  std::int64_t offset = 0;
  while (const std::int64_t bytes = file.read_some(buffer.data(), kHashBuffer, offset)) {
    XXH3_128bits_update(state.get(), buffer.data(), static_cast<std::size_t>(bytes));
    offset += bytes;
  }
  return hexadecimal(XXH3_128bits_digest(state.get()));
}

std::string hash_of_text(const std::string& text) {
  return hexadecimal(XXH3_128bits(text.data(), text.size()));
}

std::string random_identity() {
  std::random_device source;
  return fmt::format("{:08x}{:08x}{:08x}{:08x}", source(), source(), source(), source());
}

}  // namespace octet::checkpoint
