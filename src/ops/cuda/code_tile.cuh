#pragma once

#include "float8_codes.cuh"

namespace octet::cuda {

/// How a block of kThreads makes 8-bit codes of a tile of a matrix and their transpose: a thread has kGroup
/// adjacent rows of kPack adjacent elements, half a warp lies along a row of the tile. Sizes of the matrix
/// are multiples of 16.
class CodeTile {
 public:
  static constexpr int kThreads = 256;
  static constexpr int kPack = 8;
  static constexpr int kGroup = 4;  ///< a word of codes in the transposed copy
  static constexpr int kCols = 128;
  static constexpr int kPacks = kCols / kPack;
  static constexpr int kGroups = kThreads / kPacks;
  static constexpr int kRows = kGroups * kGroup;  ///< 64
  static constexpr int kBand = 4;                 ///< rows of tiles, see grid()
  static constexpr int kChunk = 16;               ///< codes of a row of the transposed copy stored at once
  /// Words of a column in shared memory: some more than there are, so that the threads of a warp meet
  /// different banks.
  static constexpr int kWords = kGroups + 32 / kPacks;
  using Elements = Pack<bf16, kPack>;

  /// Shared memory for one transposed tile: [place of a column][group of rows]. Columns whose numbers leave
  /// the same remainder by kPack are adjacent.
  struct alignas(16) Turned {
    unsigned words[kCols * kWords];
  };

  /// One block a tile. Blocks that run at the same time lie in bands of kBand rows of tiles, so that longer
  /// runs of the transposed copy's rows are complete before they leave the cache.
  static dim3 grid(std::int64_t rows, std::int64_t cols) {
    const dim3 grid(grid_size(divide_up(cols, kCols) * kBand), grid_size(divide_up(rows, kRows * kBand)));
    OCTET_ASSERT(grid.y <= 65535);
    return grid;
  }

  /// Tiles of a [rows, cols] matrix. `last_first`: the matrix is gone through from its end, part of which the
  /// cache may hold still.
  __device__ CodeTile(std::int64_t rows, std::int64_t cols, bool last_first = false)
      : rows_(static_cast<int>(rows)), cols_(static_cast<int>(cols)) {
    const unsigned band = last_first ? gridDim.y - 1 - blockIdx.y : blockIdx.y;
    first_row_ = static_cast<int>(band * kBand + blockIdx.x % kBand) * kRows;
    first_col_ = static_cast<int>(blockIdx.x / kBand) * kCols;
  }
  __device__ int pack() const { return static_cast<int>(threadIdx.x) % kPacks; }
  __device__ int group() const { return static_cast<int>(threadIdx.x) / kPacks; }
  /// The tile's first element. Below the matrix's last row there may be tiles that have nothing to do.
  __device__ int first_row() const { return first_row_; }
  __device__ int first_col() const { return first_col_; }
  /// This thread's first element, and whether the matrix has it, and the others with it.
  __device__ int row() const { return first_row_ + group() * kGroup; }
  __device__ int col() const { return first_col_ + pack() * kPack; }
  __device__ bool inside() const { return row() < rows_ && col() < cols_; }

  /// Lays this thread's codes, kGroup rows of them, into the transposed tile.
  __device__ void turn(const uint2 (&codes)[kGroup], Turned& turned) const {
    unsigned columns[2][4];
    turn_bytes({codes[0].x, codes[1].x, codes[2].x, codes[3].x}, columns[0]);
    turn_bytes({codes[0].y, codes[1].y, codes[2].y, codes[3].y}, columns[1]);
    unsigned* const to = turned.words + pack() * kWords + group();
#pragma unroll
    for (int n = 0; n < kPack; ++n) to[n * kPacks * kWords] = columns[n / 4][n % 4];
  }

  /// After a barrier: writes transposed tiles of kCount matrices of this shape to to[k] [cols, rows].
  template <int kCount>
  __device__ void write(const Turned (&turned)[kCount], std::uint8_t* const (&to)[kCount]) const {
    constexpr int kChunks = kRows / kChunk;      // of a column
    constexpr int kPlaces = kThreads / kChunks;  // columns at work at once
    static_assert(kPlaces % kPacks == 0 && kCols % kPlaces == 0);
    const int place = static_cast<int>(threadIdx.x) / kChunks, part = static_cast<int>(threadIdx.x) % kChunks;
    const int row = first_row_ + part * kChunk, col = first_col_ + place % kPacks * kPack;
    if (row >= rows_ || col >= cols_) return;
    const std::int64_t at = std::int64_t{col + place / kPacks} * rows_ + row;
    const std::int64_t step = std::int64_t{kPlaces / kPacks} * rows_;
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      const unsigned* words = turned[k].words + place * kWords + part * (kChunk / kGroup);
      std::uint8_t* column = to[k] + at;
#pragma unroll
      for (int i = 0; i < kCols / kPlaces; ++i) {
        const uint2 low = *reinterpret_cast<const uint2*>(words);
        const uint2 high = *reinterpret_cast<const uint2*>(words + 2);
        *reinterpret_cast<uint4*>(column) = make_uint4(low.x, low.y, high.x, high.y);
        words += kPlaces * kWords;
        column += step;
      }
    }
  }

 private:
  int rows_, cols_, first_row_, first_col_;
};

}  // namespace octet::cuda
