#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "octet/base/box.h"
#include "octet/model/shape.h"

namespace octet {

/// How tensor parallelism cuts a parameter.
enum class Split {
  kNone,        ///< the same on every tensor rank
  kRows,        ///< equal blocks of rows (output features)
  kCols,        ///< equal blocks of columns (input features)
  kKeyHeads,    ///< rows by key head; the same on every rank where heads do not divide
  kVocabulary,  ///< rows in blocks of equal, padded size; padding rows are zero and stay zero
};

/// What a tensor rank's own gradient of a parameter that all of them hold amounts to.
enum class GradientPart {
  kComplete,  ///< every rank computes all of it
  kSequence,  ///< with sequence parallelism a rank sees its tokens only
  kHeads,     ///< a rank sees its own heads only
};

/// One row a parameter; everything else about parameters is derived from this table. Vectors are [1, n].
struct ParameterRow {
  std::string name;
  std::int64_t rows = 0, cols = 0;
  Split split = Split::kNone;
  GradientPart part = GradientPart::kComplete;
  int bucket = 0;      ///< 0: embeddings, 1 … layers: blocks, layers + 1: final norm and head
  bool decay = false;  ///< weight decay: matrices yes, norms and biases no
  bool follows =
      false;  ///< lies directly behind the row before it, so that both are one matrix (q, k, v; gate, up)
  float deviation = 0.0f;  ///< of the initial normal distribution
  float constant = 0.0f;   ///< initial value where deviation is 0
};

/// All parameters of a model, in the order in which they lie in their buckets. Names, as in checkpoints:
/// embedding.weight, positions.weight, layers.N.{attention_norm,mlp_norm},
/// layers.N.attention.{q,k,v,o,q_norm,k_norm}, layers.N.mlp.{gate,up,down}, norm, head.weight (absent when
/// tied), each with .weight and, where it has one, .bias.
class ParameterTable {
 public:
  explicit ParameterTable(const ModelShape& shape);
  const std::vector<ParameterRow>& rows() const { return rows_; }
  int buckets() const { return buckets_; }
  /// Index of a row by name; asserts that it exists.
  int find(const std::string& name) const;
  std::int64_t parameters() const;

 private:
  std::vector<ParameterRow> rows_;
  int buckets_ = 0;
};

/// What one tensor rank holds of a parameter: a matrix of [rows, cols], whose first box.rows rows are that
/// box of the global one; rows beyond are padding. box.rows may be 0.
struct LocalParameter {
  std::int64_t rows = 0, cols = 0;
  Box box;
  bool replicated = false;  ///< every tensor rank holds the same
  bool partial = false;     ///< replicated, and each rank's gradient is a part of the sum
};

LocalParameter local_part(const ParameterRow& row, const ModelShape& shape, int tensor_rank, int tensor_size,
                          bool sequence_parallel);

/// Rows of a vocabulary that each tensor rank holds, padding included: a multiple of 64, so that matrix
/// products are aligned.
std::int64_t vocabulary_rows(std::int64_t vocabulary, int tensor_size);

/// The local attention heads of a tensor rank.
HeadLayout local_heads(const ModelShape& shape, int tensor_rank, int tensor_size);

}  // namespace octet
