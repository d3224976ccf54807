// 8-bit copies of bfloat16 matrices, straight and transposed in one pass over tiles; of runs of weights; and
// the transposition of such copies.
// Bytes moved an element: 2 for the largest magnitude; 2 + 1 for each copy; of a run its own size + 1; 2 for
// a transposition.
#include <algorithm>

#include "code_tile.cuh"
#include "drivers.h"

namespace octet::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kTile = 128;  // rows and columns
constexpr int kPack = 8;    // adjacent elements of a row that a thread loads at once
constexpr int kGroup = 4;   // adjacent rows of which it loads them: a word of codes in the transposed copy
constexpr int kPacks = kTile / kPack;              // packs of a tile's row; half a warp lies along it
constexpr int kGroups = kThreads / kPacks;         // groups of rows at work at once
constexpr int kPasses = kTile / kGroup / kGroups;  // until the tile is done
constexpr int kWords = kTile / kGroup + 1;  // words of a tile's column in shared memory, one to spread banks
static_assert(kTile == kScaleBlock);

__device__ float block_max(float value) {
  __shared__ float warps[kThreads / 32];
  value = warp_max(value);
  __syncthreads();
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
  __syncthreads();
  float largest = warps[0];
  for (int i = 1; i < kThreads / 32; ++i) largest = fmaxf(largest, warps[i]);
  return largest;
}

// kPack adjacent elements as bfloat16.
template <typename T>
__device__ Pack<bf16, kPack> load_rounded(const T* from) {
  if constexpr (std::is_same_v<T, bf16>) {
    return Pack<bf16, kPack>::load(from);
  } else {
    constexpr int kHalf = kPack / 2;
    const Pack<T, kHalf> low = Pack<T, kHalf>::load(from), high = Pack<T, kHalf>::load(from + kHalf);
    Pack<bf16, kPack> pack;
#pragma unroll
    for (int n = 0; n < kHalf; ++n) {
      pack.set(n, low[n]);
      pack.set(n + kHalf, high[n]);
    }
    return pack;
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads) largest_kernel(const T* x, std::int64_t packs, float* largest) {
  constexpr int kUnroll = 4;
  float found = 0.0f;
  const std::int64_t stride = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t first = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; first < packs;
       first += stride * kUnroll) {
    Pack<bf16, kPack> pack[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const std::int64_t i = first + u * stride;
      pack[u] = i < packs ? load_rounded(x + i * kPack) : Pack<bf16, kPack>{};
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
      for (int n = 0; n < kPack; ++n) found = fmaxf(found, fabsf(pack[u][n]));
    }
  }
  found = block_max(found);
  if (threadIdx.x == 0 && found > 0.0f) raise(largest, found);
}

struct Copies {
  std::uint8_t *codes, *transposed;
  float *scales, *transposed_scales;
  std::int64_t scale_cols, transposed_scale_cols;
  const float* largest;
  float* seen;
};

// One scale for all.
template <bool kE4M3>
__global__ void __launch_bounds__(CodeTile::kThreads, 5)
    tensor_kernel(const bf16* from, std::int64_t rows, std::int64_t cols, Copies out) {
  __shared__ CodeTile::Turned turned[1];
  const CodeTile tile(rows, cols);
  const bool inside = tile.inside();
  const std::int64_t at = tile.row() * cols + tile.col();
  CodeTile::Elements elements[CodeTile::kGroup];
#pragma unroll
  for (int i = 0; i < CodeTile::kGroup; ++i) {
    if (inside) elements[i] = CodeTile::Elements::load(from + at + i * cols);
  }
  const float scale = scale_of<kE4M3>(*out.largest), inverse = 1.0f / scale;
  const float known = out.seen != nullptr ? *out.seen : 0.0f;
  LargestMagnitude found;
  if (inside) {
    uint2 codes[CodeTile::kGroup];
#pragma unroll
    for (int i = 0; i < CodeTile::kGroup; ++i) {
      found.take(elements[i]);
      codes[i] = codes_of<kE4M3>(elements[i], inverse);
      if (out.codes != nullptr) *reinterpret_cast<uint2*>(out.codes + at + i * cols) = codes[i];
    }
    if (out.transposed != nullptr) tile.turn(codes, turned[0]);
  }
  if (out.seen != nullptr) raise_by_warp(out.seen, known, found.value());
  if (threadIdx.x == 0 && blockIdx.x == 0 && blockIdx.y == 0) {
    if (out.codes != nullptr) *out.scales = scale;
    if (out.transposed != nullptr) *out.transposed_scales = scale;
  }
  if (out.transposed == nullptr) return;
  __syncthreads();
  tile.write(turned, {out.transposed});
}

// A run of a matrix that has one scale.
constexpr int kRunUnroll = 4;
template <typename T>
__global__ void __launch_bounds__(kThreads) run_kernel(const T* from, std::int64_t packs, std::uint8_t* codes,
                                                       float* to_scale, const float* largest) {
  const float scale = scale_of<true>(*largest), inverse = 1.0f / scale;
  const std::int64_t first = std::int64_t{blockIdx.x} * kThreads * kRunUnroll + threadIdx.x;
  if (first == 0) *to_scale = scale;
  Pack<bf16, kPack> pack[kRunUnroll];
#pragma unroll
  for (int u = 0; u < kRunUnroll; ++u) {
    const std::int64_t i = first + u * kThreads;
    if (i < packs) pack[u] = load_rounded(from + i * kPack);
  }
#pragma unroll
  for (int u = 0; u < kRunUnroll; ++u) {
    const std::int64_t i = first + u * kThreads;
    if (i < packs) *reinterpret_cast<uint2*>(codes + i * kPack) = codes_of<true>(pack[u], inverse);
  }
}

__global__ void __launch_bounds__(CodeTile::kThreads)
    transpose_kernel(const std::uint8_t* from, std::int64_t rows, std::int64_t cols, std::uint8_t* to) {
  __shared__ CodeTile::Turned turned[1];
  const CodeTile tile(rows, cols);
  if (tile.inside()) {
    uint2 codes[CodeTile::kGroup];
#pragma unroll
    for (int i = 0; i < CodeTile::kGroup; ++i)
      codes[i] = *reinterpret_cast<const uint2*>(from + (tile.row() + i) * cols + tile.col());
    tile.turn(codes, turned[0]);
  }
  __syncthreads();
  tile.write(turned, {to});
}

// A thread's part of a tile: kPasses · kGroup rows of kPack elements.
struct Part {
  Pack<bf16, kPack> pack[kPasses][kGroup];
};

// A scale for parts of 128: kCut is kRow128 or kSquare128.
template <bool kE4M3, ScaleCut kCut>
__global__ void __launch_bounds__(kThreads)
    quantize_kernel(const bf16* from, std::int64_t rows, std::int64_t cols, Copies out) {
  // Transposed codes, a word for four rows: [column][group of rows].
  __shared__ unsigned turned[kTile * kWords];
  // By row: the largest magnitudes of the tile's columns.
  __shared__ int column_largest[kTile];
  const int pack = static_cast<int>(threadIdx.x) % kPacks, group = static_cast<int>(threadIdx.x) / kPacks;
  const std::int64_t tile_row = std::int64_t{blockIdx.y} * kTile, tile_col = std::int64_t{blockIdx.x} * kTile;
  const std::int64_t col = tile_col + pack * kPack;
  const auto row_of = [&](int pass) { return tile_row + (pass * kGroups + group) * kGroup; };

  Part part;
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      const std::int64_t row = row_of(pass) + i;
      part.pack[pass][i] =
          row < rows && col < cols ? Pack<bf16, kPack>::load(from + row * cols + col) : Pack<bf16, kPack>{};
    }
  }

  float row_scale[kPasses][kGroup], col_scale[kPack];
  if constexpr (kCut == ScaleCut::kRow128) {
    if (threadIdx.x < kTile) column_largest[threadIdx.x] = 0;
    __syncthreads();
    float column[kPack] = {};
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        float largest = 0.0f;
#pragma unroll
        for (int n = 0; n < kPack; ++n) {
          const float magnitude = fabsf(part.pack[pass][i][n]);
          largest = fmaxf(largest, magnitude);
          column[n] = fmaxf(column[n], magnitude);
        }
        for (int offset = kPacks / 2; offset > 0; offset /= 2)
          largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
        row_scale[pass][i] = scale_of<kE4M3>(largest);
        const std::int64_t row = row_of(pass) + i;
        if (out.codes != nullptr && pack == 0 && row < rows)
          out.scales[tile_col / kTile * out.scale_cols + row] = row_scale[pass][i];
      }
    }
#pragma unroll
    for (int n = 0; n < kPack; ++n) atomicMax(&column_largest[pack * kPack + n], __float_as_int(column[n]));
    __syncthreads();
#pragma unroll
    for (int n = 0; n < kPack; ++n) {
      col_scale[n] = scale_of<kE4M3>(__int_as_float(column_largest[pack * kPack + n]));
      if (out.transposed != nullptr && group == 0 && col + n < cols)
        out.transposed_scales[tile_row / kTile * out.transposed_scale_cols + col + n] = col_scale[n];
    }
  } else {
    float found = 0.0f;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
#pragma unroll
      for (int i = 0; i < kGroup; ++i) found = largest_magnitude(found, part.pack[pass][i]);
    }
    const float scale = scale_of<kE4M3>(block_max(found));
    if (threadIdx.x == 0) {
      const std::int64_t i = tile_row / kTile, j = tile_col / kTile;
      if (out.codes != nullptr) out.scales[i * out.scale_cols + j] = scale;
      if (out.transposed != nullptr) out.transposed_scales[j * out.transposed_scale_cols + i] = scale;
    }
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
#pragma unroll
      for (int i = 0; i < kGroup; ++i) row_scale[pass][i] = scale;
    }
#pragma unroll
    for (int n = 0; n < kPack; ++n) col_scale[n] = scale;
  }

  if (out.codes != nullptr) {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        const std::int64_t row = row_of(pass) + i;
        if (row >= rows || col >= cols) continue;
        const float inverse = 1.0f / row_scale[pass][i];
        unsigned low = 0, high = 0;
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          low |= code_of<kE4M3>(part.pack[pass][i][n] * inverse) << (8 * n);
          high |= code_of<kE4M3>(part.pack[pass][i][n + 4] * inverse) << (8 * n);
        }
        *reinterpret_cast<uint2*>(out.codes + row * cols + col) = make_uint2(low, high);
      }
    }
  }
  if (out.transposed == nullptr) return;
#pragma unroll
  for (int n = 0; n < kPack; ++n) {
    const float inverse = 1.0f / col_scale[n];
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      unsigned word = 0;
#pragma unroll
      for (int i = 0; i < kGroup; ++i) word |= code_of<kE4M3>(part.pack[pass][i][n] * inverse) << (8 * i);
      turned[(pack * kPack + n) * kWords + pass * kGroups + group] = word;
    }
  }
  __syncthreads();
  constexpr int kChunks = kTile / 16;  // of 16 codes, in a tile's column
  for (int chunk = static_cast<int>(threadIdx.x); chunk < kTile * kChunks; chunk += kThreads) {
    const int column = chunk / kChunks, part_of_column = chunk % kChunks;
    const std::int64_t to_row = tile_col + column, to_col = tile_row + part_of_column * 16;
    if (to_row >= cols || to_col >= rows) continue;
    const unsigned* const words = turned + column * kWords + part_of_column * 4;
    *reinterpret_cast<uint4*>(out.transposed + to_row * rows + to_col) =
        make_uint4(words[0], words[1], words[2], words[3]);
  }
}

void quantize_run(cudaStream_t stream, const Quantize& args) {
  const std::int64_t packs = args.from.size() / kPack;
  const std::int64_t blocks = std::max<std::int64_t>(1, divide_up(packs, kThreads * kRunUnroll));
  with_type(args.from.dtype, [&](auto element) {
    run_kernel<<<grid_size(blocks), kThreads, 0, stream>>>(
        static_cast<const decltype(element)*>(args.from.data), packs,
        static_cast<std::uint8_t*>(args.codes.data), args.scales.values.as<float>(),
        args.largest.as<float>());
  });
  OCTET_CUDA_LAUNCH("quantize (run)");
}

template <bool kE4M3>
void launch(cudaStream_t stream, const Quantize& args, const Copies& out, ScaleCut cut) {
  const std::int64_t rows = args.from.rows, cols = args.from.cols;
  const dim3 grid(grid_size(divide_up(cols, kTile)), grid_size(divide_up(rows, kTile)));
  OCTET_ASSERT(grid.y <= 65535);
  const auto* const from = static_cast<const bf16*>(args.from.data);
  switch (cut) {
    case ScaleCut::kTensor:
      tensor_kernel<kE4M3>
          <<<CodeTile::grid(rows, cols), CodeTile::kThreads, 0, stream>>>(from, rows, cols, out);
      break;
    case ScaleCut::kRow128:
      quantize_kernel<kE4M3, ScaleCut::kRow128><<<grid, kThreads, 0, stream>>>(from, rows, cols, out);
      break;
    case ScaleCut::kSquare128:
      quantize_kernel<kE4M3, ScaleCut::kSquare128><<<grid, kThreads, 0, stream>>>(from, rows, cols, out);
      break;
  }
}

__global__ void __launch_bounds__(kThreads)
    history_kernel(const float* seen, float* history, std::int64_t rows, std::int64_t steps, float* largest,
                   const StepScalars* scalars) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= rows) return;
  float* const row = history + i * steps;
  if (seen != nullptr && scalars->skip == 0)
    row[(scalars->updates - 1) % steps] = isfinite(seen[i]) ? seen[i] : 0.0f;
  float found = row[0];
  for (std::int64_t step = 1; step < steps; ++step) found = fmaxf(found, row[step]);
  if (found > 0.0f) largest[i] = found;
}

}  // namespace

void largest_magnitude(cudaStream_t stream, Tensor x, Tensor largest, int multiprocessors) {
  OCTET_ASSERT(x.size() % kPack == 0 && aligned(16, x.data));
  OCTET_CUDA(cudaMemsetAsync(largest.data, 0, sizeof(float), stream));
  const std::int64_t packs = x.size() / kPack;
  const std::int64_t blocks = std::min<std::int64_t>(divide_up(packs, kThreads * 4), 8 * multiprocessors);
  with_type(x.dtype, [&](auto element) {
    largest_kernel<<<grid_size(blocks), kThreads, 0, stream>>>(static_cast<const decltype(element)*>(x.data),
                                                               packs, static_cast<float*>(largest.data));
  });
  OCTET_CUDA_LAUNCH("largest_magnitude");
}

void quantize(cudaStream_t stream, const Quantize& args) {
  OCTET_ASSERT(aligned(16, args.from.data, args.codes.data, args.transposed.data));
  if (args.from.rows == 1) return quantize_run(stream, args);
  const auto codes = [](const Tensor& tensor) { return static_cast<std::uint8_t*>(tensor.data); };
  const auto floats = [](const Tensor& tensor) { return static_cast<float*>(tensor.data); };
  const Copies out{codes(args.codes),          codes(args.transposed),
                   floats(args.scales.values), floats(args.transposed_scales.values),
                   args.scales.values.cols,    args.transposed_scales.values.cols,
                   floats(args.largest),       floats(args.seen)};
  const ScaleCut cut = args.codes ? args.scales.cut : args.transposed_scales.cut;
  if ((args.codes ? args.codes : args.transposed).dtype == DType::kE4M3) {
    launch<true>(stream, args, out, cut);
  } else {
    launch<false>(stream, args, out, cut);
  }
  OCTET_CUDA_LAUNCH("quantize");
}

void transpose_codes(cudaStream_t stream, Tensor from, Tensor to) {
  OCTET_ASSERT(aligned(16, from.data, to.data));
  transpose_kernel<<<CodeTile::grid(from.rows, from.cols), CodeTile::kThreads, 0, stream>>>(
      static_cast<const std::uint8_t*>(from.data), from.rows, from.cols, static_cast<std::uint8_t*>(to.data));
  OCTET_CUDA_LAUNCH("transpose_codes");
}

void remember_largest(cudaStream_t stream, Tensor seen, Tensor history, Tensor largest,
                      const StepScalars* scalars) {
  history_kernel<<<grid_size(divide_up(history.rows, kThreads)), kThreads, 0, stream>>>(
      static_cast<const float*>(seen.data), history.as<float>(), history.rows, history.cols,
      largest.as<float>(), scalars);
  OCTET_CUDA_LAUNCH("remember_largest");
}

}  // namespace octet::cuda
