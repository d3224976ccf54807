#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "octet/runtime/arena.h"

namespace octet {

/// How long an activation is kept: from forward to backward, one copy a layer; or while one layer works, one copy for all layers.
enum class Lifetime { kSaved, kScratch };

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

  /// Reserves `layers` copies of the saved rows in `saved` and one of the scratch rows in `scratch`.
  void reserve(int layers, Arena& saved, Arena& scratch);
  /// The tensor of a row for one layer; after the arenas are committed.
  Tensor tensor(int row, int layer) const;

 private:
  std::vector<ActivationRow> rows_;
  Arena* saved_ = nullptr;
  Arena* scratch_ = nullptr;
  std::vector<std::vector<int>> handles_;  ///< [row][layer], or [row][0] for scratch
};

}  // namespace octet
