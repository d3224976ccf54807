#include "matmul_passes.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>

#include "octet/base/rng.h"

namespace octet {

namespace {

/// Numbers below `count`: the first, the last, and some between.
std::vector<std::int64_t> pick(std::int64_t count, std::uint64_t key) {
  std::set<std::int64_t> picked{0, count - 1};
  for (std::uint64_t i = 0; i < 7; ++i)
    picked.insert(static_cast<std::int64_t>(mix(key, i) % static_cast<std::uint64_t>(count)));
  return {picked.begin(), picked.end()};
}

/// Some rows, or columns, of a matrix. Columns are taken from the whole of it, piece by piece.
std::vector<std::vector<float>> lines_of(BenchSession& session, const Tensor& matrix,
                                         const std::vector<std::int64_t>& picked, bool columns) {
  constexpr std::int64_t kPieceElements = 1 << 24;
  std::vector<std::vector<float>> lines(picked.size());
  const auto read = [&](std::int64_t row, std::int64_t count) {
    return to_host(session.device, session.stream, matrix.row_range(row, count));
  };
  if (!columns) {
    for (std::size_t i = 0; i < picked.size(); ++i) lines[i] = read(picked[i], 1);
    return lines;
  }
  const std::int64_t piece = std::max<std::int64_t>(1, kPieceElements / matrix.cols);
  for (std::int64_t row = 0; row < matrix.rows; row += piece) {
    const std::int64_t count = std::min(piece, matrix.rows - row);
    const std::vector<float> values = read(row, count);
    for (std::int64_t r = 0; r < count; ++r) {
      for (std::size_t i = 0; i < picked.size(); ++i)
        lines[i].push_back(values[static_cast<std::size_t>(r * matrix.cols + picked[i])]);
    }
  }
  return lines;
}

/// The same of an 8-bit matrix, times its scales; of others as they are.
std::vector<std::vector<float>> scaled_lines_of(BenchSession& session, const Tensor& matrix,
                                                const Scales& scales, const std::vector<std::int64_t>& picked,
                                                bool columns) {
  constexpr std::int64_t kBlock = 128;
  auto lines = lines_of(session, matrix, picked, columns);
  if (!scales.values) return lines;
  OCTET_ASSERT(!columns);
  const std::vector<float> values = to_host(session.device, session.stream, scales.values);
  const auto scale_at = [&](std::int64_t row, std::int64_t col) {
    std::int64_t at = 0;
    if (scales.cut == ScaleCut::kRow128) at = col / kBlock * scales.values.cols + row;
    if (scales.cut == ScaleCut::kSquare128) at = row / kBlock * scales.values.cols + col / kBlock;
    return values[static_cast<std::size_t>(at)];
  };
  for (std::size_t i = 0; i < lines.size(); ++i) {
    for (std::size_t p = 0; p < lines[i].size(); ++p)
      lines[i][p] *= scale_at(picked[i], static_cast<std::int64_t>(p));
  }
  return lines;
}

/// An 8-bit copy of a matrix and the scales that go with it.
struct Coded {
  Tensor codes;
  Scales scales;
};

Coded room_for(Operands& memory, DType type, std::int64_t rows, std::int64_t cols, ScaleCut cut) {
  const Tensor shape = scale_shape(cut, rows, cols);
  return {memory.zeros(type, rows, cols), {memory.zeros(DType::kF32, shape.rows, shape.cols), cut}};
}

/// The copy of a bfloat16 matrix as it lies, and its transpose.
std::pair<Coded, Coded> code(Ops& ops, Operands& memory, const Tensor& from, DType type, ScaleCut cut) {
  const Coded straight = room_for(memory, type, from.rows, from.cols, cut),
              turned = room_for(memory, type, from.cols, from.rows, cut);
  Quantize args;
  args.from = from;
  if (cut == ScaleCut::kTensor) {
    args.largest = memory.zeros(DType::kF32, 1, 1);
    ops.largest_magnitude(memory.stream(), from, args.largest);
  }
  args.codes = straight.codes;
  args.scales = straight.scales;
  args.transposed = turned.codes;
  args.transposed_scales = turned.scales;
  ops.quantize(memory.stream(), args);
  return {straight, turned};
}

Matmul product(const Coded& a, const Coded& b, const Tensor& y, bool accumulate) {
  Matmul args;
  args.a = a.codes;
  args.a_scales = a.scales;
  args.b = b.codes;
  args.b_scales = b.scales;
  args.transpose_b = true;
  args.y = y;
  args.accumulate = accumulate;
  return args;
}

constexpr double kGeluScale = 0.7978845608028654, kGeluCubic = 0.044715;  // sqrt(2/pi)

double gelu(double x) {
  return 0.5 * x * (1.0 + std::tanh(kGeluScale * (x + kGeluCubic * x * x * x)));
}

double gelu_derivative(double x) {
  const double t = std::tanh(kGeluScale * (x + kGeluCubic * x * x * x));
  return 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * kGeluScale * (1.0 + 3.0 * kGeluCubic * x * x);
}

/// A float32 matrix of ones, for a gradient to be added to.
Tensor ones(Operands& memory, std::int64_t rows, std::int64_t cols) {
  return memory.random(DType::kF32, rows, cols, 0.0, 1.0);
}

/// Whether some columns of y add up to what bias_gradient has for them, within what float32 sums of numbers
/// of unit size, rounded to bfloat16 or not, may be off by.
bool sums_right(BenchSession& session, const Matmul& args, const std::vector<std::int64_t>& cols) {
  const std::vector<float> found = to_host(session.device, session.stream, args.bias_gradient);
  const auto columns = lines_of(session, args.y, cols, true);
  for (std::size_t i = 0; i < cols.size(); ++i) {
    const double total = std::accumulate(columns[i].begin(), columns[i].end(), 0.0);
    const double off = std::abs(found[static_cast<std::size_t>(cols[i])] - total);
    if (!(off <= 1e-4 * std::sqrt(static_cast<double>(args.y.rows)))) return false;
  }
  return true;
}

}  // namespace

std::vector<MatmulPass> make_passes(Operands& memory, const Linear& linear, DType compute) {
  const auto random = [&](std::int64_t rows, std::int64_t cols) {
    return memory.random(compute, rows, cols);
  };
  const Tensor x = random(linear.rows, linear.in), w = random(linear.out, linear.in),
               dy = random(linear.rows, linear.out);
  return {
      {"forward", {.a = x, .b = w, .transpose_b = true, .y = memory.zeros(compute, linear.rows, linear.out)}},
      {"input gradient", {.a = dy, .b = w, .y = memory.zeros(compute, linear.rows, linear.in)}},
      {"weight gradient",
       {.a = dy, .b = x, .transpose_a = true, .y = ones(memory, linear.out, linear.in), .accumulate = true},
       1.0},
  };
}

std::vector<MatmulPass> make_fused_passes(Operands& memory, const Linear& linear, DType compute) {
  const auto random = [&](std::int64_t rows, std::int64_t cols, double deviation = 1.0) {
    return memory.random(compute, rows, cols, deviation);
  };
  // Results of unit size, where a GELU is neither 0 nor its input.
  const auto weight = [&](std::int64_t summed) {
    return random(linear.out, linear.in, 1.0 / std::sqrt(static_cast<double>(summed)));
  };
  std::vector<MatmulPass> passes;
  if (linear.before_gelu) {
    Matmul args{.a = random(linear.rows, linear.in),
                .b = weight(linear.in),
                .transpose_b = true,
                .y = memory.zeros(compute, linear.rows, linear.out)};
    args.epilogue = Epilogue::kGelu;
    args.inner = memory.zeros(compute, linear.rows, linear.out);
    args.bias = memory.zeros(compute, 1, linear.out);
    passes.push_back({"forward with gelu", args});
  }
  if (linear.behind_gelu) {
    Matmul args{.a = random(linear.rows, linear.out),
                .b = weight(linear.out),
                .y = memory.zeros(compute, linear.rows, linear.in)};
    args.epilogue = Epilogue::kGeluGradient;
    args.inner = random(linear.rows, linear.in);
    passes.push_back({"input gradient with gelu", args});
    args.bias_gradient = memory.zeros(DType::kF32, 1, linear.in);
    passes.push_back({"input gradient with gelu, bias gradient", args});
  }
  return passes;
}

std::vector<MatmulPass> make_float8_passes(Ops& ops, Operands& memory, const Linear& linear, bool by_block) {
  const auto random = [&](std::int64_t rows, std::int64_t cols) {
    return memory.random(DType::kBF16, rows, cols);
  };
  const ScaleCut cut = by_block ? ScaleCut::kRow128 : ScaleCut::kTensor;
  const ScaleCut weight_cut = by_block ? ScaleCut::kSquare128 : ScaleCut::kTensor;
  const DType gradient_type = by_block ? DType::kE4M3 : DType::kE5M2;
  const auto [x, turned_x] = code(ops, memory, random(linear.rows, linear.in), DType::kE4M3, cut);
  const auto [w, turned_w] = code(ops, memory, random(linear.out, linear.in), DType::kE4M3, weight_cut);
  const auto [dy, turned_dy] = code(ops, memory, random(linear.rows, linear.out), gradient_type, cut);
  const auto blank = [&](std::int64_t rows, std::int64_t cols) {
    return memory.zeros(DType::kBF16, rows, cols);
  };
  return {
      {"forward", product(x, w, blank(linear.rows, linear.out), false)},
      {"input gradient", product(dy, turned_w, blank(linear.rows, linear.in), false)},
      {"weight gradient", product(turned_dy, turned_x, ones(memory, linear.out, linear.in), true), 1.0},
  };
}

bool product_right(BenchSession& session, const MatmulPass& pass) {
  const Matmul& args = pass.args;
  const std::vector<std::int64_t> rows = pick(args.y.rows, 1), cols = pick(args.y.cols, 2);
  const auto a = scaled_lines_of(session, args.a, args.a_scales, rows, args.transpose_a);
  const auto b = scaled_lines_of(session, args.b, args.b_scales, cols, !args.transpose_b);
  const auto y = lines_of(session, args.y, rows, false);
  const auto inner = args.inner ? lines_of(session, args.inner, rows, false) : y;
  // What a sum of k products of unit size, about √k, may be off by in float32; and the rounding of the
  // result. 8-bit matrix units keep 13 bits behind the point of what they add, 32 products at a time, so that
  // with fast accumulation the error grows with the number of sums too.
  const auto k = static_cast<double>(pass.inner());
  const double unit_error = is_float8(args.a.dtype) ? 4e-3 + k / 32 * 0x1p-13 : 2e-4;
  const double sum_error = unit_error * std::sqrt(k);
  const double rounding = args.y.dtype == DType::kBF16 ? 1.0 / 256 : 0.0;
  const auto near = [&](double found, double expected) {
    return std::abs(found - expected) <= sum_error + rounding * std::abs(expected);
  };
  for (std::size_t i = 0; i < rows.size(); ++i) {
    for (std::size_t j = 0; j < cols.size(); ++j) {
      const auto col = static_cast<std::size_t>(cols[j]);
      double total = pass.start;
      for (std::size_t p = 0; p < a[i].size(); ++p) total += double{a[i][p]} * double{b[j][p]};
      if (args.epilogue == Epilogue::kGelu) {
        if (!near(inner[i][col], total)) return false;
        total = gelu(total);
      }
      if (args.epilogue == Epilogue::kGeluGradient) total *= gelu_derivative(inner[i][col]);
      if (!near(y[i][col], total)) return false;
    }
  }
  return !args.bias_gradient || sums_right(session, args, cols);
}

}  // namespace octet
