#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "octet/runtime/arena.h"

namespace octet {

/// How long an activation is kept: from forward to backward, one copy a layer; likewise, unless the layer is
/// computed again in the backward pass, where such layers share one copy; or while one layer works, one copy
/// for all layers.
enum class Lifetime { kSaved, kRecomputable, kScratch };

/// One row an activation of a layer.
struct ActivationRow {
  std::string name;
  DType dtype = DType::kF32;
  std::int64_t rows = 0, cols = 0;
  Lifetime lifetime = Lifetime::kScratch;
};

/// The activations that a kind of layer declares, and their memory for a number of such layers.
class ActivationTable {
 public:
  int add(std::string name, DType dtype, std::int64_t rows, std::int64_t cols, Lifetime lifetime);
  const std::vector<ActivationRow>& rows() const { return rows_; }

  /// Reserves copies of the saved rows for each layer in `saved`, of the recomputable rows too where
  /// `recomputed` is false for the layer, and one of all others in `scratch`.
  void reserve(const std::vector<bool>& recomputed, Arena& saved, Arena& scratch);
  /// The tensor of a row for one layer; after the arenas are committed.
  Tensor tensor(int row, int layer) const;

 private:
  struct Place {
    Arena* arena = nullptr;
    int handle = 0;
  };
  std::vector<ActivationRow> rows_;
  std::vector<std::vector<Place>> places_;  ///< [row][layer]
};

}  // namespace octet
