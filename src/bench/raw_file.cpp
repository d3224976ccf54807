#include "raw_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <vector>

#include "octet/base/error.h"

namespace octet {

namespace {

constexpr std::int64_t kPiece = 8 << 20;

[[noreturn]] void refuse(const char* what, const std::filesystem::path& path, int code) {
  fail(ErrorKind::kUsage, "{}: cannot be {}: {}", path.string(), what, std::strerror(code));
}

class Descriptor {
 public:
  Descriptor(const std::filesystem::path& path, int flags) : number_(::open(path.c_str(), flags, 0644)) {
    if (number_ < 0) refuse("opened", path, errno);
  }
  ~Descriptor() { ::close(number_); }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int number() const { return number_; }

 private:
  int number_;
};

}  // namespace

void write_raw(const std::filesystem::path& path, const void* data, std::int64_t bytes) {
  const Descriptor file(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC);
  for (std::int64_t at = 0; at < bytes;) {
    const auto piece = static_cast<std::size_t>(std::min(kPiece, bytes - at));
    const ssize_t written = ::write(file.number(), static_cast<const char*>(data) + at, piece);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) refuse("written", path, errno);
    at += written;
  }
  if (::fsync(file.number()) != 0) refuse("synced", path, errno);
}

void read_raw(const std::filesystem::path& path, void* data, std::int64_t bytes) {
  const Descriptor file(path, O_RDONLY | O_CLOEXEC);
  for (std::int64_t at = 0; at < bytes;) {
    const auto piece = static_cast<std::size_t>(std::min(kPiece, bytes - at));
    const ssize_t got = ::read(file.number(), static_cast<char*>(data) + at, piece);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) refuse("read", path, errno);
    if (got == 0) fail(ErrorKind::kUsage, "{} ends at byte {} of {}", path.string(), at, bytes);
    at += got;
  }
}

void drop_cached(const std::filesystem::path& path) {
  const Descriptor file(path, O_RDONLY | O_CLOEXEC);
  static_cast<void>(::posix_fadvise(file.number(), 0, 0, POSIX_FADV_DONTNEED));
}

double cached_share(const std::filesystem::path& path) {
  const Descriptor file(path, O_RDONLY | O_CLOEXEC);
  const auto bytes = std::filesystem::file_size(path);
  if (bytes == 0) return 1.0;
  void* const mapped = ::mmap(nullptr, bytes, PROT_READ, MAP_SHARED, file.number(), 0);
  if (mapped == MAP_FAILED) return 1.0;
  const auto page = static_cast<std::uintmax_t>(::sysconf(_SC_PAGESIZE));
  std::vector<unsigned char> pages((bytes + page - 1) / page);
  const bool known = ::mincore(mapped, bytes, pages.data()) == 0;
  ::munmap(mapped, bytes);
  if (!known) return 1.0;
  const auto held = std::count_if(pages.begin(), pages.end(), [](unsigned char c) { return (c & 1) != 0; });
  return static_cast<double>(held) / static_cast<double>(pages.size());
}

}  // namespace octet
