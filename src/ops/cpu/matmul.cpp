#include <algorithm>
#include <type_traits>

#include "../matmul_checks.h"
#include "blas.h"
#include "cpu_ops.h"
#include "float8_values.h"
#include "gelu.h"
#include "loops.h"
#include "matmul_blocks.h"

namespace octet {
namespace {

using cpu::gemm;
using cpu::Operand;

/// y (+)= bias on every row.
void start_with_bias(const float* bias, std::int64_t cols, float* y, std::int64_t rows, bool accumulate) {
  for (std::int64_t row = 0; row < rows; ++row, y += cols) {
    for (std::int64_t j = 0; j < cols; ++j) y[j] = bias[j] + (accumulate ? y[j] : 0.0f);
  }
}

/// y[i] = gelu(inner[i]), or y[i] times gelu'(inner[i]).
void finish(Epilogue epilogue, const float* inner, float* y, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    const float x = inner[i], gate = cpu::gelu_gate(x);
    y[i] = epilogue == Epilogue::kGelu ? x * gate : y[i] * cpu::gelu_derivative(x, gate);
  }
}

void matmul_float(const Matmul& args, std::int64_t m, std::int64_t n, std::int64_t k) {
  float* y = (args.epilogue == Epilogue::kGelu ? args.inner : args.y).as<float>();
  if (args.addend) std::copy_n(args.addend.as<float>(), m * n, y);
  const bool adds = args.accumulate || args.addend;
  if (args.bias) start_with_bias(args.bias.as<float>(), n, y, m, adds);
  const Operand a{args.a.as<float>(), args.a.cols, args.transpose_a};
  const Operand b{args.b.as<float>(), args.b.cols, args.transpose_b};
  gemm(m, n, k, 1.0f, a, b, args.bias || adds ? 1.0f : 0.0f, y, n);
  if (args.epilogue != Epilogue::kNone) {
    finish(args.epilogue, args.inner.as<float>(), args.y.as<float>(), m * n);
  }
}

/// An operand as it is stored, narrower than float32.
struct Narrow {
  const Tensor& codes;
  const Scales& scales;
  bool transposed = false;
};

template <typename T>
void widen_rows(const Narrow& from, std::int64_t row, std::int64_t rows, std::int64_t col, std::int64_t cols,
                float* to) {
  const Tensor& codes = from.codes;
  for (std::int64_t i = 0; i < rows; ++i) {
    const T* line = codes.as<T>() + (row + i) * codes.cols + col;
    float* const out = to + i * cols;
    if constexpr (std::is_same_v<T, BF16>) {
      for (std::int64_t j = 0; j < cols; ++j) out[j] = static_cast<float>(line[j]);
    } else {
      const std::array<float, 256>& values = cpu::float8_values<T>();
      const float* const scales = from.scales.values.as<float>();
      for (std::int64_t j = 0; j < cols; ++j) {
        out[j] = values[line[j].bits] * scales[cpu::scale_index(from.scales, row + i, col + j)];
      }
    }
  }
}

/// Widens rows [row, row + rows) × columns [col, col + cols) of a stored matrix.
void widen(const Narrow& from, std::int64_t row, std::int64_t rows, std::int64_t col, std::int64_t cols,
           float* to) {
  switch (from.codes.dtype) {
    case DType::kE4M3:
      return widen_rows<E4M3>(from, row, rows, col, cols, to);
    case DType::kE5M2:
      return widen_rows<E5M2>(from, row, rows, col, cols, to);
    default:
      return widen_rows<BF16>(from, row, rows, col, cols, to);
  }
}

/// The block [rows, cols] at (row, col) of op(x), widened.
Operand widen_operand(const Narrow& x, std::int64_t row, std::int64_t rows, std::int64_t col,
                      std::int64_t cols, float* to) {
  if (x.transposed) {
    widen(x, col, cols, row, rows, to);
    return {to, rows, true};
  }
  widen(x, row, rows, col, cols, to);
  return {to, cols, false};
}

/// Products of narrow operands by float32 blocks, each output element summed in float32 and rounded once.
template <typename Y>
void matmul_narrow(const Matmul& args, std::int64_t m, std::int64_t n, std::int64_t k, float* scratch) {
  constexpr std::int64_t kBlock = cpu::kMatmulBlock;
  float* const a_block = scratch;
  float* const b_block = a_block + kBlock * kBlock;
  float* const y_block = b_block + kBlock * kBlock;
  const Narrow narrow_a{args.a, args.a_scales, args.transpose_a};
  const Narrow narrow_b{args.b, args.b_scales, args.transpose_b};
  for (std::int64_t row = 0; row < m; row += kBlock) {
    const std::int64_t rows = std::min(kBlock, m - row);
    for (std::int64_t col = 0; col < n; col += kBlock) {
      const std::int64_t cols = std::min(kBlock, n - col);
      std::fill_n(y_block, rows * cols, 0.0f);
      for (std::int64_t inner = 0; inner < k; inner += kBlock) {
        const std::int64_t depth = std::min(kBlock, k - inner);
        const Operand a = widen_operand(narrow_a, row, rows, inner, depth, a_block);
        const Operand b = widen_operand(narrow_b, inner, depth, col, cols, b_block);
        gemm(rows, cols, depth, 1.0f, a, b, 1.0f, y_block, cols);
      }
      for (std::int64_t i = 0; i < rows; ++i) {
        Y* const y = args.y.as<Y>() + (row + i) * n + col;
        Y* const inner =
            args.epilogue != Epilogue::kNone ? args.inner.as<Y>() + (row + i) * n + col : nullptr;
        const BF16* const bias = args.bias ? args.bias.as<BF16>() + col : nullptr;
        const Y* const addend = args.addend       ? args.addend.as<Y>() + (row + i) * n + col
                                : args.accumulate ? y
                                                  : nullptr;
        for (std::int64_t j = 0; j < cols; ++j) {
          float value = y_block[i * cols + j];
          if (bias != nullptr) value += static_cast<float>(bias[j]);
          if (addend != nullptr) value += static_cast<float>(addend[j]);
          if (args.epilogue == Epilogue::kGelu) {
            inner[j] = static_cast<Y>(value);
            value *= cpu::gelu_gate(value);
          } else if (args.epilogue == Epilogue::kGeluGradient) {
            const auto x = static_cast<float>(inner[j]);
            value *= cpu::gelu_derivative(x, cpu::gelu_gate(x));
          }
          y[j] = static_cast<Y>(value);
        }
      }
    }
  }
}

}  // namespace

void CpuOps::matmul(Stream& stream, const Matmul& args) {
  check_matmul(args);
  const std::int64_t m = args.y.rows, n = args.y.cols, k = args.transpose_a ? args.a.rows : args.a.cols;
  if (is_gated(args.epilogue)) {
    Matmul plain = args;
    plain.epilogue = Epilogue::kNone;
    plain.inner = {};
    if (args.epilogue == Epilogue::kSwiglu) plain.y = args.inner;
    matmul(stream, plain);
    if (args.epilogue == Epilogue::kSwiglu) {
      swiglu_forward(stream, args.inner, args.y, {});
    } else {
      swiglu_backward(stream, args.inner, args.y, {});
    }
    return;
  }
  if (m > 0 && n > 0 && args.a.dtype == DType::kF32) {
    matmul_float(args, m, n, k);
  } else if (m > 0 && n > 0) {
    OCTET_ASSERT(matmul_scratch_.size() == cpu::kMatmulScratch);
    cpu::with_type(args.y.dtype,
                   [&](auto y) { matmul_narrow<decltype(y)>(args, m, n, k, matmul_scratch_.data()); });
  }
  if (args.bias_gradient) {
    CpuOps::bias_backward(stream, args.y, args.bias_gradient, args.accumulate_bias_gradient);
  }
}

}  // namespace octet
