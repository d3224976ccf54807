#include "octet/ops/ops.h"

namespace octet {

OwnProducts own_products_of(const std::string& word) {
  if (word == "cublas") return OwnProducts::kNever;
  return word == "own" ? OwnProducts::kAlways : OwnProducts::kWhereFaster;
}

}  // namespace octet
