#pragma once

#include <vector>

#include "octet/bench/operands.h"
#include "octet/ops/ops.h"

namespace octet {

/// One attention problem: its inputs and the room for its results, as training lays them out.
struct AttentionCase {
  /// Random inputs; `documents`: samples of several documents that do not see one another.
  AttentionCase(Operands& memory, const AttentionShape& shape, DType compute, bool documents);

  void forward(Ops& ops, Stream& stream) const;
  void backward(Ops& ops, Stream& stream) const;
  /// Pairs of query and key rows that see one another, over all samples.
  double pairs() const;

  /// Whether rows of the results, with many of the last among them, equal sums in float64.
  bool forward_right(Device& device, Stream& stream) const;
  bool backward_right(Device& device, Stream& stream) const;

  /// A matrix and the column of it where something begins.
  struct Part {
    Tensor matrix;
    std::int64_t column = 0, rows_per_sample = 0;
    SampleRows rows() const { return sample_rows(matrix, rows_per_sample, column); }
  };

  AttentionShape shape;
  Part query, key, value, out, dout, dquery, dkey, dvalue;
  Tensor statistics;
  Tensor document_starts;            ///< empty unless documents are apart
  std::vector<std::int32_t> starts;  ///< [batch·sequence], on the host

 private:
  AttentionOperands operands() const;
};

}  // namespace octet
