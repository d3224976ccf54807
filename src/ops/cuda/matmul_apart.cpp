// What cuBLASLt has no epilogue for, by kernels of its own.
#include "drivers.h"
#include "matmul_plans.h"

namespace octet::cuda {

void MatmulPlans::run_apart(cudaStream_t stream, const Matmul& args) {
  Matmul plain = args;
  plain.epilogue = Epilogue::kNone;
  plain.inner = {};
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
  if (args.epilogue == Epilogue::kSwigluGradient) swiglu_backward(stream, args.inner, args.y, {});
}

}  // namespace octet::cuda
