// What cuBLASLt has no epilogue for, by kernels of its own.
#include "../hopper/tiling.h"
#include "drivers.h"
#include "matmul_plans.h"

namespace octet::cuda {

std::int64_t MatmulPlans::column_sums_scratch(std::int64_t tokens, std::int64_t cols) {
  return hopper::column_sum_rows(tokens) * cols * size_of(DType::kF32);
}

void MatmulPlans::run(cudaStream_t stream, const Matmul& args) {
  const Tensor& sums = args.bias_gradient;
  if (!prefers_own(args)) {
    if (args.y.size() > 0) run_library(stream, args);
    if (sums) bias_backward(stream, args.y, sums, args.accumulate_bias_gradient, *scratch_);
    return;
  }
  const std::int64_t rows = hopper::column_sum_rows(args.y.rows), cols = args.y.cols;
  float* const partials =
      sums ? static_cast<float*>(scratch_->reserve(column_sums_scratch(args.y.rows, cols))) : nullptr;
  own_->run(stream, args, partials);
  if (sums) {
    sum_partials(stream, partials, rows, cols, cols, sums.as<float>(), args.accumulate_bias_gradient);
  }
}

void MatmulPlans::run_apart(cudaStream_t stream, const Matmul& args) {
  Matmul plain = args;
  plain.epilogue = Epilogue::kNone;
  plain.inner = {};
  plain.bias_gradient = {};
  if (args.epilogue == Epilogue::kGelu || args.epilogue == Epilogue::kSwiglu) {
    plain.y = args.inner;
    run(stream, plain);
    if (args.epilogue == Epilogue::kGelu) {
      gelu_forward(stream, args.inner, args.y, {});
    } else {
      swiglu_forward(stream, args.inner, args.y, {});
    }
    return;
  }
  plain.bias = {};
  run(stream, plain);
  if (args.bias) add_bias(stream, args.bias, args.y);
  if (args.epilogue == Epilogue::kGeluGradient) gelu_gradient(stream, args.inner, args.y);
  if (is_gated(args.epilogue)) swiglu_backward(stream, args.inner, args.y, {});
}

}  // namespace octet::cuda
