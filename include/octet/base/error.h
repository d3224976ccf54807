#pragma once

#include <fmt/format.h>

#include <stdexcept>
#include <string>
#include <utility>

namespace octet {

/// What a failure is about; the value is the exit code of the process.
enum class ErrorKind : int {
  kUsage = 2,       ///< bad command line or deck
  kData = 3,        ///< bad or missing token file
  kCheckpoint = 4,  ///< damaged, foreign or missing checkpoint
  kDevice = 5,      ///< a rank, a device or a library failed
  kDiverged = 6,    ///< training diverged
};

/// A failure whose cause the user, the data or a device owns. The message says what was found and what is
/// allowed, and names the key, file or rank.
class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message) : std::runtime_error(message), kind_(kind) {}
  ErrorKind kind() const { return kind_; }
  int exit_code() const { return static_cast<int>(kind_); }

 private:
  ErrorKind kind_;
};

/// Throws Error(kind) with a message formatted by fmt.
template <typename... Args>
[[noreturn]] void fail(ErrorKind kind, fmt::format_string<Args...> text, Args&&... args) {
  throw Error(kind, fmt::format(text, std::forward<Args>(args)...));
}

[[noreturn]] void assertion_failed(const char* expression, const char* file, int line);

}  // namespace octet

/// Our own invariants, checked in every build: a failure is a bug in octet and ends the run with exit code 5.
#define OCTET_ASSERT(expression) \
  ((expression) ? static_cast<void>(0) : ::octet::assertion_failed(#expression, __FILE__, __LINE__))
