#pragma once

#include "float8_codes.cuh"

namespace octet::cuda {

/// How a block of kThreads makes 8-bit codes of a tile of a matrix and their transpose: a thread has kGroup
/// adjacent rows of kPack adjacent elements, half a warp lies along a row of the tile. Sizes of the matrix
/// are multiples of 16.
struct CodeTile {
  static constexpr int kThreads = 256;
  static constexpr int kPack = 8;
  static constexpr int kGroup = 4;  ///< a word of codes in the transposed copy
  static constexpr int kCols = 128;
  static constexpr int kPacks = kCols / kPack;
  static constexpr int kGroups = kThreads / kPacks;
  static constexpr int kRows = kGroups * kGroup;  ///< 64
  static constexpr int kChunk = 16;               ///< codes of a row of the transposed copy stored at once
  static constexpr int kWords = kGroups + 1;      ///< of a column in shared memory, one to spread banks
  using Elements = Pack<bf16, kPack>;

  /// Shared memory for one transposed tile: [place of a column][group of rows], columns in an order in which
  /// the threads of a warp meet different banks.
  using Turned = unsigned[kCols * kWords];

  int pack, group;  ///< of this thread
  std::int64_t first_row, first_col;

  __device__ CodeTile()
      : pack(static_cast<int>(threadIdx.x) % kPacks),
        group(static_cast<int>(threadIdx.x) / kPacks),
        first_row(std::int64_t{blockIdx.y} * kRows),
        first_col(std::int64_t{blockIdx.x} * kCols) {}
  /// This thread's first element.
  __device__ std::int64_t row() const { return first_row + group * kGroup; }
  __device__ std::int64_t col() const { return first_col + pack * kPack; }

  /// Lays this thread's codes, kGroup rows of them, into the transposed tile.
  __device__ void turn(const uint2 (&rows)[kGroup], Turned& turned) const {
    unsigned columns[2][4];
    turn_bytes({rows[0].x, rows[1].x, rows[2].x, rows[3].x}, columns[0]);
    turn_bytes({rows[0].y, rows[1].y, rows[2].y, rows[3].y}, columns[1]);
#pragma unroll
    for (int n = 0; n < kPack; ++n) turned[(n * kPacks + pack) * kWords + group] = columns[n / 4][n % 4];
  }

  /// After a barrier: writes the transposed tile of a [rows, cols] matrix to `to` [cols, rows].
  __device__ void write(const Turned& turned, std::uint8_t* to, std::int64_t rows, std::int64_t cols) const {
    constexpr int kChunks = kRows / kChunk;  // of a column
    for (int i = static_cast<int>(threadIdx.x); i < kCols * kChunks; i += kThreads) {
      const int place = i / kChunks, part = i % kChunks;
      const std::int64_t at_col = first_col + place % kPacks * kPack + place / kPacks;
      const std::int64_t at_row = first_row + part * kChunk;
      if (at_col >= cols || at_row >= rows) continue;
      const unsigned* const words = turned + place * kWords + part * (kChunk / kGroup);
      *reinterpret_cast<uint4*>(to + at_col * rows + at_row) =
          make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
};

}  // namespace octet::cuda
