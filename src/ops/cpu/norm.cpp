#include <cmath>

#include "../float8_checks.h"
#include "cpu_ops.h"
#include "loops.h"

namespace octet {
namespace {

template <typename T>
void forward_row(const NormForward& args, std::int64_t row) {
  const std::int64_t cols = args.y.cols;
  const T* x = args.residual.as<T>() + row * cols;
  if (args.delta) {
    const T* delta = args.delta.as<T>() + row * cols;
    T* const total = args.sum.as<T>() + row * cols;
    for (std::int64_t j = 0; j < cols; ++j) {
      total[j] = static_cast<T>(static_cast<float>(x[j]) + static_cast<float>(delta[j]));
    }
    x = total;
  }
  const double count = static_cast<double>(cols);
  float mean = 0.0f;
  if (args.kind == NormKind::kLayer) {
    mean =
        static_cast<float>(cpu::sum(cols, [&](std::int64_t j) { return static_cast<float>(x[j]); }) / count);
    args.mean.as<float>()[row] = mean;
  }
  const double square = cpu::sum(cols, [&](std::int64_t j) {
    const float centred = static_cast<float>(x[j]) - mean;
    return centred * centred;
  });
  const float rstd = static_cast<float>(1.0 / std::sqrt(square / count + static_cast<double>(args.epsilon)));
  args.rstd.as<float>()[row] = rstd;

  const T* const weight = args.weight.as<T>();
  const T* const bias = args.bias.as<T>();
  T* const y = args.y.as<T>() + row * cols;
  for (std::int64_t j = 0; j < cols; ++j) {
    const float scaled = (static_cast<float>(x[j]) - mean) * rstd * static_cast<float>(weight[j]);
    y[j] = static_cast<T>(bias == nullptr ? scaled : scaled + static_cast<float>(bias[j]));
  }
  cpu::raise_largest(args.largest, y, cols);
}

/// dx += rstd · (g - mean(g) - x̂ · mean(g·x̂)) with g = dy · weight, and mean(g) for LayerNorm only.
template <typename T>
void backward_row(const NormBackward& args, std::int64_t row, float mean, float rstd) {
  const std::int64_t cols = args.x.cols;
  const T* const x = args.x.as<T>() + row * cols;
  const T* const dy = args.dy.as<T>() + row * cols;
  const T* const weight = args.weight.as<T>();
  const T* const bias = args.bias.as<T>();
  T* const dx = args.dx.as<T>() + row * cols;
  T* const y = args.y ? args.y.as<T>() + row * cols : nullptr;
  const auto normal = [&](std::int64_t j) { return (static_cast<float>(x[j]) - mean) * rstd; };
  const auto g = [&](std::int64_t j) { return static_cast<float>(dy[j]) * static_cast<float>(weight[j]); };

  const double count = static_cast<double>(cols);
  const float along =
      static_cast<float>(cpu::sum(cols, [&](std::int64_t j) { return g(j) * normal(j); }) / count);
  const float offset = args.kind == NormKind::kLayer ? static_cast<float>(cpu::sum(cols, g) / count) : 0.0f;
  for (std::int64_t j = 0; j < cols; ++j) {
    const float xhat = normal(j);
    dx[j] = static_cast<T>(static_cast<float>(dx[j]) + rstd * (g(j) - offset - xhat * along));
  }
  cpu::raise_largest(args.largest, dx, cols);
  if (y == nullptr) return;
  for (std::int64_t j = 0; j < cols; ++j) {
    const float scaled = normal(j) * static_cast<float>(weight[j]);
    y[j] = static_cast<T>(bias == nullptr ? scaled : scaled + static_cast<float>(bias[j]));
  }
}

template <typename T>
void backward(const NormBackward& args) {
  const std::int64_t rows = args.x.rows, cols = args.x.cols;
  const T* const x = args.x.as<T>();
  const T* const dy = args.dy.as<T>();
  const float* const rstd = args.rstd.as<float>();
  const bool layer = args.kind == NormKind::kLayer;
  const auto mean = [&](std::int64_t row) { return layer ? args.mean.as<float>()[row] : 0.0f; };

  // Weight and bias first, since y may take the place of dy.
  cpu::sum_columns(rows, cols, args.dweight.as<float>(), args.accumulate,
                   [&](std::int64_t row, std::int64_t begin, std::int64_t count, double* sums) {
                     const std::int64_t at = row * cols + begin;
                     const float shift = mean(row), scale = rstd[row];
                     for (std::int64_t j = 0; j < count; ++j) {
                       const float xhat = (static_cast<float>(x[at + j]) - shift) * scale;
                       sums[j] += static_cast<double>(static_cast<float>(dy[at + j]) * xhat);
                     }
                   });
  if (layer) {
    cpu::sum_columns(rows, cols, args.dbias.as<float>(), args.accumulate,
                     [&](std::int64_t row, std::int64_t begin, std::int64_t count, double* sums) {
                       const T* const line = dy + row * cols + begin;
                       for (std::int64_t j = 0; j < count; ++j) sums[j] += static_cast<float>(line[j]);
                     });
  }
  for (std::int64_t row = 0; row < rows; ++row) backward_row<T>(args, row, mean(row), rstd[row]);
}

}  // namespace

void CpuOps::norm_forward(Stream& stream, const NormForward& args) {
  check_codes(args);
  if (args.codes) {
    NormForward wide = args;
    wide.codes = {};
    wide.y = wide_output(0, args.y.rows, args.y.cols);
    CpuOps::norm_forward(stream, wide);
    return write_codes(stream, wide.y, args.codes);
  }
  const auto same = [&](const Tensor& x) { return x.rows == args.y.rows && x.cols == args.y.cols; };
  const bool layer = args.kind == NormKind::kLayer;
  OCTET_ASSERT(same(args.residual) && args.weight.size() == args.y.cols && args.rstd.size() == args.y.rows);
  OCTET_ASSERT(!args.delta || (same(args.delta) && same(args.sum)));
  OCTET_ASSERT(!layer || (args.bias.size() == args.y.cols && args.mean.size() == args.y.rows));
  check_largest(args.y, args.largest);
  cpu::with_type(args.y.dtype, [&](auto zero) {
    for (std::int64_t row = 0; row < args.y.rows; ++row) forward_row<decltype(zero)>(args, row);
  });
}

void CpuOps::norm_backward(Stream& stream, const NormBackward& args) {
  check_codes(args);
  if (args.dx_sums) {
    CpuOps::bias_backward(stream, args.dx, args.dx_sums, args.accumulate);
    NormBackward rest = args;
    rest.dx_sums = {};
    return CpuOps::norm_backward(stream, rest);
  }
  if (args.y_codes) {
    NormBackward wide = args;
    wide.y_codes = wide.dx_codes = {};
    wide.y = args.dy;
    CpuOps::norm_backward(stream, wide);
    write_codes(stream, wide.y, args.y_codes);
    if (args.dx_codes) write_codes(stream, args.dx, args.dx_codes);
    return;
  }
  const auto same = [&](const Tensor& x) { return x.rows == args.x.rows && x.cols == args.x.cols; };
  const bool layer = args.kind == NormKind::kLayer;
  OCTET_ASSERT(same(args.dy) && same(args.dx) && (!args.y || same(args.y)));
  OCTET_ASSERT(args.weight.size() == args.x.cols && args.dweight.size() == args.x.cols);
  OCTET_ASSERT(args.rstd.size() == args.x.rows);
  OCTET_ASSERT(!layer || (args.mean.size() == args.x.rows && args.dbias.size() == args.x.cols));
  check_largest(args.dx, args.largest);
  cpu::with_type(args.x.dtype, [&](auto zero) { backward<decltype(zero)>(args); });
}

}  // namespace octet
