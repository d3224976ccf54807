// What an emulated CUtensorMap says, in place of the driver's own form.
#pragma once

#include <cuda.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace emulation {

/// A matrix in memory of which boxes are copied, their rows 128 bytes long; from the innermost index on.
struct TensorMap {
  std::byte* data = nullptr;
  CUtensorMapDataType type{};
  std::uint32_t rank = 0;
  std::array<std::int64_t, 3> sizes{1, 1, 1};
  std::array<std::int64_t, 3> strides{};  ///< bytes
  std::array<std::int64_t, 3> box{1, 1, 1};

  std::int64_t element_bytes() const { return type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 ? 4 : 2; }
  std::int64_t box_bytes() const { return box[0] * box[1] * box[2] * element_bytes(); }
};
static_assert(sizeof(TensorMap) <= sizeof(CUtensorMap));

inline TensorMap decoded(const CUtensorMap& map) {
  TensorMap result;
  std::memcpy(static_cast<void*>(&result), &map, sizeof result);
  return result;
}

/// cuTensorMapEncodeTiled, for what octet makes of it.
inline CUresult encode_tensor_map(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* data,
                                  const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                                  const cuuint32_t* steps, CUtensorMapInterleave interleave,
                                  CUtensorMapSwizzle swizzle, CUtensorMapL2promotion,
                                  CUtensorMapFloatOOBfill fill) {
  if (rank < 2 || rank > 3 || reinterpret_cast<std::uintptr_t>(data) % 16 != 0 ||
      interleave != CU_TENSOR_MAP_INTERLEAVE_NONE || swizzle != CU_TENSOR_MAP_SWIZZLE_128B ||
      fill != CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE ||
      (type != CU_TENSOR_MAP_DATA_TYPE_FLOAT32 && type != CU_TENSOR_MAP_DATA_TYPE_BFLOAT16)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  TensorMap result;
  result.data = static_cast<std::byte*>(data);
  result.type = type;
  result.rank = rank;
  result.strides[0] = result.element_bytes();
  for (std::size_t i = 0; i < rank; ++i) {
    if (sizes[i] == 0 || box[i] == 0 || box[i] > 256 || steps[i] != 1) return CUDA_ERROR_INVALID_VALUE;
    if (i > 0 && (strides[i - 1] == 0 || strides[i - 1] % 16 != 0)) return CUDA_ERROR_INVALID_VALUE;
    result.sizes[i] = static_cast<std::int64_t>(sizes[i]);
    result.box[i] = static_cast<std::int64_t>(box[i]);
    if (i > 0) result.strides[i] = static_cast<std::int64_t>(strides[i - 1]);
  }
  if (result.box[0] * result.element_bytes() != 128) return CUDA_ERROR_INVALID_VALUE;
  *map = {};
  std::memcpy(static_cast<void*>(map), &result, sizeof result);
  return CUDA_SUCCESS;
}

}  // namespace emulation
