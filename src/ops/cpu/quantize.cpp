#include <algorithm>
#include <cmath>

#include "../float8_checks.h"
#include "cpu_ops.h"
#include "float8_values.h"
#include "loops.h"

namespace octet {
namespace {

/// The element as bfloat16 has it.
float rounded(BF16 value) {
  return static_cast<float>(value);
}
float rounded(float value) {
  return static_cast<float>(BF16(value));
}

template <typename T>
float largest_of(const T* values, std::int64_t count) {
  return std::max(0.0f, cpu::largest(count, [&](std::int64_t i) { return std::fabs(rounded(values[i])); }));
}

/// The scales of a matrix whose element (r, c) is at(r, c).
template <typename At>
void make_scales(const Tensor& codes, const Scales& scales, float largest, At at) {
  float* const values = scales.values.as<float>();
  if (scales.cut == ScaleCut::kTensor) {
    values[0] = float8_scale(largest, codes.dtype);
    return;
  }
  std::fill_n(values, scales.values.size(), 0.0f);
  for (std::int64_t row = 0; row < codes.rows; ++row) {
    for (std::int64_t col = 0; col < codes.cols; ++col) {
      float& block = values[cpu::scale_index(scales, row, col)];
      block = std::max(block, std::fabs(at(row, col)));
    }
  }
  for (std::int64_t i = 0; i < scales.values.size(); ++i) values[i] = float8_scale(values[i], codes.dtype);
}

template <typename T, typename At>
void write_codes(const Tensor& codes, const Scales& scales, At at) {
  T* const out = codes.as<T>();
  for (std::int64_t row = 0; row < codes.rows; ++row) {
    for (std::int64_t col = 0; col < codes.cols; ++col) {
      const float scale = scales.values.as<float>()[cpu::scale_index(scales, row, col)];
      out[row * codes.cols + col] = T(at(row, col) * (1.0f / scale));
    }
  }
}

template <typename At>
void quantize_to(const Tensor& codes, const Scales& scales, float largest, At at) {
  if (!codes) return;
  make_scales(codes, scales, largest, at);
  if (codes.dtype == DType::kE4M3) {
    write_codes<E4M3>(codes, scales, at);
  } else {
    write_codes<E5M2>(codes, scales, at);
  }
}

}  // namespace

void CpuOps::largest_magnitude(Stream&, Tensor x, Tensor largest) {
  OCTET_ASSERT(largest.size() == 1);
  cpu::with_type(x.dtype,
                 [&](auto zero) { largest.as<float>()[0] = largest_of(x.as<decltype(zero)>(), x.size()); });
}

void CpuOps::quantize(Stream&, const Quantize& args) {
  check_float8(args);
  const std::int64_t cols = args.from.cols;
  const float largest = args.largest ? args.largest.as<float>()[0] : 0.0f;
  cpu::with_type(args.from.dtype, [&](auto zero) {
    const auto* const from = args.from.as<decltype(zero)>();
    if (args.seen) {
      float& seen = args.seen.as<float>()[0];
      seen = std::max(seen, largest_of(from, args.from.size()));
    }
    quantize_to(args.codes, args.scales, largest,
                [&](std::int64_t row, std::int64_t col) { return rounded(from[row * cols + col]); });
    quantize_to(args.transposed, args.transposed_scales, largest,
                [&](std::int64_t row, std::int64_t col) { return rounded(from[col * cols + row]); });
  });
}

void CpuOps::transpose_codes(Stream&, Tensor from, Tensor to) {
  check_transpose(from, to);
  const auto* const in = static_cast<const std::uint8_t*>(from.data);
  auto* const out = static_cast<std::uint8_t*>(to.data);
  for (std::int64_t row = 0; row < to.rows; ++row) {
    for (std::int64_t col = 0; col < to.cols; ++col) out[row * to.cols + col] = in[col * to.rows + row];
  }
}

void CpuOps::remember_largest(Stream&, Tensor seen, Tensor history, Tensor largest,
                              const StepScalars* scalars) {
  check_history(seen, history, largest);
  const std::int64_t steps = history.cols;
  for (std::int64_t i = 0; i < history.rows; ++i) {
    float* const row = history.as<float>() + i * steps;
    if (seen && scalars->skip == 0) {
      const float value = seen.as<float>()[i];
      row[(scalars->updates - 1) % steps] = std::isfinite(value) ? value : 0.0f;
    }
    const float found = *std::max_element(row, row + steps);
    if (found > 0.0f) largest.as<float>()[i] = found;
  }
}

}  // namespace octet
