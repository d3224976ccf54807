#include "piece_reader.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <mutex>
#include <thread>

#include "octet/base/error.h"

namespace octet {
namespace {

constexpr std::int64_t kPieceBytes = 4 << 20;

/// A range of one file.
struct Range {
  const InputFile* file = nullptr;
  std::int64_t begin = 0, bytes = 0;
};

std::vector<Range> cut(const std::vector<InputFile>& files) {
  std::vector<Range> ranges;
  for (const InputFile& file : files)
    for (std::int64_t begin = 0; begin < file.bytes; begin += kPieceBytes)
      ranges.push_back({&file, begin, std::min(kPieceBytes, file.bytes - begin)});
  return ranges;
}

PieceReader::Piece read_range(const Range& range) {
  const std::string& path = range.file->path;
  const int descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) fail(ErrorKind::kData, "{}: cannot be opened: {}", path, std::strerror(errno));
  PieceReader::Piece piece;
  piece.text.resize(static_cast<std::size_t>(range.bytes));
  piece.ends_file = range.begin + range.bytes == range.file->bytes;
  std::int64_t done = 0;
  ssize_t got = 1;
  while (done < range.bytes && got > 0) {
    got = pread(descriptor, piece.text.data() + done, static_cast<std::size_t>(range.bytes - done),
                range.begin + done);
    if (got < 0 && errno == EINTR)
      got = 1;
    else if (got > 0)
      done += got;
  }
  const int error = errno;
  close(descriptor);
  if (done < range.bytes)
    fail(ErrorKind::kData, "{}: cannot be read at byte {}: {}", path, range.begin + done,
         got < 0 ? std::strerror(error) : "the file has become shorter");
  return piece;
}

}  // namespace

struct PieceReader::Impl {
  struct Slot {
    Piece piece;
    bool ready = false;
  };

  const std::vector<Range> ranges;
  std::vector<Slot> slots;

  std::mutex mutex;  ///< guards what follows, and `ready` of every slot
  std::condition_variable changed;
  std::size_t taken = 0;   ///< ranges that threads have begun
  std::size_t served = 0;  ///< pieces whose slot is free again
  bool handed_out = false;
  bool stop = false;
  std::exception_ptr failure;

  std::vector<std::thread> threads;

  Impl(const std::vector<InputFile>& files, int count)
      : ranges(cut(files)), slots(2 * static_cast<std::size_t>(count) + 1) {
    for (int t = 0; t < count; ++t) threads.emplace_back(&Impl::read, this);
  }
  ~Impl() {
    {
      const std::lock_guard lock(mutex);
      stop = true;
    }
    changed.notify_all();
    for (std::thread& thread : threads) thread.join();
  }

  void read() {
    try {
      for (;;) {
        std::unique_lock lock(mutex);
        changed.wait(lock, [&] { return stop || taken == ranges.size() || taken < served + slots.size(); });
        if (stop || taken == ranges.size()) return;
        const std::size_t number = taken++;
        lock.unlock();
        Piece piece = read_range(ranges[number]);
        lock.lock();
        slots[number % slots.size()] = {std::move(piece), true};
        changed.notify_all();
      }
    } catch (...) {
      const std::lock_guard lock(mutex);
      failure = std::current_exception();
      changed.notify_all();
    }
  }
};

PieceReader::PieceReader(const std::vector<InputFile>& files, int threads) {
  OCTET_ASSERT(threads > 0);
  impl_ = std::make_unique<Impl>(files, threads);
}

PieceReader::~PieceReader() = default;

const PieceReader::Piece* PieceReader::next() {
  std::unique_lock lock(impl_->mutex);
  if (impl_->handed_out) {
    impl_->slots[impl_->served % impl_->slots.size()].ready = false;
    ++impl_->served;
    impl_->handed_out = false;
    impl_->changed.notify_all();
  }
  if (impl_->served == impl_->ranges.size()) return nullptr;
  const auto& slot = impl_->slots[impl_->served % impl_->slots.size()];
  impl_->changed.wait(lock, [&] { return slot.ready || impl_->failure != nullptr; });
  if (impl_->failure != nullptr) std::rethrow_exception(impl_->failure);
  impl_->handed_out = true;
  return &slot.piece;
}

}  // namespace octet
