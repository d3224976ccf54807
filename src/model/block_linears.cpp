#include "octet/model/block_linears.h"

#include <algorithm>

namespace octet {

BlockLinears::BlockLinears(const LayerContext& context, const HeadLayout& heads,
                           const std::vector<Chunk>& chunks, int slabs, Arena& scratch)
    : context_(context), slabs_(slabs), scratch_(scratch) {
  if (!fp8()) return;
  const ModelShape& shape = context.shape;
  const std::int64_t t = context.tokens(), h = shape.hidden, f = shape.mlp / context.tensor.size();
  const std::int64_t inner = shape.gated() ? 2 * f : f, q = heads.query(), packed = heads.packed();
  input_ = reserve(scratch, t, std::max({h, q, f}));
  gradient_ = reserve(scratch, t, std::max({h, inner, packed}));
  turned_gradients_ = {reserve(scratch, t, h), reserve(scratch, t, std::max(inner, packed))};
  reserve_weights({packed * h, h * q, inner * h, h * f}, chunks);
  const std::int64_t rows =
      delayed() ? shape.layers * kLinearLayers * kRoles : kSlabRows * slabs + kLinearLayers * shape.layers;
  largest_ = scratch.reserve(DType::kF32, rows, 1);
  if (!delayed()) return;
  seen_ = scratch.reserve(DType::kF32, rows, 1);
  history_ = scratch.reserve(DType::kF32, rows, context.fp8_history);
}

void BlockLinears::reserve_weights(const std::array<std::int64_t, kLinearLayers>& sizes,
                                   const std::vector<Chunk>& chunks) {
  const std::int64_t h = context_.shape.hidden;
  const auto straight = [&](std::int64_t cols) {
    return context_.fp8_gather ? Place{} : reserve(scratch_, h, cols);
  };
  if (!context_.fp8_keep_weights) {
    const Place shared = reserve(scratch_, h, *std::max_element(sizes.begin(), sizes.end()) / h);
    weights_.assign(static_cast<std::size_t>(context_.shape.layers * kLinearLayers), {shared, shared});
    return;
  }
  weights_.resize(static_cast<std::size_t>(context_.shape.layers * kLinearLayers));
  for (const Chunk& chunk : chunks) {
    for (int i = 0; i < chunk.layers * kLinearLayers; ++i) {
      const std::int64_t cols = sizes[static_cast<std::size_t>(i % kLinearLayers)] / h;
      weights_[static_cast<std::size_t>(chunk.first_layer * kLinearLayers + i)] = {
          straight(cols), reserve(scratch_, h, cols)};
    }
  }
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
    case Measured::kCopied:
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

OutputCodes BlockLinears::output_codes(Role role, int layer, LinearLayer which, const Tensor& sizes,
                                       const Place* straight, const Place* turned) const {
  if (!direct()) return {};
  const DType type = role == Role::kGradient ? gradient_type() : DType::kE4M3;
  const int row = row_of(role, layer, 0, which);
  OutputCodes output;
  output.largest = scratch_.tensor(largest_).row_range(row, 1);
  output.seen = seen().row_range(row, 1);
  if (straight != nullptr) {
    const Operand copy = operand(*straight, type, sizes.rows, sizes.cols, ScaleCut::kTensor);
    output.codes = copy.codes;
    output.scale = copy.scales.values;
  }
  if (turned != nullptr) {
    const Operand copy = operand(*turned, type, sizes.cols, sizes.rows, ScaleCut::kTensor);
    output.transposed = copy.codes;
    output.scale = copy.scales.values;
  }
  return output;
}

OutputCodes BlockLinears::input_codes(int layer, LinearLayer which, const Tensor& x) const {
  return output_codes(Role::kInput, layer, which, x, &input_, nullptr);
}

OutputCodes BlockLinears::turned_input_codes(int layer, LinearLayer which, const Tensor& x) const {
  return output_codes(Role::kInput, layer, which, x, nullptr, &input_);
}

OutputCodes BlockLinears::gradient_codes(int layer, LinearLayer which, const Tensor& dy) const {
  const Place straight = straight_gradient(which);
  return output_codes(Role::kGradient, layer, which, dy, &straight, &turned_gradient(which));
}

void BlockLinears::note_largest(Stream& stream, int layer, LinearLayer which, const LinearWeight& w) {
  if (!delayed()) return;
  const int row = row_of(Role::kWeight, layer, 0, which);
  context_.ops.cast(stream, w.largest, seen().row_range(row, 1));
  if (!remembers_) context_.ops.cast(stream, w.largest, scratch_.tensor(largest_).row_range(row, 1));
}

BlockLinears::Operand BlockLinears::straight_weight(Stream& stream, int layer, LinearLayer which,
                                                    const LinearWeight& w, bool first_piece) {
  Weight& weight = weight_of(layer, which);
  const bool changed = weight.measured != state_of_weights();
  weight.measured = state_of_weights();
  OCTET_ASSERT(static_cast<bool>(w.scale) == context_.fp8_gather);
  if (w.scale) {
    if (changed) note_largest(stream, layer, which, w);
    return {w.values, {w.scale}};
  }
  const Tensor& from = w.values;
  const Operand straight = operand(weight.straight, DType::kE4M3, from.rows, from.cols, ScaleCut::kSquare128);
  const bool kept = context_.fp8_keep_weights;
  if (!first_piece || (kept && !changed)) return straight;
  const Operand turned = operand(weight.turned, DType::kE4M3, from.cols, from.rows, ScaleCut::kSquare128);
  quantize(stream, from, row_of(Role::kWeight, layer, 0, which), changed, &straight,
           kept ? &turned : nullptr);
  return straight;
}

BlockLinears::Operand BlockLinears::turned_weight(Stream& stream, int layer, LinearLayer which,
                                                  const LinearWeight& w, bool first_piece) {
  Weight& weight = weight_of(layer, which);
  const Tensor& from = w.values;
  const Operand turned = operand(weight.turned, DType::kE4M3, from.cols, from.rows, ScaleCut::kSquare128);
  OCTET_ASSERT(weight.measured == state_of_weights());
  if (w.scale) {
    const bool kept = context_.fp8_keep_weights && weight.transposed == state_of_weights();
    if (first_piece && !kept) context_.ops.transpose_codes(stream, from, turned.codes);
    weight.transposed = state_of_weights();
    return {turned.codes, {w.scale}};
  }
  if (first_piece && !context_.fp8_keep_weights)
    quantize(stream, from, row_of(Role::kWeight, layer, 0, which), false, nullptr, &turned);
  return turned;
}

void BlockLinears::multiply(Stream& stream, const Operand& a, const Operand& b, Tensor bias, Tensor addend,
                            Tensor y, bool accumulate) {
  Matmul args;
  args.a = a.codes;
  args.a_scales = a.scales;
  args.b = b.codes;
  args.b_scales = b.scales;
  args.transpose_b = true;
  args.bias = bias;
  args.addend = addend;
  args.y = y;
  args.accumulate = accumulate;
  context_.ops.matmul(stream, args);
}

void BlockLinears::forward(Stream& stream, int layer, int slab, LinearLayer which, const TokenPiece& piece,
                           Tensor x, Measured measured, const LinearWeight& w, Tensor bias, Tensor y,
                           Tensor activated, Tensor addend) {
  x = piece.of(x);
  y = piece.of(y);
  if (addend) addend = piece.of(addend);
  if (!fp8()) {
    Matmul args{.a = x, .b = w.values, .transpose_b = true, .y = y, .bias = bias, .addend = addend};
    if (activated) {
      args.y = piece.of(activated);
      args.epilogue = context_.shape.gated() ? Epilogue::kSwiglu : Epilogue::kGelu;
      args.inner = y;
    }
    context_.ops.matmul(stream, args);
    return;
  }
  const Operand input = operand(input_, DType::kE4M3, x.rows, x.cols, ScaleCut::kRow128);
  if (measured != Measured::kCopied) {
    quantize(stream, x, row_of(Role::kInput, layer, slab, which), !known(Role::kInput, slab, which, measured),
             &input, nullptr);
  }
  multiply(stream, input, straight_weight(stream, layer, which, w, piece.begin == 0), bias, addend, y, false);
}

void BlockLinears::input_gradient(Stream& stream, int layer, int slab, LinearLayer which,
                                  const TokenPiece& piece, Tensor dy, Measured measured,
                                  const LinearWeight& w, Tensor dx, Tensor inner, Tensor dbias,
                                  bool accumulate) {
  dy = piece.of(dy);
  dx = piece.of(dx);
  if (!fp8()) {
    Matmul args{.a = dy, .b = w.values, .y = dx};
    if (inner) {
      args.epilogue = !context_.shape.gated()     ? Epilogue::kGeluGradient
                      : context_.keep_activations ? Epilogue::kSwigluGradientAlone
                                                  : Epilogue::kSwigluGradient;
      args.inner = piece.of(inner);
      args.bias_gradient = dbias;
      args.accumulate_bias_gradient = accumulate || piece.begin > 0;
    }
    context_.ops.matmul(stream, args);
    return;
  }
  const DType type = gradient_type();
  const Operand gradient = operand(straight_gradient(which), type, dy.rows, dy.cols, ScaleCut::kRow128);
  const Operand turned = operand(turned_gradient(which), type, dy.cols, dy.rows, ScaleCut::kRow128);
  if (measured != Measured::kCopied) {
    quantize(stream, dy, row_of(Role::kGradient, layer, slab, which),
             !known(Role::kGradient, slab, which, measured), &gradient, in_pieces() ? nullptr : &turned);
  }
  multiply(stream, gradient, turned_weight(stream, layer, which, w, piece.begin == 0), {}, {}, dx, false);
}

void BlockLinears::weight_gradient(Stream& stream, int layer, int slab, LinearLayer which, Tensor dy,
                                   Tensor x, Measured measured, Tensor dw, Tensor dbias, bool accumulate,
                                   bool later) {
  if (dbias) context_.ops.bias_backward(stream, dy, dbias, accumulate);
  if (!fp8()) {
    context_.ops.matmul(stream, {.a = dy, .b = x, .transpose_a = true, .y = dw, .accumulate = accumulate});
    return;
  }
  const Operand turned =
      operand(turned_gradient(which), gradient_type(), dy.cols, dy.rows, ScaleCut::kRow128);
  const Operand input = operand(input_, DType::kE4M3, x.cols, x.rows, ScaleCut::kRow128);
  if (later || in_pieces()) {
    quantize(stream, dy, row_of(Role::kGradient, layer, slab, which),
             !known(Role::kGradient, slab, which, Measured::kBefore), nullptr, &turned);
  }
  if (measured != Measured::kCopied)
    quantize(stream, x, row_of(Role::kInput, layer, slab, which), in_pieces(), nullptr, &input);
  multiply(stream, turned, input, {}, {}, dw, accumulate);
}

void BlockLinears::begin_step(Stream& stream) {
  ++renewals_;
  if (delayed()) context_.ops.fill(stream, seen(), 0.0f);
}

void BlockLinears::finish_step(Stream& stream, const StepScalars* scalars) {
  if (!delayed()) return;
  context_.ops.remember_largest(stream, seen(), history(), scratch_.tensor(largest_), scalars);
  remember();
}

void BlockLinears::remember() {
  if (remembers_) return;
  remembers_ = true;
  std::vector<Tensor> largest;
  for (int layer = 0; layer < static_cast<int>(context_.shape.layers); ++layer) {
    for (int which = 0; which < kLinearLayers; ++which) {
      const int row = row_of(Role::kWeight, layer, 0, static_cast<LinearLayer>(which));
      largest.push_back(scratch_.tensor(largest_).row_range(row, 1));
    }
  }
  context_.parameters.scale_weights_for(std::move(largest));
}

void BlockLinears::restored(Stream& stream) {
  // An operand that no earlier step saw, all of them having been skipped, is scaled by 1.
  context_.ops.fill(stream, scratch_.tensor(largest_), 0.0f);
  context_.ops.remember_largest(stream, {}, history(), scratch_.tensor(largest_), nullptr);
  remember();
  ++renewals_;
}

}  // namespace octet
