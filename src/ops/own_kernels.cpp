#include "octet/ops/ops.h"

namespace octet {

OwnKernels own_kernels_of(const std::string& word) {
  if (word == "own") return OwnKernels::kAlways;
  return word == "auto" ? OwnKernels::kWhereFaster : OwnKernels::kNever;
}

}  // namespace octet
