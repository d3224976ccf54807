#include "octet/base/box.h"

#include <algorithm>

#include "octet/base/error.h"

namespace octet {

std::optional<Box> intersect(const Box& a, const Box& b) {
  const std::int64_t row = std::max(a.row, b.row), row_end = std::min(a.row + a.rows, b.row + b.rows);
  const std::int64_t col = std::max(a.col, b.col), col_end = std::min(a.col + a.cols, b.col + b.cols);
  if (row >= row_end || col >= col_end) return std::nullopt;
  return Box{row, col, row_end - row, col_end - col};
}

std::vector<FlatBox> boxes_of_range(const Box& outer, std::int64_t begin, std::int64_t end) {
  OCTET_ASSERT(begin >= 0 && begin <= end && end <= outer.size());
  std::vector<FlatBox> result;
  const auto add = [&](std::int64_t at, std::int64_t rows, std::int64_t cols) {
    if (rows * cols == 0) return;
    const Box box{outer.row + at / outer.cols, outer.col + at % outer.cols, rows, cols};
    result.push_back({box, at});
  };
  std::int64_t at = begin;
  if (at < end && at % outer.cols != 0) {
    const std::int64_t count = std::min(outer.cols - at % outer.cols, end - at);
    add(at, 1, count);
    at += count;
  }
  if (at < end) {
    const std::int64_t whole = (end - at) / outer.cols;
    add(at, whole, outer.cols);
    at += whole * outer.cols;
  }
  if (at < end) add(at, 1, end - at);
  return result;
}

}  // namespace octet
