#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

namespace octet {

/// A rectangular part of a global matrix: rows [row, row + rows) × columns [col, col + cols).
/// Vectors of n elements are matrices of shape [1, n].
struct Box {
  std::int64_t row = 0, col = 0, rows = 0, cols = 0;

  std::int64_t size() const { return rows * cols; }
  bool operator==(const Box&) const = default;
};

/// The common part of two boxes of the same matrix; nothing when they do not overlap.
std::optional<Box> intersect(const Box& a, const Box& b);

/// A box together with where its first element lies in the flat (row-major) order of the enclosing box.
struct FlatBox {
  Box box;
  std::int64_t begin = 0;  ///< flat position, inside the enclosing box, of the first element
};

/// Elements [begin, end) of the row-major order of `outer`, as at most three boxes (a partial first row,
/// whole rows, a partial last row), each contiguous in that order.
std::vector<FlatBox> boxes_of_range(const Box& outer, std::int64_t begin, std::int64_t end);

}  // namespace octet
