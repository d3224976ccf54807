#pragma once

#include <array>
#include <vector>

#include "octet/model/activation_table.h"
#include "octet/model/block_linears.h"
#include "octet/model/context_attention.h"
#include "octet/model/layer_context.h"

namespace octet {

/// The residual stream between blocks: its value is residual + delta, added by the next norm in the same
/// pass. delta may be empty.
struct ResidualStream {
  Tensor residual, delta;
};

/// All transformer blocks of a network, pre-norm: x += attention(norm(x)); x += mlp(norm(x)). Covers
/// Llama-like (RMSNorm, rotary positions, SwiGLU) and GPT-2-like (LayerNorm, GELU, biases) blocks.
///
/// Saved per layer: x, the packed rotated qkv, attention output and statistics, the stream between the
/// halves, the MLP's inner projection; with LayerContext::keep_activations also norm outputs (keeps_normed())
/// and the MLP's activation (keeps_activation()), which the backward kernels that read their inputs anyway
/// write once more where they are not saved. Of recomputed layers x alone.
class BlockStack {
 public:
  /// Declares activations in the arenas: a slab for each layer of `chunks` and micro-batch that is held at
  /// once. `recomputed`, of each slab: whether its layer's forward pass runs again in the backward pass.
  /// `split`: input and weight gradients are computed apart, so what weight gradients take is kept for each
  /// slab.
  BlockStack(const LayerContext& context, const std::vector<Chunk>& chunks,
             const std::vector<bool>& recomputed, bool split, Arena& saved, Arena& scratch);

  const ContextAttention& attention() const { return attention_; }
  BlockLinears& linears() { return linears_; }
  /// Positions and starts (int32 [1, tokens], see MicroBatch) of the present micro-batch; the rotation table
  /// for rotary models.
  void set_batch(Tensor positions, Tensor starts, Tensor rope_table) {
    positions_ = positions;
    starts_ = starts;
    rope_table_ = rope_table;
  }

  /// Where the input of a layer that uses this slab may be written: [tokens of this rank, hidden].
  Tensor input(int slab) const { return tensor(rows_.x, slab); }
  /// Runs one layer of the model, keeping in `slab` what the backward pass needs. (Evaluation runs all layers
  /// in one slab.) `out`, if there is one: where the output stream may lie as a whole.
  ResidualStream forward(Stream& stream, int layer, int slab, const ResidualStream& in, Tensor out);
  /// `gradient` [tokens of this rank, hidden]: of the output stream on entry, of the input stream on return.
  /// `measured`: largest_gradient(slab) was given to whoever wrote it; `above`: that was the layer above;
  /// `below`: the slab of the layer that takes it next, -1 if none does. With `split` the gradients of
  /// matrices and their biases are left to backward_weights().
  void backward(Stream& stream, int layer, int slab, Tensor gradient, bool measured, bool above, int below);
  /// What an operator that writes the gradient of a slab's output stream raises (see
  /// BlockLinears::largest_gradient).
  Tensor largest_gradient(int slab) const { return linears_.largest_gradient(slab, LinearLayer::kDown); }
  void backward_weights(Stream& stream, int layer, int slab);

  /// Whether this slab's weight gradients come later. Recomputed layers, which have nothing kept, do all at
  /// once.
  bool later(int slab) const { return split_ && !recomputed_[static_cast<std::size_t>(slab)]; }
  /// Row `kept` of the slab where weight gradients come later, else scratch row `shared`.
  Tensor operand(int slab, int kept, int shared) const {
    return later(slab) ? tensor(kept, slab) : tensor(shared, 0);
  }

 private:
  struct Weights {  ///< rows of the parameter table; -1 where the model has none
    int bucket, q, v, o, gate, up, down, q_bias, v_bias, o_bias, up_bias, down_bias;
    int attention_norm, attention_norm_bias, mlp_norm, mlp_norm_bias, q_norm, k_norm;
  };
  struct Rows {  ///< rows of the activation table; -1 where the model has none
    int x, attention_rstd, attention_mean, unnormed, head_rstd, qkv, out, statistics, middle, mlp_rstd,
        mlp_mean, inner;
    int normed_whole, normed, partial, delta, wide, dqkv;
    int activation;                    ///< of the MLP, kept: with split, or keeps_activation()
    int attention_normed, mlp_normed;  ///< norm outputs, kept: with keeps_normed()
    int down_dy, up_x, o_dy, split_dqkv,
        qkv_x;  ///< with split: operands of weight gradients, kept
    int norms;  ///< with split: gradients of norms, kept
  };

  /// The layer up to the MLP's inner projection, and its activation where fuses_activation() and, with
  /// `again`, the backward pass does not rebuild it: all that the backward pass needs of it. `again`: as this
  /// slab had it before.
  void run_to_inner(Stream& stream, int layer, int slab, const ResidualStream& in, bool again);
  Tensor tensor(int row, int slab) const { return row < 0 ? Tensor{} : activations_.tensor(row, slab); }
  Tensor weight(int row) { return row < 0 ? Tensor{} : context_.parameters.parameter(row); }
  Tensor gradient(int row) { return row < 0 ? Tensor{} : context_.parameters.gradient(row); }
  /// Norms of a layer, by the place of their gradients in row `norms`.
  static constexpr int kNorms = 6;
  static std::array<int, kNorms> norms_of(const Weights& w) {
    return {w.attention_norm, w.attention_norm_bias, w.mlp_norm, w.mlp_norm_bias, w.q_norm, w.k_norm};
  }
  /// Whether norms' backward passes, which read the stream's gradient, add up its columns for the biases of
  /// the layers that add to the stream: where they read all tokens, and those gradients are not for later.
  bool sums_in_norms(int slab) const { return !later(slab) && !context_.tensor.sequence_parallel(); }
  /// Whether an operator that handles the output gradient of `which` has summed its columns for the bias.
  bool has_bias_gradient(LinearLayer which, int slab) const;
  /// Where the backward pass of a norm writes the gradient of parameter `row`: its place, or memory kept for
  /// later.
  Tensor norm_gradient(const Weights& w, int slab, int row);
  /// `dy` itself, or a copy in row `kept` where it is needed later.
  Tensor keep(Stream& stream, Tensor dy, int slab, int kept);
  /// Whether the up product ends in the activation; separate passes otherwise. Apart from what linears allow,
  /// with split the gradient has to lie in place of the activation's input, as a SwiGLU's does anyway.
  bool fuses_activation() const { return linears_.fuses_activation() && (context_.shape.gated() || !split_); }
  /// Whether products add their results to the stream: where no other rank's are to be added first.
  bool adds_in_products() const { return context_.tensor.size() == 1; }
  /// Whether the activation's gradient is part of the down product's, which leaves the activation where it
  /// is.
  bool keeps_activation() const { return fuses_activation() && context_.keep_activations; }
  /// Whether norm outputs stay until weight gradients take them. (With split those are kept anyway; with
  /// sequence parallelism they would be of all tokens, where ranks share the rest.)
  bool keeps_normed() const {
    return context_.keep_activations && context_.fp8 == Fp8Recipe::kNone && !split_ &&
           !context_.tensor.sequence_parallel();
  }
  /// The output of the norm before `which`, where keeps_normed().
  Tensor kept_normed(int slab, LinearLayer which) const {
    return tensor(which == LinearLayer::kQkv ? rows_.attention_normed : rows_.mlp_normed, slab);
  }
  /// Room for the MLP's activation or its gradient while a layer works, [tokens, mlp of this rank].
  Tensor wide_mlp() const {
    const Tensor wide = tensor(rows_.wide, 0);
    return {wide.data, wide.dtype, wide.rows, context_.shape.mlp / context_.tensor.size()};
  }
  /// The MLP's activation in the forward pass.
  Tensor activated(int slab) const {
    return keeps_activation() ? tensor(rows_.activation, slab) : wide_mlp();
  }
  /// The norm before linear layer `which`, whose 8-bit input it writes where it may. `again`: as this slab
  /// had it before. Returns where its output of this rank's tokens is.
  Tensor norm_forward(Stream& stream, int layer, int slab, LinearLayer which, bool again,
                      const ResidualStream& in, int weight_row, int bias_row, Tensor sum, Tensor rstd,
                      Tensor mean);
  /// Adds the gradient through the norm before `which` to `gradient`, measured in `largest` or copied to
  /// `copies`, and leaves the norm's output, unless it was kept, in place of `dy`, or of the input of `which`
  /// in 8 bits. Where sums_in_norms(), also the bias gradient of the linear layer before it, whose output's
  /// gradient `gradient` is on entry.
  void norm_backward(Stream& stream, const Weights& w, int slab, LinearLayer which, Tensor x, int weight_row,
                     int bias_row, Tensor rstd, Tensor mean, Tensor dy, Tensor gradient, Tensor largest,
                     const OutputCodes& copies);
  /// The MLP's activation of `inner`, and its gradient: `inner` becomes its gradient and `activation`, the
  /// gradient of the output, the output; or both are left, and 8-bit copies made of what they would be.
  void activate(Stream& stream, int layer, int slab, Tensor inner, Tensor activation);
  void activate_backward(Stream& stream, const Weights& w, int slab, Tensor inner, Tensor activation);
  /// Whether operators of the backward pass write 8-bit operands themselves. What later weight gradients take
  /// is kept in the compute dtype.
  bool direct_backward() const { return linears_.direct() && !split_; }
  /// What is computed while the stream would wait for collectives around a norm's backward pass.
  struct Gaps {
    TensorAxis::Work before_norm, after_norm;
  };
  /// Puts the weight gradient of the layer whose input gradient came last where a collective is to wait for:
  /// with sequence parallelism the gather of the norm's output, which takes longest; without, where `dy` is
  /// the stream's gradient and changes with the norm, the last piece's sum. With one chunk, and 8-bit
  /// operands that the next product replaces, there is no gap: it is computed now.
  Gaps fill_gaps(int slab, const TensorAxis::Work& weights);
  void attention_backward(Stream& stream, const Weights& weights, int slab, Tensor gradient, int below);
  void mlp_backward(Stream& stream, const Weights& weights, int slab, Tensor gradient, Measured measured);
  /// A linear layer's rows of the parameter table, first and last: q … v and gate … up are one matrix each.
  struct LinearRows {
    int first, last, first_bias, last_bias;
  };
  static LinearRows rows_of(const Weights& w, LinearLayer which);
  void linear_forward(Stream& stream, const Weights& w, int slab, LinearLayer which, const TokenPiece& piece,
                      Tensor x, Measured measured, Tensor y, Tensor activated = {}, Tensor addend = {});
  void input_gradient(Stream& stream, const Weights& w, int slab, LinearLayer which, const TokenPiece& piece,
                      Tensor dy, Measured measured, Tensor dx, Tensor inner = {});
  /// dw (+)= dyᵀ·x and, where there is a bias without has_bias_gradient(), db (+)= column sums of dy.
  /// `measured`: of x.
  void weight_gradient(Stream& stream, const Weights& w, int slab, LinearLayer which, Tensor dy, Tensor x,
                       Measured measured = Measured::kBefore);

  LayerContext context_;
  HeadLayout heads_;
  ContextAttention attention_;
  BlockLinears linears_;
  ActivationTable activations_;
  Rows rows_{};
  std::vector<Weights> weights_;
  std::vector<bool> recomputed_;
  bool split_ = false;
  Tensor positions_, starts_, rope_table_;
};

}  // namespace octet
