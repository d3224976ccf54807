#include "matmul.h"

#include <algorithm>

#include "../../runtime/cuda/cuda_check.h"
#include "hopper_gpu.h"
#include "matmul_kernel.cuh"
#include "tensor_maps.h"

namespace octet::hopper {
namespace {

// Boxes of 128 rows along m or n and 64 k. Where k is the row of the matrix, 64 elements along m or n at a
// time, as one more index.
CUtensorMap operand_map(const Tensor& tensor, bool turned) {
  const auto rows = static_cast<cuuint64_t>(tensor.rows), cols = static_cast<cuuint64_t>(tensor.cols);
  if (turned)
    return tensor_map<3>(tensor.data, tensor.dtype, {64, rows, cols / 64}, {cols * 2, 128}, {64, kDepth, 2});
  return tensor_map<2>(tensor.data, tensor.dtype, {cols, rows}, {cols * 2}, {kDepth, 128});
}

// Boxes of 64 rows of 128 bytes.
CUtensorMap result_map(const Tensor& tensor) {
  const auto size = static_cast<cuuint64_t>(size_of(tensor.dtype));
  const auto rows = static_cast<cuuint64_t>(tensor.rows), cols = static_cast<cuuint64_t>(tensor.cols);
  return tensor_map<2>(tensor.data, tensor.dtype, {cols, rows}, {cols * size},
                       {static_cast<cuuint32_t>(128 / size), 64});
}

template <bool kTurnA, bool kTurnB, Ending kEnding>
void launch(cudaStream_t stream, const Product& product, int clusters) {
  const auto kernel = product_kernel<kTurnA, kTurnB, kEnding>;
  using Mine = Resources<kEnding>;
  OCTET_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Mine::kSharedBytes));
  const int grid = 2 * std::min(clusters, product.row_tiles * product.col_tiles);
  kernel<<<static_cast<unsigned>(grid), kThreads, Mine::kSharedBytes, stream>>>(product);
  OCTET_CUDA_LAUNCH("product_kernel");
}

}  // namespace

Products::Products() {
  const int multiprocessors = hopper_multiprocessors();
  if (multiprocessors == 0) return;
  const auto kernel = product_kernel<false, false, Ending::kBfloat16>;
  using Plain = Resources<Ending::kBfloat16>;
  OCTET_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Plain::kSharedBytes));
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {2, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(multiprocessors / 2 * 2));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = Plain::kSharedBytes;
  config.attrs = &cluster;
  config.numAttrs = 1;
  OCTET_CUDA(cudaOccupancyMaxActiveClusters(&clusters_, kernel, &config));
  taken_ = make_work_counter();
}

bool Products::takes(const Matmul& args) const {
  return clusters_ > 0 && hopper::takes(args);
}

double Products::efficiency(const Matmul& args) const {
  return hopper::efficiency(args, clusters_);
}

void Products::run(cudaStream_t stream, const Matmul& args, float* column_sums) {
  const std::int64_t k = args.transpose_a ? args.a.rows : args.a.cols;
  Product product{};
  product.a = operand_map(args.a, args.transpose_a);
  product.b = operand_map(args.b, !args.transpose_b);
  product.y = result_map(args.y);
  product.bias = static_cast<const __nv_bfloat16*>(args.bias.data);
  product.inner = args.inner ? result_map(args.inner) : product.y;
  product.y_elements = static_cast<__nv_bfloat16*>(args.y.data);
  product.inner_elements = static_cast<__nv_bfloat16*>(args.inner.data);
  product.sums = column_sums;
  product.rows = static_cast<int>(args.y.rows);
  product.cols = static_cast<int>(args.y.cols);
  product.row_tiles = static_cast<int>(row_tiles(args));
  product.col_tiles = static_cast<int>(col_tiles(args));
  product.steps = static_cast<int>((k + kDepth - 1) / kDepth);
  product.taken = taken_.get();
  product.taken_before = taken_before_;
  taken_before_ +=
      static_cast<unsigned>(product.row_tiles * product.col_tiles);  // every tile asks for one more
  if (args.transpose_a) {
    if (args.accumulate) {
      launch<true, true, Ending::kAdd>(stream, product, clusters_);
    } else {
      launch<true, true, Ending::kFloat32>(stream, product, clusters_);
    }
    return;
  }
  switch (args.epilogue) {
    case Epilogue::kNone:
      if (args.transpose_b) {
        launch<false, false, Ending::kBfloat16>(stream, product, clusters_);
      } else {
        launch<false, true, Ending::kBfloat16>(stream, product, clusters_);
      }
      break;
    case Epilogue::kGelu:
      launch<false, false, Ending::kGelu>(stream, product, clusters_);
      break;
    case Epilogue::kGeluGradient:
      if (column_sums != nullptr) {
        launch<false, true, Ending::kGeluGradientSums>(stream, product, clusters_);
      } else {
        launch<false, true, Ending::kGeluGradient>(stream, product, clusters_);
      }
      break;
    case Epilogue::kSwiglu:
      launch<false, false, Ending::kSwiglu>(stream, product, clusters_);
      break;
    case Epilogue::kSwigluGradient:
      launch<false, true, Ending::kSwigluGradient>(stream, product, clusters_);
      break;
    case Epilogue::kSwigluGradientAlone:
      launch<false, true, Ending::kSwigluGradientAlone>(stream, product, clusters_);
      break;
  }
}

}  // namespace octet::hopper
