#pragma once

#include <array>
#include <cstdint>

#include "octet/base/float8_scale.h"
#include "octet/ops/ops.h"

namespace octet::cpu {

/// The value of every code of an 8-bit type.
template <typename T>
const std::array<float, 256>& float8_values() {
  static const std::array<float, 256> values = [] {
    std::array<float, 256> table{};
    for (int code = 0; code < 256; ++code) {
      T element;
      element.bits = static_cast<std::uint8_t>(code);
      table[static_cast<std::size_t>(code)] = static_cast<float>(element);
    }
    return table;
  }();
  return values;
}

/// Number of the scale of element (row, col).
inline std::int64_t scale_index(const Scales& scales, std::int64_t row, std::int64_t col) {
  switch (scales.cut) {
    case ScaleCut::kRow128:
      return col / kScaleBlock * scales.values.cols + row;
    case ScaleCut::kSquare128:
      return row / kScaleBlock * scales.values.cols + col / kScaleBlock;
    case ScaleCut::kTensor:
      break;
  }
  return 0;
}

}  // namespace octet::cpu
