#include "octet/train/stage_plan.h"

#include <algorithm>
#include <utility>

#include "octet/parallel/pipeline_buffers.h"
#include "octet/parallel/pipeline_simulator.h"
#include "octet/parallel/stage_table.h"

namespace octet {

namespace {

/// The head's products, and the embedding's much smaller work, in units of one layer.
double head_work(const ModelShape& shape) {
  const double layer =
      static_cast<double>(shape.hidden) *
      static_cast<double>(2 * shape.query_dim() + 2 * shape.key_dim() + shape.mlp * (shape.gated() ? 3 : 2));
  return static_cast<double>(shape.hidden) * static_cast<double>(shape.vocabulary) / layer;
}

/// What the simulator says of a schedule: the idle share of the ranks, and the micro-batches that each holds
/// at once.
std::string forecast(const PipelineSchedule& schedule, const std::vector<StageLayers>& table) {
  std::vector<StageCost> costs;
  for (const StageLayers& stage : table) costs.push_back({stage.work, stage.work, stage.work, 0.0});
  const PipelineTimeline timeline = simulate(schedule, costs, Transfer::kStreams);
  std::string held;
  for (const RankMemory& rank : timeline.memory) held += fmt::format(" {}", rank.together.activations);
  const auto [least, most] = std::minmax_element(timeline.bubble.begin(), timeline.bubble.end());
  return fmt::format(
      "  simulated: idle {:.1f} to {:.1f} % of a step; activations of micro-batches held at once, by "
      "rank:{}\n",
      *least * 100, *most * 100, held);
}

}  // namespace

StagePlan plan_stages(const Deck& deck, const ModelShape& shape, const Grid& grid) {
  const int stages = grid.sizes().pipeline, chunks = static_cast<int>(deck.parallel.chunks),
            rank = grid.place().pipeline;
  const int replicas = grid.sizes().data * grid.sizes().context;
  const int slices = deck.parallel.shard_size > 0 ? static_cast<int>(deck.parallel.shard_size) : replicas;
  const auto micro_batches = static_cast<int>(deck.batch.global / (deck.batch.micro * grid.sizes().data));
  StagePlan plan;
  plan.split = deck.parallel.schedule == "zero_bubble";
  plan.schedule = make_schedule(deck.parallel.schedule, stages, chunks, micro_batches);
  validate(plan.schedule);
  const auto table = stage_table(static_cast<int>(shape.layers), stages, chunks, 0.1, head_work(shape));
  if (stages > 1) plan.table = format_stage_table(table, stages) + forecast(plan.schedule, table);

  const int last = stages * chunks - 1;
  plan.slices.assign(static_cast<std::size_t>(shape.layers) + 2, 0);
  for (int chunk = 0; chunk < chunks; ++chunk) {
    const int stage = plan.schedule.virtual_stage(rank, chunk);
    const StageLayers& layers = table[static_cast<std::size_t>(stage)];
    plan.chunks.push_back({layers.first, layers.count, stage == 0, stage == last, 1});
    std::fill_n(plan.slices.begin() + layers.first + 1, layers.count, slices);
    if (stage == 0) plan.slices.front() = slices;
    if (stage == last) plan.slices.back() = slices;
  }
  if (shape.tied && stages > 1 && (rank == 0 || rank == stages - 1)) {
    plan.shares_embedding = true;
    plan.slices.front() = 2 * replicas;
  }
  RankBuffers buffers = plan_buffers(plan.schedule, rank);
  for (std::size_t chunk = 0; chunk < plan.chunks.size(); ++chunk)
    plan.chunks[chunk].in_flight = buffers.slots[chunk];
  plan.places = std::move(buffers.places);
  plan.buffers = buffers.stream;
  return plan;
}

}  // namespace octet
