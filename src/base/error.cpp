#include "octet/base/error.h"

namespace octet {

void assertion_failed(const char* expression, const char* file, int line) {
  fail(ErrorKind::kDevice, "internal error: {} does not hold ({}:{}); please report this", expression, file,
       line);
}

}  // namespace octet
