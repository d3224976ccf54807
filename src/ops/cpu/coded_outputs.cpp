// Outputs in 8 bits alone: computed in bfloat16, then copied.
#include <algorithm>

#include "../float8_checks.h"
#include "../output_codes.h"
#include "cpu_ops.h"

namespace octet {

Tensor CpuOps::wide_output(int number, std::int64_t rows, std::int64_t cols) {
  std::vector<BF16>& memory = wide_outputs_[number];
  memory.resize(std::max(memory.size(), static_cast<std::size_t>(rows * cols)));
  return {memory.data(), DType::kBF16, rows, cols};
}

void CpuOps::write_codes(Stream& stream, Tensor from, const OutputCodes& to) {
  CpuOps::quantize(stream, quantize_of(from, to));
}

void CpuOps::coded_activation(Stream& stream, const CodedActivation& args) {
  check_coded(args);
  const Tensor out = wide_output(0, args.out.codes.rows, args.out.codes.cols);
  if (args.gated) {
    CpuOps::swiglu_forward(stream, args.in, out, {});
  } else {
    CpuOps::gelu_forward(stream, args.in, out, {});
  }
  write_codes(stream, out, args.out);
}

void CpuOps::coded_activation_backward(Stream& stream, const CodedActivationBackward& args) {
  check_coded(args);
  const Tensor din = wide_output(0, args.in.rows, args.in.cols);
  const Tensor out = wide_output(1, args.dout.rows, args.dout.cols);
  CpuOps::cast(stream, args.in, din);
  CpuOps::cast(stream, args.dout, out);
  if (args.gated) {
    CpuOps::swiglu_backward(stream, din, out, {});
  } else {
    CpuOps::gelu_backward(stream, din, out, {});
  }
  write_codes(stream, din, args.din);
  write_codes(stream, out, args.out);
  if (args.dbias) CpuOps::bias_backward(stream, din, args.dbias, args.accumulate);
}

}  // namespace octet
