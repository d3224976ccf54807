#include "octet/model/block.h"

#include <fmt/format.h>

#include <algorithm>

namespace octet {

BlockStack::BlockStack(const LayerContext& context, const std::vector<Chunk>& chunks,
                       const std::vector<bool>& recomputed, bool split, Arena& saved, Arena& scratch)
    : context_(context),
      heads_(local_heads(context.shape, context.tensor.rank(), context.tensor.size())),
      attention_(context.ops, context.context, context.timer, heads_, context.compute, context.batch,
                 context.sequence, context.documents_apart, scratch),
      linears_(context, heads_, chunks, static_cast<int>(recomputed.size()), scratch),
      recomputed_(recomputed),
      split_(split) {
  const ModelShape& shape = context.shape;
  const TensorAxis& tensor = context.tensor;
  const std::int64_t t = context.tokens(), shard = tensor.shard(t), h = shape.hidden;
  const std::int64_t f = shape.mlp / tensor.size(), inner = shape.gated() ? 2 * f : f;
  const DType type = context.compute;
  const bool layer_norm = shape.norm() == NormKind::kLayer;
  const auto keep = [&](const char* name, DType dtype, std::int64_t rows, std::int64_t cols) {
    return activations_.add(name, dtype, rows, cols, Lifetime::kRecomputable);
  };
  const auto work = [&](const char* name, std::int64_t rows, std::int64_t cols) {
    return activations_.add(name, type, rows, cols, Lifetime::kScratch);
  };
  rows_.x = activations_.add("x", type, shard, h, Lifetime::kSaved);
  rows_.attention_rstd = keep("attention_norm.rstd", DType::kF32, 1, shard);
  rows_.attention_mean = layer_norm ? keep("attention_norm.mean", DType::kF32, 1, shard) : -1;
  rows_.unnormed = shape.qk_norm ? keep("qkv before norm", type, t, heads_.packed()) : -1;
  rows_.head_rstd =
      shape.qk_norm ? keep("head_norm.rstd", DType::kF32, t, heads_.heads + heads_.kv_heads) : -1;
  rows_.qkv = keep("qkv", type, t, heads_.packed());
  rows_.out = keep("attention.out", type, t, heads_.query());
  rows_.statistics =
      keep("attention.statistics", DType::kF32, context.batch * heads_.heads, context.sequence);
  rows_.middle = keep("middle", type, shard, h);
  rows_.mlp_rstd = keep("mlp_norm.rstd", DType::kF32, 1, shard);
  rows_.mlp_mean = layer_norm ? keep("mlp_norm.mean", DType::kF32, 1, shard) : -1;
  rows_.inner = keep("mlp.inner", type, t, inner);

  const bool sharded = tensor.sequence_parallel();
  rows_.normed_whole = work("normed, all tokens", t, h);
  rows_.normed = sharded ? work("normed", shard, h) : rows_.normed_whole;
  rows_.partial = work("partial sums", t, h);
  rows_.delta = sharded ? work("delta", shard, h) : rows_.partial;
  rows_.wide = work("mlp activation", t, std::max(f, heads_.query()));
  rows_.dqkv = work("qkv gradient", t, heads_.packed());
  rows_.activation = split || keeps_activation() ? keep("mlp activation, kept", type, t, f) : -1;
  rows_.attention_normed = keeps_normed() ? keep("attention input, kept", type, t, h) : -1;
  rows_.mlp_normed = keeps_normed() ? keep("mlp input, kept", type, t, h) : -1;
  if (split) {
    rows_.down_dy = keep("mlp output gradient", type, t, h);
    rows_.up_x = keep("mlp input", type, t, h);
    rows_.o_dy = keep("attention output gradient", type, t, h);
    rows_.split_dqkv = keep("qkv gradient, kept", type, t, heads_.packed());
    rows_.qkv_x = keep("attention input", type, t, h);
    rows_.norms = keep("norm gradients", DType::kF32, kNorms, std::max<std::int64_t>(h, shape.head_size));
  }
  activations_.reserve(recomputed, saved, scratch);

  for (std::int64_t layer = 0; layer < shape.layers; ++layer) {
    const auto row = [&](const char* name) {
      return context.table.find(fmt::format("layers.{}.{}", layer, name));
    };
    const auto row_if = [&](bool present, const char* name) { return present ? row(name) : -1; };
    const bool biases = shape.biases(), qkv_bias = biases || shape.qkv_bias;
    Weights w{};
    w.bucket = static_cast<int>(layer) + 1;
    w.q = row("attention.q.weight");
    w.v = row("attention.v.weight");
    w.o = row("attention.o.weight");
    w.up = row("mlp.up.weight");
    w.gate = shape.gated() ? row("mlp.gate.weight") : w.up;
    w.down = row("mlp.down.weight");
    w.q_bias = row_if(qkv_bias, "attention.q.bias");
    w.v_bias = row_if(qkv_bias, "attention.v.bias");
    w.o_bias = row_if(biases, "attention.o.bias");
    w.up_bias = row_if(biases, "mlp.up.bias");
    w.down_bias = row_if(biases, "mlp.down.bias");
    w.attention_norm = row("attention_norm.weight");
    w.attention_norm_bias = row_if(biases, "attention_norm.bias");
    w.mlp_norm = row("mlp_norm.weight");
    w.mlp_norm_bias = row_if(biases, "mlp_norm.bias");
    w.q_norm = row_if(shape.qk_norm, "attention.q_norm.weight");
    w.k_norm = row_if(shape.qk_norm, "attention.k_norm.weight");
    weights_.push_back(w);
  }
}

Tensor BlockStack::norm_forward(Stream& stream, int layer, int slab, LinearLayer which, bool again,
                                const ResidualStream& in, int weight_row, int bias_row, Tensor sum,
                                Tensor rstd, Tensor mean) {
  const ModelShape& shape = context_.shape;
  const Tensor y = keeps_normed() ? kept_normed(slab, which) : tensor(rows_.normed, 0);
  context_.ops.norm_forward(
      stream, {shape.norm(), shape.norm_epsilon, in.residual, in.delta, weight(weight_row), weight(bias_row),
               sum, y, rstd, mean, again ? Tensor{} : linears_.largest_input(slab, which),
               linears_.input_codes(layer, which, y)});
  return y;
}

void BlockStack::run_to_inner(Stream& stream, int layer, int slab, const ResidualStream& in, bool again) {
  const Measured by_norm = linears_.direct() ? Measured::kCopied
                           : again           ? Measured::kBefore
                                             : Measured::kByProducer;
  Ops& ops = context_.ops;
  TensorAxis& axis = context_.tensor;
  const Weights& w = weights_[static_cast<std::size_t>(layer)];
  const Tensor x = tensor(rows_.x, slab), qkv = tensor(rows_.qkv, slab), out = tensor(rows_.out, slab);
  const Tensor middle = tensor(rows_.middle, slab), inner = tensor(rows_.inner, slab);

  const Tensor attention_normed =
      norm_forward(stream, layer, slab, LinearLayer::kQkv, again, in, w.attention_norm, w.attention_norm_bias,
                   x, tensor(rows_.attention_rstd, slab), tensor(rows_.attention_mean, slab));
  const Tensor attention_in = axis.gathered(attention_normed, tensor(rows_.normed_whole, 0));
  const Tensor projected = w.q_norm < 0 ? qkv : tensor(rows_.unnormed, slab);
  axis.gather(stream, attention_normed, attention_in, [&](const TokenPiece& piece) {
    linear_forward(stream, w, slab, LinearLayer::kQkv, piece, attention_in, by_norm, projected);
  });
  if (w.q_norm >= 0) {
    ops.head_norm_forward(stream, heads_, context_.shape.norm_epsilon, projected, weight(w.q_norm),
                          weight(w.k_norm), qkv, tensor(rows_.head_rstd, slab));
  }
  if (context_.shape.rotary()) ops.rope(stream, heads_, qkv, positions_, rope_table_, false);
  attention_.forward(stream, qkv, starts_, out, tensor(rows_.statistics, slab));

  const bool adds = adds_in_products();
  const Tensor attended = adds ? middle : tensor(rows_.partial, 0);
  const Tensor reduced = axis.reduce(stream, attended, tensor(rows_.delta, 0), [&](const TokenPiece& piece) {
    linear_forward(stream, w, slab, LinearLayer::kOutput, piece, out,
                   again ? Measured::kBefore : Measured::kNot, attended, {}, adds ? x : Tensor{});
  });
  const ResidualStream between = adds ? ResidualStream{middle, {}} : ResidualStream{x, reduced};
  const Tensor mlp_normed =
      norm_forward(stream, layer, slab, LinearLayer::kUp, again, between, w.mlp_norm, w.mlp_norm_bias, middle,
                   tensor(rows_.mlp_rstd, slab), tensor(rows_.mlp_mean, slab));
  const Tensor mlp_in = axis.gathered(mlp_normed, tensor(rows_.normed_whole, 0));
  axis.gather(stream, mlp_normed, mlp_in, [&](const TokenPiece& piece) {
    linear_forward(stream, w, slab, LinearLayer::kUp, piece, mlp_in, by_norm, inner,
                   keeps_activation() || (fuses_activation() && !again) ? activated(slab) : Tensor{});
  });
}

void BlockStack::activate(Stream& stream, int layer, int slab, Tensor inner, Tensor activation) {
  Ops& ops = context_.ops;
  const bool gated = context_.shape.gated();
  if (linears_.direct()) {
    const OutputCodes codes = linears_.input_codes(layer, LinearLayer::kDown, activation);
    return ops.coded_activation(stream, {gated, inner, codes});
  }
  const Tensor largest = linears_.largest_input(slab, LinearLayer::kDown);
  if (fuses_activation()) return;  // the up product has written it
  if (gated) {
    ops.swiglu_forward(stream, inner, activation, largest);
  } else {
    ops.gelu_forward(stream, inner, activation, largest);
  }
}

void BlockStack::activate_backward(Stream& stream, const Weights& w, int slab, Tensor inner,
                                   Tensor activation) {
  Ops& ops = context_.ops;
  const bool gated = context_.shape.gated();
  if (direct_backward()) {
    CodedActivationBackward args;
    args.gated = gated;
    args.in = inner;
    args.dout = activation;
    args.din = linears_.gradient_codes(w.bucket - 1, LinearLayer::kUp, inner);
    args.out = linears_.turned_input_codes(w.bucket - 1, LinearLayer::kDown, activation);
    args.dbias = gradient(w.up_bias);
    args.accumulate = context_.parameters.accumulates(w.bucket);
    return ops.coded_activation_backward(stream, args);
  }
  const Tensor largest = linears_.largest_gradient(slab, LinearLayer::kUp);
  if (gated) {
    ops.swiglu_backward(stream, inner, activation, largest);
  } else {
    ops.gelu_backward(stream, inner, activation, largest);
  }
}

ResidualStream BlockStack::forward(Stream& stream, int layer, int slab, const ResidualStream& in,
                                   Tensor out) {
  linears_.begin(stream, slab);
  run_to_inner(stream, layer, slab, in, false);
  const Weights& w = weights_[static_cast<std::size_t>(layer)];
  const Tensor activation = activated(slab), middle = tensor(rows_.middle, slab);
  activate(stream, layer, slab, tensor(rows_.inner, slab), activation);
  const bool adds = out && adds_in_products();
  const Tensor partial = adds ? out : tensor(rows_.partial, 0);
  const Tensor delta =
      context_.tensor.reduce(stream, partial, tensor(rows_.delta, 0), [&](const TokenPiece& piece) {
        linear_forward(stream, w, slab, LinearLayer::kDown, piece, activation,
                       linears_.direct() ? Measured::kCopied : Measured::kByProducer, partial, {},
                       adds ? middle : Tensor{});
      });
  return adds ? ResidualStream{out, {}} : ResidualStream{middle, delta};
}

BlockStack::LinearRows BlockStack::rows_of(const Weights& w, LinearLayer which) {
  switch (which) {
    case LinearLayer::kQkv:
      return {w.q, w.v, w.q_bias, w.v_bias};
    case LinearLayer::kOutput:
      return {w.o, w.o, w.o_bias, w.o_bias};
    case LinearLayer::kUp:
      return {w.gate, w.up, w.up_bias, w.up_bias};
    case LinearLayer::kDown:
      break;
  }
  return {w.down, w.down, w.down_bias, w.down_bias};
}

void BlockStack::linear_forward(Stream& stream, const Weights& w, int slab, LinearLayer which,
                                const TokenPiece& piece, Tensor x, Measured measured, Tensor y,
                                Tensor activated, Tensor addend) {
  const LinearRows rows = rows_of(w, which);
  // Partial products are summed over tensor ranks, so that one of them alone adds the bias.
  const bool summed = which == LinearLayer::kOutput || which == LinearLayer::kDown;
  const bool biased = rows.first_bias >= 0 && (!summed || context_.tensor.rank() == 0);
  const Tensor bias = biased ? context_.parameters.parameter(rows.first_bias, rows.last_bias) : Tensor{};
  linears_.forward(stream, w.bucket - 1, slab, which, piece, x, measured,
                   context_.parameters.weight(rows.first, rows.last), bias, y, activated, addend);
}

void BlockStack::input_gradient(Stream& stream, const Weights& w, int slab, LinearLayer which,
                                const TokenPiece& piece, Tensor dy, Measured measured, Tensor dx,
                                Tensor inner) {
  const LinearRows rows = rows_of(w, which);
  linears_.input_gradient(stream, w.bucket - 1, slab, which, piece, dy, measured,
                          context_.parameters.weight(rows.first, rows.last), dx, inner,
                          inner ? gradient(w.up_bias) : Tensor{}, context_.parameters.accumulates(w.bucket));
}

bool BlockStack::has_bias_gradient(LinearLayer which, int slab) const {
  switch (which) {
    case LinearLayer::kQkv:
      return false;
    case LinearLayer::kUp:
      return keeps_activation() || direct_backward();
    case LinearLayer::kOutput:
    case LinearLayer::kDown:
      break;
  }
  return sums_in_norms(slab);
}

void BlockStack::weight_gradient(Stream& stream, const Weights& w, int slab, LinearLayer which, Tensor dy,
                                 Tensor x, Measured measured) {
  const LinearRows rows = rows_of(w, which);
  const bool accumulate = context_.parameters.accumulates(w.bucket);
  const bool biased = rows.first_bias >= 0 && !has_bias_gradient(which, slab);
  const Tensor bias = biased ? context_.parameters.gradient(rows.first_bias, rows.last_bias) : Tensor{};
  linears_.weight_gradient(stream, w.bucket - 1, slab, which, dy, x, measured,
                           context_.parameters.gradient(rows.first, rows.last), bias, accumulate,
                           later(slab));
}

void BlockStack::norm_backward(Stream& stream, const Weights& w, int slab, LinearLayer which, Tensor x,
                               int weight_row, int bias_row, Tensor rstd, Tensor mean, Tensor dy, Tensor dx,
                               Tensor largest, const OutputCodes& copies) {
  NormBackward args;
  args.kind = context_.shape.norm();
  args.x = x;
  args.weight = weight(weight_row);
  args.bias = weight(bias_row);
  args.rstd = rstd;
  args.mean = mean;
  args.dy = dy;
  args.dx = dx;
  if (direct_backward()) {
    args.y_codes = linears_.turned_input_codes(w.bucket - 1, which, dy);
    args.dx_codes = copies;
  } else if (!keeps_normed()) {
    args.y = dy;
  }
  args.dweight = norm_gradient(w, slab, weight_row);
  args.dbias = norm_gradient(w, slab, bias_row);
  if (sums_in_norms(slab)) args.dx_sums = gradient(which == LinearLayer::kUp ? w.down_bias : w.o_bias);
  args.accumulate = !later(slab) && context_.parameters.accumulates(w.bucket);
  args.largest = largest;
  context_.ops.norm_backward(stream, args);
}

Tensor BlockStack::norm_gradient(const Weights& w, int slab, int row) {
  if (row < 0 || !later(slab)) return gradient(row);
  const std::array<int, kNorms> norms = norms_of(w);
  const auto place = std::find(norms.begin(), norms.end(), row) - norms.begin();
  return tensor(rows_.norms, slab).row_range(place, 1).range(0, weight(row).cols);
}

Tensor BlockStack::keep(Stream& stream, Tensor dy, int slab, int kept) {
  if (!later(slab)) return dy;
  context_.ops.cast(stream, dy, tensor(kept, slab));
  return tensor(kept, slab);
}

BlockStack::Gaps BlockStack::fill_gaps(int slab, const TensorAxis::Work& weights) {
  const TensorAxis& axis = context_.tensor;
  if (later(slab)) return {};
  if (axis.chunks() == 1) {
    weights();
    return {};
  }
  if (axis.sequence_parallel()) return {{}, weights};
  return {weights, {}};
}

void BlockStack::mlp_backward(Stream& stream, const Weights& w, int slab, Tensor dx, Measured measured) {
  TensorAxis& axis = context_.tensor;
  const Tensor inner = tensor(rows_.inner, slab);
  const Tensor activation = later(slab) ? tensor(rows_.activation, slab) : activated(slab);
  const bool fused = context_.shape.gated() ? fuses_activation() : keeps_activation();
  // Where a GELU's activation was kept, so is its input, whose gradient takes the room for an activation.
  const Tensor dinner = keeps_activation() && !context_.shape.gated() ? wide_mlp() : inner;
  const Tensor x_whole = operand(slab, rows_.up_x, rows_.normed_whole);
  const Tensor x = axis.sequence_parallel() ? tensor(rows_.normed, 0) : x_whole;

  const Tensor dx_whole = axis.gathered(dx, tensor(rows_.partial, 0));
  axis.gather(stream, dx, dx_whole, [&](const TokenPiece& piece) {
    input_gradient(stream, w, slab, LinearLayer::kDown, piece, dx_whole, measured,
                   keeps_activation() ? wide_mlp() : activation, fused ? inner : Tensor{});
  });
  const Tensor dy = keep(stream, dx_whole, slab, rows_.down_dy);
  if (!fused) activate_backward(stream, w, slab, inner, activation);
  const Measured remade = direct_backward() ? Measured::kCopied : Measured::kBefore;
  const Gaps gaps =
      fill_gaps(slab, [&] { weight_gradient(stream, w, slab, LinearLayer::kDown, dy, activation, remade); });
  const auto product = [&](const TokenPiece& piece) {
    input_gradient(stream, w, slab, LinearLayer::kUp, piece, dinner,
                   direct_backward() ? Measured::kCopied : Measured::kByProducer, x_whole);
  };
  const Tensor dnormed = axis.reduce(stream, x_whole, x, product, gaps.before_norm);
  norm_backward(stream, w, slab, LinearLayer::kUp, tensor(rows_.middle, slab), w.mlp_norm, w.mlp_norm_bias,
                tensor(rows_.mlp_rstd, slab), tensor(rows_.mlp_mean, slab), dnormed, dx,
                linears_.largest_gradient(slab, LinearLayer::kOutput),
                linears_.gradient_codes(w.bucket - 1, LinearLayer::kOutput, dx));
  const Tensor normed = axis.gather(stream, dnormed, x_whole, {}, gaps.after_norm);
  if (!later(slab)) {
    weight_gradient(stream, w, slab, LinearLayer::kUp, dinner,
                    keeps_normed() ? kept_normed(slab, LinearLayer::kUp) : normed, remade);
  }
}

void BlockStack::attention_backward(Stream& stream, const Weights& w, int slab, Tensor dx, int below) {
  Ops& ops = context_.ops;
  TensorAxis& axis = context_.tensor;
  const Tensor qkv = tensor(rows_.qkv, slab), out = tensor(rows_.out, slab), wide = tensor(rows_.wide, 0);
  const Tensor dout{wide.data, wide.dtype, out.rows, out.cols};
  const Tensor dqkv = operand(slab, rows_.split_dqkv, rows_.dqkv);
  const Tensor x_whole = operand(slab, rows_.qkv_x, rows_.normed_whole);
  const Tensor x = axis.sequence_parallel() ? tensor(rows_.normed, 0) : x_whole;

  const Tensor dx_whole = axis.gathered(dx, tensor(rows_.partial, 0));
  axis.gather(stream, dx, dx_whole, [&](const TokenPiece& piece) {
    input_gradient(stream, w, slab, LinearLayer::kOutput, piece, dx_whole,
                   direct_backward() ? Measured::kCopied : Measured::kByProducer, dout);
  });
  const Tensor dy = keep(stream, dx_whole, slab, rows_.o_dy);
  const Gaps gaps = fill_gaps(slab, [&] { weight_gradient(stream, w, slab, LinearLayer::kOutput, dy, out); });
  attention_.backward(stream, qkv, starts_, out, tensor(rows_.statistics, slab), dout, dqkv);
  if (context_.shape.rotary()) ops.rope(stream, heads_, dqkv, positions_, rope_table_, true);
  if (w.q_norm >= 0) {
    ops.head_norm_backward(stream, heads_, tensor(rows_.unnormed, slab), tensor(rows_.head_rstd, slab),
                           weight(w.q_norm), weight(w.k_norm), dqkv, norm_gradient(w, slab, w.q_norm),
                           norm_gradient(w, slab, w.k_norm),
                           !later(slab) && context_.parameters.accumulates(w.bucket));
  }
  const auto product = [&](const TokenPiece& piece) {
    input_gradient(stream, w, slab, LinearLayer::kQkv, piece, dqkv, Measured::kNot, x_whole);
  };
  const Tensor dnormed = axis.reduce(stream, x_whole, x, product, gaps.before_norm);
  const OutputCodes none;
  norm_backward(stream, w, slab, LinearLayer::kQkv, tensor(rows_.x, slab), w.attention_norm,
                w.attention_norm_bias, tensor(rows_.attention_rstd, slab), tensor(rows_.attention_mean, slab),
                dnormed, dx, below < 0 ? Tensor{} : largest_gradient(below),
                below < 0 ? none : linears_.gradient_codes(w.bucket - 2, LinearLayer::kDown, dx));
  const Tensor normed = axis.gather(stream, dnormed, x_whole, {}, gaps.after_norm);
  if (!later(slab)) {
    weight_gradient(stream, w, slab, LinearLayer::kQkv, dqkv,
                    keeps_normed() ? kept_normed(slab, LinearLayer::kQkv) : normed,
                    direct_backward() ? Measured::kCopied : Measured::kBefore);
  }
}

void BlockStack::backward(Stream& stream, int layer, int slab, Tensor dx, bool measured, bool above,
                          int below) {
  const Weights& w = weights_[static_cast<std::size_t>(layer)];
  if (recomputed_[static_cast<std::size_t>(slab)])
    run_to_inner(stream, layer, slab, {tensor(rows_.x, slab), {}}, true);
  mlp_backward(stream, w, slab, dx,
               above && direct_backward() ? Measured::kCopied
               : measured                 ? Measured::kByProducer
                                          : Measured::kNot);
  attention_backward(stream, w, slab, dx, below);
}

void BlockStack::backward_weights(Stream& stream, int layer, int slab) {
  if (!later(slab)) return;
  const Weights& w = weights_[static_cast<std::size_t>(layer)];
  const auto kept = [&](int row) { return tensor(row, slab); };
  for (const int row : norms_of(w)) {
    if (row < 0) continue;
    const Tensor from = norm_gradient(w, slab, row);
    if (context_.parameters.accumulates(w.bucket)) {
      context_.ops.add(stream, from, gradient(row));
    } else {
      context_.ops.cast(stream, from, gradient(row));
    }
  }
  weight_gradient(stream, w, slab, LinearLayer::kDown, kept(rows_.down_dy), kept(rows_.activation));
  weight_gradient(stream, w, slab, LinearLayer::kUp, kept(rows_.inner), kept(rows_.up_x));
  weight_gradient(stream, w, slab, LinearLayer::kOutput, kept(rows_.o_dy), kept(rows_.out));
  weight_gradient(stream, w, slab, LinearLayer::kQkv, kept(rows_.split_dqkv), kept(rows_.qkv_x));
}

}  // namespace octet
