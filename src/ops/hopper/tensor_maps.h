#pragma once

#include <cuda.h>

#include <array>
#include <cstddef>

#include "octet/ops/ops.h"

namespace octet::hopper {

/// Tells the tensor memory accelerator of a float32 or bfloat16 array whose boxes it copies. Sizes in
/// elements from the innermost index on; bytes from one index to the next of all but the innermost, multiples
/// of 16. A box is 128 bytes wide and lies in shared memory in the swizzle of 128 bytes; beyond the array it
/// reads zeros and writes nothing. Throws Error(kDevice) where the driver refuses.
template <std::size_t kRank>
CUtensorMap tensor_map(void* data, DType dtype, const std::array<cuuint64_t, kRank>& sizes,
                       const std::array<cuuint64_t, kRank - 1>& strides,
                       const std::array<cuuint32_t, kRank>& box);
extern template CUtensorMap tensor_map<2>(void*, DType, const std::array<cuuint64_t, 2>&,
                                          const std::array<cuuint64_t, 1>&, const std::array<cuuint32_t, 2>&);
extern template CUtensorMap tensor_map<3>(void*, DType, const std::array<cuuint64_t, 3>&,
                                          const std::array<cuuint64_t, 2>&, const std::array<cuuint32_t, 3>&);

/// Boxes of `box_rows` rows and 64 columns of one sample's bfloat16 rows [rows_per_sample, cols], which
/// begin at multiples of 16 bytes; the indices are column, row and sample.
CUtensorMap sample_map(const SampleRows& rows, std::int64_t batch, std::int64_t rows_per_sample,
                       std::int64_t cols, int box_rows);

}  // namespace octet::hopper
