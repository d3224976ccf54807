#pragma once

#include "octet/ops/ops.h"

namespace octet {

/// Asserts what ops.h asks of a product's sizes, types and epilogue.
void check_matmul(const Matmul& args);

}  // namespace octet
