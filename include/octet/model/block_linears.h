#pragma once

#include <cstdint>
#include <vector>

#include "octet/model/layer_context.h"
#include "octet/runtime/arena.h"

namespace octet {

/// The linear layers of a block.
enum class LinearLayer { kQkv, kOutput, kUp, kDown };
inline constexpr int kLinearLayers = 4;

/// The matrix products of a block's linear layers y = x·wᵀ, with x [t, in], w [out, in] and y [t, out]: in
/// the compute dtype, or with 8-bit copies of both operands that are made here (Fp8Recipe). Results, master
/// weights and gradients of weights are what they are without.
class BlockLinears {
 public:
  /// `slabs`: of activations, as in BlockStack. Reserves memory for 8-bit copies, one of each operand at
  /// work, and for the largest magnitudes that are known of inputs and weights.
  BlockLinears(const LayerContext& context, const HeadLayout& heads, int slabs, Arena& scratch);

  void forward(Stream& stream, int layer, int slab, LinearLayer which, Tensor x, Tensor w, Tensor bias,
               Tensor y);
  /// dx = dy·w. After forward() of the layer with the same weights.
  void input_gradient(Stream& stream, int layer, LinearLayer which, Tensor dy, Tensor w, Tensor dx);
  /// dw (+)= dyᵀ·x. After forward() with this x in this slab. `dy` is what the last input_gradient() had,
  /// unless `later`.
  void weight_gradient(Stream& stream, int slab, LinearLayer which, Tensor dy, Tensor x, Tensor dw,
                       bool accumulate, bool later);

 private:
  /// Place of 8-bit copies, with their scales.
  struct Place {
    int codes = -1, scales = -1;
  };
  struct Operand {
    Tensor codes;
    Scales scales;
  };
  bool fp8() const { return context_.fp8 != Fp8Recipe::kNone; }
  bool by_tensor() const { return context_.fp8 != Fp8Recipe::kBlock; }
  DType gradient_type() const { return by_tensor() ? DType::kE5M2 : DType::kE4M3; }
  Place reserve(Arena& scratch, std::int64_t rows, std::int64_t cols) const;
  /// The copy of a [rows, cols] matrix in a place.
  Operand operand(const Place& place, DType type, std::int64_t rows, std::int64_t cols, ScaleCut cut) const;
  Tensor largest(int row) const { return scratch_.tensor(largest_).row_range(row, 1); }
  int input_row(int slab, LinearLayer which) const { return kLinearLayers * slab + static_cast<int>(which); }
  int weight_row(int layer, LinearLayer which) const {
    return kLinearLayers * (slabs_ + layer) + static_cast<int>(which);
  }
  int gradient_row() const { return kLinearLayers * (slabs_ + static_cast<int>(weights_seen_.size())); }
  /// Makes the 8-bit copies of `from` that are asked for. `row`: of its largest magnitude; with `measure`
  /// that is found first.
  void quantize(Stream& stream, Tensor from, int row, bool measure, const Operand* straight,
                const Operand* turned);
  void multiply(Stream& stream, const Operand& a, const Operand& b, Tensor bias, Tensor y, bool accumulate);

  LayerContext context_;
  int slabs_ = 0;
  Arena& scratch_;
  Place input_, weight_, gradient_, turned_gradient_;
  int largest_ = -1;
  /// Of each layer's weights: the version whose largest magnitude is known.
  std::vector<std::vector<std::int64_t>> weights_seen_;
};

}  // namespace octet
