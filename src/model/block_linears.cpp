#include "octet/model/block_linears.h"

#include <algorithm>

namespace octet {

BlockLinears::BlockLinears(const LayerContext& context, const HeadLayout& heads, int slabs, Arena& scratch)
    : context_(context), slabs_(slabs), scratch_(scratch) {
  if (!fp8()) return;
  const ModelShape& shape = context.shape;
  const std::int64_t t = context.tokens(), h = shape.hidden, f = shape.mlp / context.tensor.size();
  const std::int64_t inner = shape.gated() ? 2 * f : f, q = heads.query(), packed = heads.packed();
  const std::int64_t weight = std::max({packed * h, h * q, inner * h, h * f});
  input_ = reserve(scratch, t, std::max({h, q, f}));
  weight_ = reserve(scratch, h, weight / h);
  gradient_ = reserve(scratch, t, std::max({h, inner, packed}));
  turned_gradient_ = reserve(scratch, t, std::max({h, inner, packed}));
  weights_seen_.assign(static_cast<std::size_t>(shape.layers), std::vector<std::int64_t>(kLinearLayers, -1));
  const std::int64_t rows =
      delayed() ? shape.layers * kLinearLayers * kRoles : kSlabRows * slabs + kLinearLayers * shape.layers;
  largest_ = scratch.reserve(DType::kF32, rows, 1);
  if (!delayed()) return;
  seen_ = scratch.reserve(DType::kF32, rows, 1);
  history_ = scratch.reserve(DType::kF32, rows, context.fp8_history);
}

int BlockLinears::row_of(Role role, int layer, int slab, LinearLayer which) const {
  const int linear = static_cast<int>(which);
  if (delayed()) return (layer * kLinearLayers + linear) * kRoles + static_cast<int>(role);
  switch (role) {
    case Role::kInput:
      return slab * kSlabRows + linear;
    case Role::kGradient:
      return slab * kSlabRows + kLinearLayers + linear;
    case Role::kWeight:
      break;
  }
  return slabs_ * kSlabRows + layer * kLinearLayers + linear;
}

void BlockLinears::begin(Stream& stream, int slab) {
  if (!keeps_largest()) return;
  context_.ops.fill(stream, scratch_.tensor(largest_).row_range(slab * kSlabRows, kSlabRows), 0.0f);
}

Tensor BlockLinears::largest_of(Role role, int slab, LinearLayer which) const {
  if (!keeps_largest()) return {};
  return scratch_.tensor(largest_).row_range(row_of(role, 0, slab, which), 1);
}

Tensor BlockLinears::largest_input(int slab, LinearLayer which) const {
  const bool normed = which == LinearLayer::kQkv || which == LinearLayer::kUp;
  if (normed && context_.tensor.sequence_parallel()) return {};
  return largest_of(Role::kInput, slab, which);
}

Tensor BlockLinears::largest_gradient(int slab, LinearLayer which) const {
  const bool of_stream = which == LinearLayer::kOutput || which == LinearLayer::kDown;
  if (of_stream && context_.tensor.sequence_parallel()) return {};
  return largest_of(Role::kGradient, slab, which);
}

bool BlockLinears::known(Role role, int slab, LinearLayer which, Measured measured) const {
  switch (measured) {
    case Measured::kNot:
      return false;
    case Measured::kByProducer:
      return static_cast<bool>(role == Role::kInput ? largest_input(slab, which)
                                                    : largest_gradient(slab, which));
    case Measured::kBefore:
      break;
  }
  return keeps_largest();
}

BlockLinears::Place BlockLinears::reserve(Arena& scratch, std::int64_t rows, std::int64_t cols) const {
  const std::int64_t size = rows * cols;
  // At most one scale for 128 elements, and rounding up of one side to 4.
  const std::int64_t scales = by_tensor() ? 1 : size / 128 + 4 * (rows + cols);
  return {scratch.reserve(DType::kE4M3, 1, size), scratch.reserve(DType::kF32, 1, scales)};
}

BlockLinears::Operand BlockLinears::operand(const Place& place, DType type, std::int64_t rows,
                                            std::int64_t cols, ScaleCut cut) const {
  if (by_tensor()) cut = ScaleCut::kTensor;
  const Tensor shape = scale_shape(cut, rows, cols);
  const Tensor codes = scratch_.tensor(place.codes).range(0, rows * cols);
  return {{codes.data, type, rows, cols},
          {scratch_.tensor(place.scales).range(0, shape.size()).reshape(shape.rows, shape.cols), cut}};
}

void BlockLinears::quantize(Stream& stream, Tensor from, int row, bool measure, const Operand* straight,
                            const Operand* turned) {
  Quantize args;
  args.from = from;
  if (by_tensor()) {
    args.largest = scratch_.tensor(largest_).row_range(row, 1);
    if (measure && !remembers_) context_.ops.largest_magnitude(stream, from, args.largest);
    if (delayed()) args.seen = seen().row_range(row, 1);
  }
  if (straight != nullptr) {
    args.codes = straight->codes;
    args.scales = straight->scales;
  }
  if (turned != nullptr) {
    args.transposed = turned->codes;
    args.transposed_scales = turned->scales;
  }
  context_.ops.quantize(stream, args);
}

void BlockLinears::multiply(Stream& stream, const Operand& a, const Operand& b, Tensor bias, Tensor y,
                            bool accumulate) {
  Matmul args;
  args.a = a.codes;
  args.a_scales = a.scales;
  args.b = b.codes;
  args.b_scales = b.scales;
  args.transpose_b = true;
  args.bias = bias;
  args.y = y;
  args.accumulate = accumulate;
  context_.ops.matmul(stream, args);
}

void BlockLinears::forward(Stream& stream, int layer, int slab, LinearLayer which, const TokenPiece& piece,
                           Tensor x, Measured measured, Tensor w, Tensor bias, Tensor y, Tensor activated) {
  x = piece.of(x);
  y = piece.of(y);
  if (!fp8()) {
    Matmul args{.a = x, .b = w, .transpose_b = true, .y = y, .bias = bias};
    if (activated) {
      args.y = piece.of(activated);
      args.epilogue = context_.shape.gated() ? Epilogue::kSwiglu : Epilogue::kGelu;
      args.inner = y;
    }
    context_.ops.matmul(stream, args);
    return;
  }
  const Operand input = operand(input_, DType::kE4M3, x.rows, x.cols, ScaleCut::kRow128);
  const Operand weight = operand(weight_, DType::kE4M3, w.rows, w.cols, ScaleCut::kSquare128);
  quantize(stream, x, row_of(Role::kInput, layer, slab, which), !known(Role::kInput, slab, which, measured),
           &input, nullptr);
  if (piece.begin == 0) {
    std::int64_t& seen = weights_seen_[static_cast<std::size_t>(layer)][static_cast<std::size_t>(which)];
    const bool changed = seen != context_.parameters.version();
    seen = context_.parameters.version();
    quantize(stream, w, row_of(Role::kWeight, layer, slab, which), changed, &weight, nullptr);
  }
  multiply(stream, input, weight, bias, y, false);
}

void BlockLinears::input_gradient(Stream& stream, int layer, int slab, LinearLayer which,
                                  const TokenPiece& piece, Tensor dy, Measured measured, Tensor w, Tensor dx,
                                  Tensor inner) {
  dy = piece.of(dy);
  dx = piece.of(dx);
  if (!fp8()) {
    Matmul args{.a = dy, .b = w, .y = dx};
    if (inner) {
      args.epilogue = context_.shape.gated() ? Epilogue::kSwigluGradient : Epilogue::kGeluGradient;
      args.inner = piece.of(inner);
    }
    context_.ops.matmul(stream, args);
    return;
  }
  const DType type = gradient_type();
  const Operand gradient = operand(gradient_, type, dy.rows, dy.cols, ScaleCut::kRow128);
  const Operand turned = operand(turned_gradient_, type, dy.cols, dy.rows, ScaleCut::kRow128);
  const Operand weight = operand(weight_, DType::kE4M3, w.cols, w.rows, ScaleCut::kSquare128);
  quantize(stream, dy, row_of(Role::kGradient, layer, slab, which),
           !known(Role::kGradient, slab, which, measured), &gradient, in_pieces() ? nullptr : &turned);
  if (piece.begin == 0) {
    quantize(stream, w, row_of(Role::kWeight, layer, slab, which), false, nullptr, &weight);
  }
  multiply(stream, gradient, weight, {}, dx, false);
}

void BlockLinears::weight_gradient(Stream& stream, int layer, int slab, LinearLayer which, Tensor dy,
                                   Tensor x, Tensor dw, Tensor dbias, bool accumulate, bool later) {
  if (dbias) context_.ops.bias_backward(stream, dy, dbias, accumulate);
  if (!fp8()) {
    context_.ops.matmul(stream, {.a = dy, .b = x, .transpose_a = true, .y = dw, .accumulate = accumulate});
    return;
  }
  const Operand turned = operand(turned_gradient_, gradient_type(), dy.cols, dy.rows, ScaleCut::kRow128);
  const Operand input = operand(input_, DType::kE4M3, x.cols, x.rows, ScaleCut::kRow128);
  if (later || in_pieces()) {
    quantize(stream, dy, row_of(Role::kGradient, layer, slab, which),
             !known(Role::kGradient, slab, which, Measured::kBefore), nullptr, &turned);
  }
  quantize(stream, x, row_of(Role::kInput, layer, slab, which), in_pieces(), nullptr, &input);
  multiply(stream, turned, input, {}, dw, accumulate);
}

void BlockLinears::begin_step(Stream& stream) {
  if (delayed()) context_.ops.fill(stream, seen(), 0.0f);
}

void BlockLinears::finish_step(Stream& stream, const StepScalars* scalars) {
  if (!delayed()) return;
  context_.ops.remember_largest(stream, seen(), history(), scratch_.tensor(largest_), scalars);
  remembers_ = true;
}

void BlockLinears::restored(Stream& stream) {
  context_.ops.remember_largest(stream, {}, history(), scratch_.tensor(largest_), nullptr);
  remembers_ = true;
}

}  // namespace octet
