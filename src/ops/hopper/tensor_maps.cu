#include "tensor_maps.h"

#include "../../runtime/cuda/cuda_check.h"
#include "octet/base/error.h"

namespace octet::hopper {
namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

// The driver's function, which the runtime library finds without linking to libcuda.
Encode find_encode() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  OCTET_CUDA(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault,
                                              &found));
  if (function == nullptr || found != cudaDriverEntryPointSuccess) {
    fail(ErrorKind::kDevice, "the CUDA driver has no cuTensorMapEncodeTiled, which comes with CUDA 12.0");
  }
  return reinterpret_cast<Encode>(function);
}

}  // namespace

template <std::size_t kRank>
CUtensorMap tensor_map(void* data, DType dtype, const std::array<cuuint64_t, kRank>& sizes,
                       const std::array<cuuint64_t, kRank - 1>& strides,
                       const std::array<cuuint32_t, kRank>& box) {
  static const Encode function = find_encode();
  CUtensorMap map{};
  std::array<cuuint32_t, kRank> steps{};
  steps.fill(1);
  const auto type = dtype == DType::kF32 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const CUresult result = function(&map, type, kRank, data, sizes.data(), strides.data(), box.data(),
                                   steps.data(), CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                   CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    fail(ErrorKind::kDevice, "cuTensorMapEncodeTiled: error {} for an array of {} x {} elements",
         static_cast<int>(result), sizes[1], sizes[0]);
  }
  return map;
}
template CUtensorMap tensor_map<2>(void*, DType, const std::array<cuuint64_t, 2>&,
                                   const std::array<cuuint64_t, 1>&, const std::array<cuuint32_t, 2>&);
template CUtensorMap tensor_map<3>(void*, DType, const std::array<cuuint64_t, 3>&,
                                   const std::array<cuuint64_t, 2>&, const std::array<cuuint32_t, 3>&);

CUtensorMap sample_map(const SampleRows& rows, std::int64_t batch, std::int64_t rows_per_sample,
                       std::int64_t cols, int box_rows) {
  const std::int64_t sample_stride = batch > 1 ? rows.sample_stride : rows_per_sample * rows.row_stride;
  return tensor_map<3>(
      rows.data, DType::kBF16,
      {static_cast<cuuint64_t>(cols), static_cast<cuuint64_t>(rows_per_sample),
       static_cast<cuuint64_t>(batch)},
      {static_cast<cuuint64_t>(rows.row_stride * 2), static_cast<cuuint64_t>(sample_stride * 2)},
      {64, static_cast<cuuint32_t>(box_rows), 1});
}

}  // namespace octet::hopper
