#pragma once

#include "octet/ops/ops.h"

namespace octet {

/// What makes the copies that an operator was to write itself, from its whole output.
inline Quantize quantize_of(const Tensor& from, const OutputCodes& to) {
  Quantize args;
  args.from = from;
  args.largest = to.largest;
  args.seen = to.seen;
  args.codes = to.codes;
  args.transposed = to.transposed;
  args.scales.values = args.transposed_scales.values = to.scale;
  return args;
}

}  // namespace octet
