#pragma once

#include "octet/model/block.h"

namespace octet {

/// int32 arrays of a micro-batch in device memory, [1, tokens] each (see data/batch_loader.h).
struct DeviceBatch {
  Tensor ids, targets, positions, order;
};

/// The whole model on one rank: embeddings, blocks, final norm, head and loss.
class Network {
 public:
  /// Declares activations in the arenas. `logits_bytes`: largest piece of the logits held at once;
  /// `recomputed`: the layers that run again in the backward pass.
  Network(const LayerContext& context, std::int64_t logits_bytes, const std::vector<bool>& recomputed,
          Arena& saved, Arena& scratch);
  /// Fills the tables that do not change. After the arenas are committed.
  void prepare(Device& device, Stream& stream);

  /// Forward and backward of a micro-batch: gradients of the summed token loss go to the parameter access;
  /// loss and target count are added to `scalars`.
  void train(Stream& stream, const DeviceBatch& batch, StepScalars* scalars);
  /// Forward only: loss and target count.
  void evaluate(Stream& stream, const DeviceBatch& batch, StepScalars* scalars);

  const ActivationTable& block_activations() const { return blocks_.activations(); }
  const ActivationTable& edge_activations() const { return edges_; }
  Workload workload() const;

 private:
  void embed(Stream& stream, const DeviceBatch& batch);
  ResidualStream run_blocks(Stream& stream, const DeviceBatch& batch, bool keep);
  /// Final norm, logits piece by piece, loss; with `gradient` also the gradient of the last stream, left in
  /// gradient_.
  void head(Stream& stream, const ResidualStream& in, const DeviceBatch& batch, bool gradient,
            StepScalars* scalars);
  void embed_backward(Stream& stream, const DeviceBatch& batch);

  LayerContext context_;
  BlockStack blocks_;
  ActivationTable edges_;
  Arena& scratch_;
  int last_ = 0, last_rstd_ = 0, last_mean_ = 0, normed_ = 0, normed_whole_ = 0, gradient_ = 0;
  int logits_ = 0, partial_ = 0, partials_ = 0, rope_table_ = -1, position_order_ = -1;
  std::int64_t piece_ = 0;                 ///< rows of logits held at once
  std::int64_t first_id_ = 0, valid_ = 0;  ///< ids of the vocabulary that this tensor rank holds
  int embedding_ = 0, positions_ = -1, head_ = 0, norm_ = 0, norm_bias_ = -1;
};

}  // namespace octet
