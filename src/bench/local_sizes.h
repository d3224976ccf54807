#pragma once

#include "octet/bench/session.h"
#include "octet/model/shape.h"
#include "octet/runtime/grid.h"

namespace octet {

/// Sizes of a micro-batch and of the layers' matrices on a rank, as the deck and its layout make them; equal
/// on all ranks.
struct LocalSizes {
  explicit LocalSizes(const BenchSession& session);

  ModelShape shape;
  DType compute = DType::kF32;
  bool fp8 = false, fp8_by_block = false;  ///< blocks' products in 8 bits; scales by 128 elements
  std::int64_t batch = 0, sequence = 0;    ///< samples, and tokens of each
  std::int64_t tokens = 0;
  std::int64_t norm_tokens = 0;  ///< tokens that norms work on: fewer with sequence parallelism
  HeadLayout heads;
  std::int64_t mlp = 0, inner = 0;   ///< columns of the MLP's activation and of its inner product
  std::int64_t vocabulary_rows = 0;  ///< of the embedding and the head, padding included
  std::int64_t valid_rows = 0;       ///< without padding, on the first tensor rank
  std::int64_t logits_rows = 0;      ///< tokens whose logits are held at once

  /// One attention pass: without context parallelism of whole samples, with it of the last run of queries
  /// and all keys.
  AttentionShape attention;
};

/// For Ops::prepare: whatever a part runs on these sizes.
Workload workload_of(const LocalSizes& sizes, const AttentionShape& attention, bool documents_apart);

/// As many of `rows` as keep rows·cols and rows·flops_per_row within the limits, a multiple of 16 where some
/// are left out, but at least 16. Notes once in `notes` that rows were left out.
std::int64_t rows_within(const BenchLimits& limits, std::int64_t rows, std::int64_t cols,
                         double flops_per_row, std::vector<std::string>& notes);

}  // namespace octet
