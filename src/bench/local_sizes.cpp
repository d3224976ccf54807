#include "local_sizes.h"

#include <algorithm>
#include <cmath>

#include "octet/model/network.h"
#include "octet/model/parameter_table.h"

namespace octet {

LocalSizes::LocalSizes(const BenchSession& session)
    : shape(shape_of(session.deck.model)), compute(session.compute()) {
  const Deck& deck = session.deck;
  fp8 = deck.precision.fp8 != "none";
  fp8_by_block = deck.precision.fp8 == "block";
  const auto tensor = static_cast<int>(deck.parallel.tensor);
  const std::int64_t context = deck.parallel.context;
  batch = deck.batch.micro;
  sequence = deck.batch.sequence / context;
  tokens = batch * sequence;
  norm_tokens = deck.parallel.sequence ? tokens / tensor : tokens;
  heads = local_heads(shape, 0, tensor);
  mlp = shape.mlp / tensor;
  inner = shape.gated() ? 2 * mlp : mlp;
  vocabulary_rows = octet::vocabulary_rows(shape.vocabulary, tensor);
  valid_rows = std::min(vocabulary_rows, shape.vocabulary);
  logits_rows = octet::logits_rows(deck.memory.logits_mib << 20, vocabulary_rows, compute, tokens);
  attention.layout = heads;
  attention.batch = batch;
  attention.sequence = context == 1 ? sequence : sequence / 2;
  attention.keys = context == 1 ? 0 : deck.batch.sequence;
  attention.scale = 1.0f / std::sqrt(static_cast<float>(shape.head_size));
}

Workload workload_of(const LocalSizes& sizes, const AttentionShape& attention, bool documents_apart) {
  Workload work;
  work.compute = sizes.compute;
  work.tokens = sizes.tokens;
  work.widest = std::max({sizes.inner, sizes.shape.hidden, sizes.heads.packed()});
  work.attention = attention;
  work.documents_apart = documents_apart;
  return work;
}

std::int64_t rows_within(const BenchLimits& limits, std::int64_t rows, std::int64_t cols,
                         double flops_per_row, std::vector<std::string>& notes) {
  std::int64_t kept = std::min(rows, limits.elements / cols);
  if (flops_per_row * static_cast<double>(kept) > limits.flops)
    kept = static_cast<std::int64_t>(limits.flops / flops_per_row);
  if (kept < rows) kept = std::min(rows, std::max<std::int64_t>(kept - kept % 16, 16));
  const std::string note = "rows of the deck's shapes were left out, to be quick on CPU ranks";
  if (kept < rows && std::find(notes.begin(), notes.end(), note) == notes.end()) notes.push_back(note);
  return kept;
}

}  // namespace octet
