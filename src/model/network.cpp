#include "octet/model/network.h"

#include <algorithm>

namespace octet {

namespace {

/// Of each slab: whether its layer is recomputed. Slabs lie by chunk, then layer, then slot.
std::vector<bool> recomputed_slabs(const std::vector<Chunk>& chunks, const std::vector<bool>& recomputed) {
  std::vector<bool> slabs;
  for (const Chunk& chunk : chunks) {
    for (int layer = 0; layer < chunk.layers; ++layer) {
      const bool again = recomputed[static_cast<std::size_t>(chunk.first_layer + layer)];
      slabs.insert(slabs.end(), static_cast<std::size_t>(chunk.in_flight), again);
    }
  }
  return slabs;
}

}  // namespace

std::int64_t logits_rows(std::int64_t bytes, std::int64_t vocabulary_rows, DType compute,
                         std::int64_t tokens) {
  const std::int64_t rows = std::clamp<std::int64_t>(bytes / (vocabulary_rows * size_of(compute)), 1, tokens);
  return rows > 128 ? rows - rows % 128 : rows;
}

Network::Network(const LayerContext& context, std::vector<Chunk> chunks, StreamBuffers buffers, bool split,
                 std::int64_t logits_bytes, const std::vector<bool>& recomputed, Arena& saved, Arena& scratch)
    : context_(context),
      chunks_(std::move(chunks)),
      blocks_(context, chunks_, recomputed_slabs(chunks_, recomputed), split, saved, scratch),
      scratch_(scratch) {
  const ModelShape& shape = context.shape;
  const ParameterTable& table = context.table;
  const TensorAxis& tensor = context.tensor;
  int next_slab = 0;
  for (const Chunk& chunk : chunks_) {
    first_slab_.push_back(next_slab);
    next_slab += chunk.layers * chunk.in_flight;
  }
  embedding_ = table.find("embedding.weight");
  if (!shape.rotary()) positions_ = table.find("positions.weight");
  head_ = shape.tied ? embedding_ : table.find("head.weight");
  norm_ = table.find("norm.weight");
  if (shape.biases()) norm_bias_ = table.find("norm.bias");
  const ParameterRow& head = table.rows()[static_cast<std::size_t>(head_)];
  const LocalParameter local =
      local_part(head, shape, tensor.rank(), tensor.size(), tensor.sequence_parallel());
  first_id_ = local.box.row;
  valid_ = local.box.rows;

  const std::int64_t t = context.tokens(), shard = tensor.shard(t), h = shape.hidden;
  const DType type = context.compute;
  const auto work = [&](const char* name, DType dtype, std::int64_t rows, std::int64_t cols) {
    return edges_.add(name, dtype, rows, cols, Lifetime::kScratch);
  };
  for (int i = 0; i < buffers.gradients; ++i) gradients_.push_back(work("stream gradient", type, shard, h));
  for (int i = 0; i < buffers.outputs; ++i)
    outputs_.push_back(work("stream to the next stage", type, shard, h));
  normed_whole_ = work("last normed, all tokens", type, t, h);
  if (chunks_.back().head) {
    last_ = work("last stream", type, shard, h);
    last_rstd_ = work("norm.rstd", DType::kF32, 1, shard);
    if (shape.norm() == NormKind::kLayer) last_mean_ = work("norm.mean", DType::kF32, 1, shard);
    normed_ = tensor.sequence_parallel() ? work("last normed", type, shard, h) : normed_whole_;
    piece_ = logits_rows(logits_bytes, local.rows, type, t);
    logits_ = work("logits", type, piece_, local.rows);
    partial_ = work("loss parts", DType::kF32, piece_, 3);
    if (tensor.size() > 1)
      partials_ = work("loss parts of all ranks", DType::kF32, piece_ * tensor.size(), 3);
  }
  edges_.reserve({false}, saved, scratch);
  if (shape.rotary()) rope_table_ = scratch.reserve(DType::kF32, context.positions, shape.head_size);
}

int Network::slab(int chunk, int layer, int slot) const {
  return first_slab_[static_cast<std::size_t>(chunk)] + layer * at(chunk).in_flight + slot;
}

void Network::prepare(Device& device, Stream& stream) {
  if (rope_table_ < 0) return;
  const Tensor to = scratch_.tensor(rope_table_);
  const std::vector<float> table = rope_table(context_.shape, to.rows);
  device.copy(stream, to.data, table.data(), to.bytes());
  stream.synchronize();
}

Workload Network::workload() const {
  const ModelShape& shape = context_.shape;
  const std::int64_t inner = shape.mlp * (shape.gated() ? 2 : 1);
  const AttentionShape attention = blocks_.attention().largest();
  Workload work;
  work.compute = context_.compute;
  work.tokens = context_.tokens();
  work.widest = std::max({inner, shape.hidden, attention.layout.packed()});
  work.attention = attention;
  work.documents_apart = blocks_.attention().documents_apart();
  return work;
}

void Network::embed(Stream& stream, const DeviceBatch& batch, Tensor to) {
  ParameterAccess& parameters = context_.parameters;
  const TensorAxis& tensor = context_.tensor;
  parameters.begin_forward(stream, 0);
  // With tensor parallelism every rank adds the rows it holds; one of them adds the positions.
  const bool with_positions = positions_ >= 0 && tensor.rank() == 0;
  const Tensor out = tensor.sequence_parallel() ? edges_.tensor(normed_whole_, 0) : to;
  context_.ops.embedding_forward(stream, batch.ids, parameters.parameter(embedding_), first_id_,
                                 batch.positions,
                                 with_positions ? parameters.parameter(positions_) : Tensor{}, out);
  tensor.reduce(stream, out, to);
}

ResidualStream Network::run_blocks(Stream& stream, int chunk, int slot, const DeviceBatch& batch, bool keep) {
  blocks_.set_batch(batch.positions, batch.starts, rope_table_ < 0 ? Tensor{} : scratch_.tensor(rope_table_));
  ResidualStream values{blocks_.input(slab(chunk, 0, slot)), {}};
  if (at(chunk).embeds) embed(stream, batch, values.residual);
  for (int layer = 0; layer < at(chunk).layers; ++layer) {
    const int number = at(chunk).first_layer + layer;
    context_.parameters.begin_forward(stream, number + 1);
    const bool last = layer + 1 == at(chunk).layers;
    const Tensor next = last ? Tensor{} : blocks_.input(slab(chunk, keep ? layer + 1 : 0, slot));
    values = blocks_.forward(stream, number, slab(chunk, keep ? layer : 0, slot), values, next);
  }
  return values;
}

void Network::pass_on(Stream& stream, const ResidualStream& values, Tensor output) {
  context_.ops.cast(stream, values.residual, output);
  context_.ops.add(stream, values.delta, output);
}

void Network::head(Stream& stream, const ResidualStream& in, const DeviceBatch& batch, Tensor dx,
                   Tensor largest, StepScalars* scalars) {
  const bool gradient = static_cast<bool>(dx);
  ParameterAccess& parameters = context_.parameters;
  const TensorAxis& tensor = context_.tensor;
  const ModelShape& shape = context_.shape;
  Ops& ops = context_.ops;
  const int norm_bucket = context_.table.buckets() - 1, head_bucket = shape.tied ? 0 : norm_bucket;
  if (phases_ != nullptr) phases_->enter(stream, StepPhase::kHead);
  // Where another stage embeds, this one's copy of a tied embedding is read here alone.
  if (shape.tied && !chunks_.front().embeds) parameters.begin_forward(stream, 0);
  if (gradient) {
    parameters.begin_backward(stream, norm_bucket);
    if (shape.tied) parameters.begin_backward(stream, 0, false);
  } else {
    parameters.begin_forward(stream, norm_bucket);
  }
  const auto optional = [&](int row) { return row < 0 ? Tensor{} : parameters.parameter(row); };
  const auto mean = last_mean_ < 0 ? Tensor{} : edges_.tensor(last_mean_, 0);
  const Tensor last = edges_.tensor(last_, 0), rstd = edges_.tensor(last_rstd_, 0),
               normed = edges_.tensor(normed_, 0);
  ops.norm_forward(stream, {shape.norm(), shape.norm_epsilon, in.residual, in.delta,
                            parameters.parameter(norm_), optional(norm_bias_), last, normed, rstd, mean});
  const Tensor whole = tensor.gather(stream, normed, edges_.tensor(normed_whole_, 0));

  const Tensor weight = parameters.parameter(head_);
  bool accumulate = parameters.accumulates(head_bucket);
  const double share = tensor.rank() == 0 ? 1.0 : 0.0;
  for (std::int64_t at = 0; at < whole.rows; at += piece_) {
    const std::int64_t count = std::min(piece_, whole.rows - at);
    const Tensor rows = whole.row_range(at, count), targets = batch.targets.range(at, count);
    const Tensor logits = edges_.tensor(logits_, 0).row_range(0, count);
    const Tensor partial = edges_.tensor(partial_, 0).row_range(0, count);
    ops.matmul(stream, {.a = rows, .b = weight, .transpose_b = true, .y = logits});
    if (tensor.size() == 1) {
      ops.cross_entropy(stream, logits, valid_, targets, partial, gradient, scalars);
    } else {
      ops.cross_entropy_partial(stream, logits, first_id_, valid_, targets, partial);
      const Tensor partials =
          tensor.gather_all(stream, partial, edges_.tensor(partials_, 0).row_range(0, count * tensor.size()));
      ops.cross_entropy_finish(stream, logits, first_id_, valid_, targets, partials, share, gradient,
                               scalars);
    }
    if (!gradient) continue;
    ops.matmul(stream, {.a = logits,
                        .b = rows,
                        .transpose_a = true,
                        .y = parameters.gradient(head_),
                        .accumulate = accumulate});
    accumulate = true;
    // The normed rows have served: their gradient takes their place.
    ops.matmul(stream, {.a = logits, .b = weight, .y = rows});
  }
  if (!gradient) return;

  const Tensor dnormed = tensor.reduce(stream, whole, normed);
  ops.fill(stream, dx, 0.0f);
  NormBackward args;
  args.kind = shape.norm();
  args.x = in.delta ? last : in.residual;
  args.weight = parameters.parameter(norm_);
  args.bias = optional(norm_bias_);
  args.rstd = rstd;
  args.mean = mean;
  args.dy = dnormed;
  args.dx = dx;
  args.dweight = parameters.gradient(norm_);
  args.dbias = norm_bias_ < 0 ? Tensor{} : parameters.gradient(norm_bias_);
  args.accumulate = parameters.accumulates(norm_bucket);
  args.largest = largest;
  ops.norm_backward(stream, args);
  parameters.finish_backward(stream, norm_bucket);
}

void Network::embed_backward(Stream& stream, const DeviceBatch& batch, Tensor gradient) {
  ParameterAccess& parameters = context_.parameters;
  Ops& ops = context_.ops;
  const bool head_came_first = context_.shape.tied && chunks_.back().head;
  if (!head_came_first) parameters.begin_backward(stream, 0, false);
  const bool accumulate = parameters.accumulates(0);
  const Tensor dx = context_.tensor.gather(stream, gradient, edges_.tensor(normed_whole_, 0));
  const Tensor dtable = parameters.gradient(embedding_);
  if (!head_came_first && !accumulate) ops.fill(stream, dtable, 0.0f);
  ops.embedding_backward(stream, batch.ids, batch.order, dx, first_id_, dtable);
  if (positions_ >= 0) {
    const Tensor dpositions = parameters.gradient(positions_);
    if (!accumulate) ops.fill(stream, dpositions, 0.0f);
    ops.embedding_backward(stream, batch.positions, batch.position_order, dx, 0, dpositions);
  }
  parameters.finish_backward(stream, 0);
}

void Network::forward(Stream& stream, int chunk, const Place& place, const DeviceBatch& batch,
                      StepScalars* scalars, const std::function<void()>& before_output) {
  const ResidualStream values = run_blocks(stream, chunk, place.slot, batch, true);
  before_output();
  if (at(chunk).head) {
    const int last = slab(chunk, at(chunk).layers - 1, place.slot);
    head(stream, values, batch, gradient(place), blocks_.largest_gradient(last), scalars);
  } else {
    pass_on(stream, values, output(place));
  }
}

void Network::backward(Stream& stream, int chunk, const Place& place, const DeviceBatch& batch) {
  blocks_.set_batch(batch.positions, batch.starts, rope_table_ < 0 ? Tensor{} : scratch_.tensor(rope_table_));
  const Tensor dx = gradient(place);
  for (int layer = at(chunk).layers - 1; layer >= 0; --layer) {
    const int number = at(chunk).first_layer + layer;
    const int slab = this->slab(chunk, layer, place.slot);
    context_.parameters.begin_backward(stream, number + 1, true, !blocks_.later(slab));
    // From another stage comes the gradient alone.
    const bool above = layer + 1 < at(chunk).layers, measured = above || at(chunk).head;
    const int below = layer > 0 ? this->slab(chunk, layer - 1, place.slot) : -1;
    blocks_.backward(stream, number, slab, dx, measured, above, below);
    if (!blocks_.later(slab)) context_.parameters.finish_backward(stream, number + 1);
  }
  if (at(chunk).embeds) embed_backward(stream, batch, dx);
}

void Network::backward_weights(Stream& stream, int chunk, const Place& place) {
  for (int layer = at(chunk).layers - 1; layer >= 0; --layer) {
    const int number = at(chunk).first_layer + layer;
    const int slab = this->slab(chunk, layer, place.slot);
    if (!blocks_.later(slab)) continue;
    context_.parameters.begin_backward(stream, number + 1, false);
    blocks_.backward_weights(stream, number, slab);
    context_.parameters.finish_backward(stream, number + 1);
  }
}

void Network::evaluate(Stream& stream, int chunk, const Place& place, const DeviceBatch& batch,
                       StepScalars* scalars) {
  const ResidualStream values = run_blocks(stream, chunk, place.slot, batch, false);
  if (at(chunk).head) {
    head(stream, values, batch, {}, {}, scalars);
  } else {
    pass_on(stream, values, output(place));
  }
}

}  // namespace octet
