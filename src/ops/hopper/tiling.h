#pragma once

#include <cstdint>

#include "octet/ops/ops.h"

/// How hopper::Products cuts a product, and which it takes: all that can be said without a GPU.
namespace octet::hopper {

constexpr int kRows = 128, kCols = 256, kDepth = 64;  ///< of a block's tile, and of a step along k

/// Columns of y in a tile; with SwiGLU sums are twice as wide.
inline std::int64_t tile_cols(const Matmul& args) {
  return args.epilogue == Epilogue::kSwiglu ? kCols / 2 : kCols;
}
/// Tiles of a cluster of two blocks, one above the other.
inline std::int64_t row_tiles(std::int64_t rows) {
  return (rows + 2 * kRows - 1) / (2 * kRows);
}
inline std::int64_t row_tiles(const Matmul& args) {
  return row_tiles(args.y.rows);
}
inline std::int64_t col_tiles(const Matmul& args) {
  return (args.y.cols + tile_cols(args) - 1) / tile_cols(args);
}

/// Rows of partial sums over the rows of y: one for each block's tile.
inline std::int64_t column_sum_rows(std::int64_t rows) {
  return row_tiles(rows) * 2;
}

/// Of the time that a GPU on which so many clusters run at once takes for this product, the part that is
/// spent on elements of y: the last tiles may reach over its edges, and the last round of tiles may be short.
inline double efficiency(const Matmul& args, int clusters) {
  const std::int64_t tiles = row_tiles(args) * col_tiles(args);
  const std::int64_t rounds = (tiles + clusters - 1) / clusters;
  return static_cast<double>(args.y.size()) /
         static_cast<double>(rounds * clusters * 2 * kRows * tile_cols(args));
}

/// Whether the copy engine moves parts of this matrix: rows of whole 16 bytes.
inline bool copyable(const Tensor& tensor) {
  return reinterpret_cast<std::uintptr_t>(tensor.data) % 16 == 0 &&
         tensor.cols * size_of(tensor.dtype) % 16 == 0 && tensor.size() > 0;
}

/// Whether there is a kernel for this product: sizes and addresses that the copy engine takes (also whole 64
/// elements where k is not the innermost index), and an epilogue that its form has.
inline bool takes(const Matmul& args) {
  const bool forward = !args.transpose_a && args.transpose_b;
  const bool input_gradient = !args.transpose_a && !args.transpose_b;
  const bool weight_gradient = args.transpose_a && !args.transpose_b;
  if (args.a.dtype != DType::kBF16 || args.b.dtype != DType::kBF16) return false;
  if (!copyable(args.a) || !copyable(args.b) || !copyable(args.y)) return false;
  if ((args.transpose_a && args.a.cols % 64 != 0) || (!args.transpose_b && args.b.cols % 64 != 0))
    return false;
  if (args.inner && !copyable(args.inner)) return false;
  if (args.bias &&
      (args.bias.dtype != DType::kBF16 || reinterpret_cast<std::uintptr_t>(args.bias.data) % 16 != 0))
    return false;
  if (weight_gradient) return args.y.dtype == DType::kF32 && !args.bias && !args.addend;
  if (args.y.dtype != DType::kBF16 || args.accumulate || args.addend) return false;
  switch (args.epilogue) {
    case Epilogue::kNone:
      return forward || (input_gradient && !args.bias);
    case Epilogue::kGelu:
      return forward;
    case Epilogue::kSwiglu:
      return forward && !args.bias && args.y.cols % tile_cols(args) == 0;
    case Epilogue::kGeluGradient:
    case Epilogue::kSwigluGradient:
    case Epilogue::kSwigluGradientAlone:
      break;
  }
  return input_gradient && !args.bias;
}

}  // namespace octet::hopper
