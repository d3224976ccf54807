#include "float8_checks.h"

#include "octet/base/float8_scale.h"

namespace octet {
namespace {

std::int64_t divide_up(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}

bool fits(const Scales& scales, const Tensor& codes) {
  const Tensor shape = scale_shape(scales.cut, codes.rows, codes.cols);
  return scales.values && scales.values.dtype == DType::kF32 && scales.values.rows == shape.rows &&
         scales.values.cols == shape.cols;
}

}  // namespace

Tensor scale_shape(ScaleCut cut, std::int64_t rows, std::int64_t cols) {
  const auto round_up_to_4 = [](std::int64_t count) { return divide_up(count, 4) * 4; };
  switch (cut) {
    case ScaleCut::kRow128:
      return {nullptr, DType::kF32, divide_up(cols, kScaleBlock), round_up_to_4(rows)};
    case ScaleCut::kSquare128:
      return {nullptr, DType::kF32, divide_up(rows, kScaleBlock),
              round_up_to_4(divide_up(cols, kScaleBlock))};
    case ScaleCut::kTensor:
      break;
  }
  return {nullptr, DType::kF32, 1, 1};
}

void check_float8(const Matmul& args) {
  OCTET_ASSERT(is_float8(args.a.dtype) && is_float8(args.b.dtype));
  OCTET_ASSERT(args.a.dtype == DType::kE4M3 || args.b.dtype == DType::kE4M3);
  OCTET_ASSERT(!args.transpose_a && args.transpose_b);
  OCTET_ASSERT(args.a.rows % 16 == 0 && args.a.cols % 16 == 0 && args.b.rows % 16 == 0);
  OCTET_ASSERT(fits(args.a_scales, args.a) && fits(args.b_scales, args.b));
  for (const Tensor& operand : {args.a, args.b, args.a_scales.values, args.b_scales.values}) {
    OCTET_ASSERT(reinterpret_cast<std::uintptr_t>(operand.data) % 16 == 0);  // or cuBLASLt refuses
  }
  const ScaleCut a = args.a_scales.cut, b = args.b_scales.cut;
  OCTET_ASSERT((a == ScaleCut::kTensor) == (b == ScaleCut::kTensor));
  OCTET_ASSERT(a != ScaleCut::kSquare128 || b != ScaleCut::kSquare128);
  OCTET_ASSERT(args.y.dtype == DType::kBF16 || args.y.dtype == DType::kF32);
  OCTET_ASSERT(!args.bias || args.bias.dtype == DType::kBF16);
}

/// Of a run of a matrix.
void check_run(const Quantize& args) {
  OCTET_ASSERT(args.from.dtype == DType::kBF16 || args.from.dtype == DType::kF32);
  OCTET_ASSERT(args.from.cols % 16 == 0 && !args.transposed && !args.seen);
  OCTET_ASSERT(args.codes.dtype == DType::kE4M3 && args.scales.cut == ScaleCut::kTensor);
}

void check_float8(const Quantize& args) {
  if (args.from.rows == 1) {
    check_run(args);
  } else {
    OCTET_ASSERT(args.from.dtype == DType::kBF16 && args.from.rows % 16 == 0 && args.from.cols % 16 == 0);
  }
  OCTET_ASSERT(args.codes || args.transposed);
  if (args.codes) {
    OCTET_ASSERT(is_float8(args.codes.dtype) && args.codes.rows == args.from.rows &&
                 args.codes.cols == args.from.cols && fits(args.scales, args.codes));
  }
  if (args.transposed) {
    OCTET_ASSERT(is_float8(args.transposed.dtype) && args.transposed.rows == args.from.cols &&
                 args.transposed.cols == args.from.rows && fits(args.transposed_scales, args.transposed));
  }
  if (args.codes && args.transposed) {
    OCTET_ASSERT(args.codes.dtype == args.transposed.dtype && args.scales.cut == args.transposed_scales.cut);
  }
  const ScaleCut cut = args.codes ? args.scales.cut : args.transposed_scales.cut;
  OCTET_ASSERT((cut == ScaleCut::kTensor) == static_cast<bool>(args.largest));
  OCTET_ASSERT(!args.largest || (args.largest.dtype == DType::kF32 && args.largest.size() == 1));
  OCTET_ASSERT(!args.seen || cut == ScaleCut::kTensor);
  OCTET_ASSERT(!args.seen || (args.seen.dtype == DType::kF32 && args.seen.size() == 1));
}

void check_transpose(const Tensor& from, const Tensor& to) {
  OCTET_ASSERT(is_float8(from.dtype) && to.dtype == from.dtype);
  OCTET_ASSERT(to.rows == from.cols && to.cols == from.rows && from.rows % 16 == 0 && from.cols % 16 == 0);
}

void check_codes(const OutputCodes& output, std::int64_t rows, std::int64_t cols, DType type, bool straight,
                 bool transposed) {
  const auto is = [&](const Tensor& tensor, std::int64_t r, std::int64_t c) {
    return tensor.dtype == type && tensor.rows == r && tensor.cols == c;
  };
  const auto is_number = [](const Tensor& tensor) {
    return tensor.dtype == DType::kF32 && tensor.size() == 1;
  };
  OCTET_ASSERT(rows % 16 == 0 && cols % 16 == 0);
  OCTET_ASSERT(straight ? is(output.codes, rows, cols) : !output.codes);
  OCTET_ASSERT(transposed ? is(output.transposed, cols, rows) : !output.transposed);
  OCTET_ASSERT(is_number(output.largest) && is_number(output.scale));
  OCTET_ASSERT(!output.seen || is_number(output.seen));
}

void check_codes(const NormForward& args) {
  if (!args.codes) return;
  OCTET_ASSERT(args.y.dtype == DType::kBF16 && !args.largest);
  check_codes(args.codes, args.y.rows, args.y.cols, DType::kE4M3, true, false);
}

void check_codes(const NormBackward& args) {
  OCTET_ASSERT(args.y_codes || !args.dx_codes);
  if (!args.y_codes) return;
  OCTET_ASSERT(args.x.dtype == DType::kBF16 && !args.y && !args.largest);
  check_codes(args.y_codes, args.x.rows, args.x.cols, DType::kE4M3, false, true);
  if (args.dx_codes) check_codes(args.dx_codes, args.x.rows, args.x.cols, DType::kE5M2, true, true);
}

void check_coded(const CodedActivation& args) {
  OCTET_ASSERT(args.in.dtype == DType::kBF16);
  check_codes(args.out, args.in.rows, args.in.cols / (args.gated ? 2 : 1), DType::kE4M3, true, false);
}

void check_coded(const CodedActivationBackward& args) {
  const std::int64_t rows = args.dout.rows, cols = args.dout.cols;
  OCTET_ASSERT(args.in.dtype == DType::kBF16 && args.dout.dtype == DType::kBF16);
  OCTET_ASSERT(args.in.rows == rows && args.in.cols == cols * (args.gated ? 2 : 1));
  check_codes(args.din, rows, args.in.cols, DType::kE5M2, true, true);
  check_codes(args.out, rows, cols, DType::kE4M3, false, true);
  OCTET_ASSERT(!args.dbias || (!args.gated && args.dbias.dtype == DType::kF32 && args.dbias.size() == cols));
}

void check_largest(const Tensor& output, const Tensor& largest) {
  if (!largest) return;
  OCTET_ASSERT(output.dtype == DType::kBF16 && largest.dtype == DType::kF32 && largest.size() == 1);
}

void check_history(const Tensor& seen, const Tensor& history, const Tensor& largest) {
  OCTET_ASSERT(history.dtype == DType::kF32 && history.cols > 0);
  OCTET_ASSERT(largest.dtype == DType::kF32 && largest.size() == history.rows);
  OCTET_ASSERT(!seen || (seen.dtype == DType::kF32 && seen.size() == history.rows));
}

}  // namespace octet
