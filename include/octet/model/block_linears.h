#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "octet/model/chunk.h"
#include "octet/model/layer_context.h"
#include "octet/runtime/arena.h"

namespace octet {

/// The linear layers of a block.
enum class LinearLayer { kQkv, kOutput, kUp, kDown };
inline constexpr int kLinearLayers = 4;

/// What a linear layer knows of the largest magnitude of an operand.
enum class Measured {
  kNot,         ///< nothing
  kByProducer,  ///< what largest_input() or largest_gradient() gave was raised to it
  kBefore,      ///< it is the operand that this slab had before, since begin()
  kCopied       ///< its 8-bit copies are there: its producer had input_codes() or the like
};

/// The matrix products of a block's linear layers y = x·wᵀ, with x [t, in], w [out, in] and y [t, out]: in
/// the compute dtype, or with 8-bit copies of both operands that are made here (Fp8Recipe) unless a weight
/// comes as codes. Results, master weights and gradients of weights are what they are without.
class BlockLinears {
 public:
  /// `chunks`: this rank's layers; `slabs`: of activations, as in BlockStack. Reserves memory for 8-bit
  /// copies, one of each operand at work and, where they are kept, two of every weight, and for the largest
  /// magnitudes that are known of inputs and weights.
  BlockLinears(const LayerContext& context, const HeadLayout& heads, const std::vector<Chunk>& chunks,
               int slabs, Arena& scratch);

  /// Before a layer's forward pass in a slab: nothing is known of what the slab will hold.
  void begin(Stream& stream, int slab);
  /// What an operator that writes the input, or the output gradient, of a linear layer raises to its largest
  /// magnitude (see Ops). Empty where that would not do: scales come from elsewhere, tokens come in pieces,
  /// or the operator sees a tensor rank's rows alone.
  Tensor largest_input(int slab, LinearLayer which) const;
  Tensor largest_gradient(int slab, LinearLayer which) const;

  /// Whether operators write 8-bit copies themselves: where scales come from earlier steps, of which there
  /// are some, and an operator sees all tokens of an operand at once.
  bool direct() const {
    return context_.fp8_direct && delayed() && remembers_ && !in_pieces() &&
           !context_.tensor.sequence_parallel();
  }
  /// Where the operator that makes the input x of a linear layer writes its copy for forward(), and, later
  /// and transposed, for weight_gradient(); and where that which makes the output gradient dy writes both
  /// copies. Tensors give sizes alone. Each is good until the next layer's of the same kind. Empty unless
  /// direct().
  OutputCodes input_codes(int layer, LinearLayer which, const Tensor& x) const;
  OutputCodes turned_input_codes(int layer, LinearLayer which, const Tensor& x) const;
  OutputCodes gradient_codes(int layer, LinearLayer which, const Tensor& dy) const;

  /// Whether products can end in the MLP's activation or its gradient (Epilogue).
  bool fuses_activation() const { return context_.fuse_activation && !fp8(); }
  /// The rows of y in `piece`. Pieces of one product follow one another, the first row's first. With
  /// `activated`, where fuses_activation(), also `activated`: the MLP's activation of y. With `addend`
  /// instead, that is added to them.
  void forward(Stream& stream, int layer, int slab, LinearLayer which, const TokenPiece& piece, Tensor x,
               Measured measured, const LinearWeight& w, Tensor bias, Tensor y, Tensor activated,
               Tensor addend);
  /// dx = dy·w, rows in `piece`; with `inner`, where fuses_activation(), taken on through the activation of
  /// inner: Epilogue::kGeluGradient or kSwigluGradient; of a GELU, where there is a dbias, dbias (+)= column
  /// sums of dx. After forward() of the layer in this slab with the same weights.
  void input_gradient(Stream& stream, int layer, int slab, LinearLayer which, const TokenPiece& piece,
                      Tensor dy, Measured measured, const LinearWeight& w, Tensor dx, Tensor inner,
                      Tensor dbias, bool accumulate);
  /// dw (+)= dyᵀ·x and, where there is one, dbias (+)= column sums of dy. After forward() with this x in this
  /// slab. Unless tokens come in pieces (TensorAxis), `dy` is what the last input_gradient() of this layer
  /// had, or it comes `later`. `measured`: of x, kBefore or kCopied.
  void weight_gradient(Stream& stream, int layer, int slab, LinearLayer which, Tensor dy, Tensor x,
                       Measured measured, Tensor dw, Tensor dbias, bool accumulate, bool later);

  /// Whether scales come from earlier steps. Then, in every step: begin_step(); seen() is to be made the
  /// largest over all ranks; finish_step().
  bool delayed() const { return context_.fp8 == Fp8Recipe::kDelayed; }
  void begin_step(Stream& stream);
  Tensor seen() const { return scratch_.tensor(seen_); }
  void finish_step(Stream& stream, const StepScalars* scalars);
  /// Largest magnitudes in earlier steps, float32 [layers · 12, steps], of each linear layer's input, weight
  /// and output gradient: state of the run.
  Tensor history() const { return scratch_.tensor(history_); }
  /// After history() was filled from a checkpoint; nothing there is the beginning of a run, whose first step
  /// is scaled from its own magnitudes.
  void restored(Stream& stream);

 private:
  enum class Role { kInput, kWeight, kGradient };
  static constexpr int kRoles = 3;
  /// Place of 8-bit copies, with their scales.
  struct Place {
    int codes = -1, scales = -1;
  };
  struct Operand {
    Tensor codes;
    Scales scales;
  };
  bool fp8() const { return context_.fp8 != Fp8Recipe::kNone; }
  /// Whether tokens come in pieces, each with a scale of its own: of whole matrices nothing is kept then.
  bool in_pieces() const { return context_.tensor.chunks() > 1; }
  bool by_tensor() const { return context_.fp8 != Fp8Recipe::kBlock; }
  DType gradient_type() const { return by_tensor() ? DType::kE5M2 : DType::kE4M3; }
  /// `sizes`: elements of a layer's weights. Where copies are not kept, all weights take turns in one place.
  void reserve_weights(const std::array<std::int64_t, kLinearLayers>& sizes,
                       const std::vector<Chunk>& chunks);
  Place reserve(Arena& scratch, std::int64_t rows, std::int64_t cols) const;
  /// The copy of a [rows, cols] matrix in a place.
  Operand operand(const Place& place, DType type, std::int64_t rows, std::int64_t cols, ScaleCut cut) const;
  /// Where the largest magnitude of an operand is kept: with scales from earlier steps for each layer; else
  /// of weights for each layer, of inputs and gradients for each slab, which may be needed more than once.
  int row_of(Role role, int layer, int slab, LinearLayer which) const;
  /// Rows of a slab: of its inputs, then of its gradients.
  static constexpr int kSlabRows = 2 * kLinearLayers;
  Tensor largest_of(Role role, int slab, LinearLayer which) const;
  /// Whether those rows serve whole passes: with scales from the present, of tokens in one piece.
  bool keeps_largest() const { return context_.fp8 == Fp8Recipe::kCurrent && !in_pieces(); }
  const Place& turned_gradient(LinearLayer which) const {
    return turned_gradients_[which == LinearLayer::kQkv || which == LinearLayer::kUp ? 1 : 0];
  }
  /// By tensor both copies have one scale, which stays with the transposed one.
  Place straight_gradient(LinearLayer which) const {
    return by_tensor() ? Place{gradient_.codes, turned_gradient(which).scales} : gradient_;
  }
  /// What an operator needs to write these copies, either of which may be missing.
  OutputCodes output_codes(Role role, int layer, LinearLayer which, const Tensor& sizes,
                           const Place* straight, const Place* turned) const;
  /// Whether an operand's largest magnitude is in its row.
  bool known(Role role, int slab, LinearLayer which, Measured measured) const;
  /// Makes the 8-bit copies of `from` that are asked for. With `measure` its largest magnitude is found
  /// first, unless it comes from earlier steps.
  void quantize(Stream& stream, Tensor from, int row, bool measure, const Operand* straight,
                const Operand* turned);
  /// A weight and the memory of its copies, as it lies and transposed.
  struct Weight {
    Place straight, turned;
    std::int64_t measured = -1;    ///< state_of_weights() when its largest magnitude was found
    std::int64_t transposed = -1;  ///< the same of a weight that comes as codes: when those were transposed
  };
  Weight& weight_of(int layer, LinearLayer which) {
    return weights_[static_cast<std::size_t>(layer * kLinearLayers) + static_cast<std::size_t>(which)];
  }
  /// Never falls, and rises when parameters, or what scales are made for, may have changed. Once a step at
  /// least, since each step is to see the magnitudes of its weights.
  std::int64_t state_of_weights() const { return context_.parameters.version() + renewals_; }
  /// The 8-bit copy of a layer's w as it lies, or transposed.
  Operand straight_weight(Stream& stream, int layer, LinearLayer which, const LinearWeight& w,
                          bool first_piece);
  Operand turned_weight(Stream& stream, int layer, LinearLayer which, const LinearWeight& w,
                        bool first_piece);
  /// Takes over the largest magnitude of a weight that came as codes, where delayed() scales need it.
  void note_largest(Stream& stream, int layer, LinearLayer which, const LinearWeight& w);
  /// With delayed() scales: there are earlier steps now.
  void remember();
  void multiply(Stream& stream, const Operand& a, const Operand& b, Tensor bias, Tensor addend, Tensor y,
                bool accumulate);

  LayerContext context_;
  int slabs_ = 0;
  Arena& scratch_;
  Place input_, gradient_;
  /// Two, since a layer's may be written while that of the layer after it is still to be read.
  std::array<Place, 2> turned_gradients_;
  int largest_ = -1, seen_ = -1, history_ = -1;
  bool remembers_ = false;       ///< history is not empty
  std::vector<Weight> weights_;  ///< by layer of the model, then linear layer
  std::int64_t renewals_ = 0;    ///< of what state_of_weights() counts beside parameters
};

}  // namespace octet
