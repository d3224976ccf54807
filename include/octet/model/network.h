#pragma once

#include <functional>
#include <string>
#include <vector>

#include "octet/model/block.h"
#include "octet/model/chunk.h"
#include "octet/runtime/phase_timer.h"

namespace octet {

/// int32 arrays of a micro-batch in device memory, [1, tokens] each (see data/batch_loader.h).
struct DeviceBatch {
  Tensor ids, targets, positions, order, position_order, starts;
};

/// Rows of the logits that are held at once: as many of `tokens` as `bytes` give room for, at least one.
std::int64_t logits_rows(std::int64_t bytes, std::int64_t vocabulary_rows, DType compute,
                         std::int64_t tokens);

/// The part of the model that one rank works on, in chunks: embeddings, blocks, final norm, head and loss. A
/// Place tells the micro-batches apart that are held at once.
class Network {
 public:
  /// Declares activations in the arenas. `logits_bytes`: largest piece of the logits held at once;
  /// `recomputed`, of each layer of the model: whether it runs again in the backward pass.
  /// `split`: backward passes come in two parts, input gradients and weight gradients.
  Network(const LayerContext& context, std::vector<Chunk> chunks, StreamBuffers buffers, bool split,
          std::int64_t logits_bytes, const std::vector<bool>& recomputed, Arena& saved, Arena& scratch);
  /// Fills the tables that do not change. After the arenas are committed.
  void prepare(Device& device, Stream& stream);

  /// Where the stream from the chunk before goes, and where the stream for the next chunk is found.
  Tensor input(int chunk, const Place& place) const { return blocks_.input(slab(chunk, 0, place.slot)); }
  Tensor output(const Place& place) const { return buffer(outputs_, place.output); }
  /// The gradient of a chunk's output before backward(), of its input after it.
  Tensor gradient(const Place& place) const { return buffer(gradients_, place.gradient); }

  /// Forward pass of a micro-batch. A chunk with the head also adds loss and target count to `scalars` and,
  /// while it is at the logits, computes their gradient: gradients of the summed token loss go to the
  /// parameter access. `before_output` is called before the output, or with the head the
  /// gradient, is written.
  void forward(Stream& stream, int chunk, const Place& place, const DeviceBatch& batch, StepScalars* scalars,
               const std::function<void()>& before_output);
  /// The whole backward pass; with `split`, without the gradients of the blocks' matrices.
  void backward(Stream& stream, int chunk, const Place& place, const DeviceBatch& batch);
  void backward_weights(Stream& stream, int chunk, const Place& place);
  /// Forward only, keeping nothing: loss and target count.
  void evaluate(Stream& stream, int chunk, const Place& place, const DeviceBatch& batch,
                StepScalars* scalars);

  Workload workload() const;
  BlockLinears& linears() { return blocks_.linears(); }
  /// Marks in `phases` where the head begins, from now on; null: nowhere.
  void time_phases(PhaseTimer* phases) { phases_ = phases; }

 private:
  int slab(int chunk, int layer, int slot) const;
  const Chunk& at(int chunk) const { return chunks_[static_cast<std::size_t>(chunk)]; }
  void embed(Stream& stream, const DeviceBatch& batch, Tensor out);
  Tensor buffer(const std::vector<int>& rows, int index) const {
    return edges_.tensor(rows.at(static_cast<std::size_t>(index)), 0);
  }
  ResidualStream run_blocks(Stream& stream, int chunk, int slot, const DeviceBatch& batch, bool keep);
  /// Writes residual + delta where the next stage's input is sent from.
  void pass_on(Stream& stream, const ResidualStream& values, Tensor output);
  /// Final norm, logits piece by piece, loss; with `gradient` also the gradient of the last stream, measured
  /// in `largest`.
  void head(Stream& stream, const ResidualStream& in, const DeviceBatch& batch, Tensor gradient,
            Tensor largest, StepScalars* scalars);
  void embed_backward(Stream& stream, const DeviceBatch& batch, Tensor gradient);

  LayerContext context_;
  std::vector<Chunk> chunks_;
  std::vector<int> first_slab_;  ///< of each chunk
  BlockStack blocks_;
  ActivationTable edges_;
  Arena& scratch_;
  int last_ = -1, last_rstd_ = -1, last_mean_ = -1, normed_ = -1, normed_whole_ = -1;
  int logits_ = -1, partial_ = -1, partials_ = -1, rope_table_ = -1;
  std::vector<int> outputs_, gradients_;
  PhaseTimer* phases_ = nullptr;
  std::int64_t piece_ = 0;                 ///< rows of logits held at once
  std::int64_t first_id_ = 0, valid_ = 0;  ///< ids of the vocabulary that this tensor rank holds
  int embedding_ = 0, positions_ = -1, head_ = 0, norm_ = 0, norm_bias_ = -1;
};

}  // namespace octet
