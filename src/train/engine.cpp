#include "octet/train/engine.h"

#include <xxhash.h>

#include <cmath>
#include <limits>

#include "octet/runtime/device_choice.h"
#include "octet/train/schedule.h"

namespace octet {

namespace {

constexpr std::int64_t kSummedBytes =
    3 * sizeof(double);  ///< loss, tokens, gradient_square: the head of StepScalars
static_assert(offsetof(StepScalars, gradient_square) == 2 * sizeof(double));

GridPoint grid_sizes(const Deck::Parallel& parallel) {
  return {static_cast<int>(parallel.tensor), static_cast<int>(parallel.context),
          static_cast<int>(parallel.data), static_cast<int>(parallel.pipeline)};
}

DType compute_type(const Deck& deck) {
  return deck.precision.compute == "bf16" ? DType::kBF16 : DType::kF32;
}

Fp8Recipe fp8_recipe(const Deck& deck) {
  const std::string& name = deck.precision.fp8;
  if (name == "current") return Fp8Recipe::kCurrent;
  if (name == "delayed") return Fp8Recipe::kDelayed;
  return name == "block" ? Fp8Recipe::kBlock : Fp8Recipe::kNone;
}

/// Whether 8-bit weights are kept. In ZeRO 3 they would take more memory than whole parameters do.
bool keeps_fp8_weights(const Deck& deck, std::int64_t micro_batches) {
  const std::string& kept = deck.precision.fp8_keep_weights;
  return kept == "auto" ? micro_batches > 1 && deck.parallel.zero < 3 : kept == "true";
}

OptimizerFormat optimizer_format(const Deck::Optimizer& optimizer) {
  const DType moments = optimizer.moments == "bf16"   ? DType::kBF16
                        : optimizer.moments == "8bit" ? DType::kI8
                                                      : DType::kF32;
  return {moments, optimizer.master == "split"};
}

/// For messages between stages: while NCCL's kernels wait for the other end they keep processors from
/// computing, and a message has the time of a whole stage to pass.
constexpr CommunicatorSettings kMessageSettings{.max_ctas = 4};

/// For what data ranks exchange behind the computation.
CommunicatorSettings data_settings(const Deck::Parallel& parallel) {
  CommunicatorSettings settings;
  settings.max_ctas = static_cast<int>(parallel.nccl_max_ctas);
  settings.traffic_class = static_cast<int>(parallel.nccl_traffic_class);
  if (parallel.nccl_cta_policy == "efficiency") settings.cta_policy = CtaPolicy::kEfficiency;
  if (parallel.nccl_cta_policy == "zero") settings.cta_policy = CtaPolicy::kZero;
  return settings;
}

/// How an engine's ranks reach one another.
struct Transport {
  Device& device;
  bool shared;
  const EngineWrappers& wrappers;

  std::unique_ptr<Communicator> connect(MPI_Comm ranks, const char* name,
                                        const CommunicatorSettings& settings = {}) const {
    std::unique_ptr<Communicator> made = make_communicator(ranks, device, shared, name, settings);
    return wrappers.communicator ? wrappers.communicator(std::move(made)) : std::move(made);
  }
};

std::unique_ptr<Ops> make_ops(const World& world, const Deck& deck, Device& device, PlanCache* plans,
                              const EngineWrappers& wrappers) {
  std::unique_ptr<Ops> made =
      device.kind() == DeviceKind::kCpu
          ? make_cpu_ops(cpu_threads(world))
          : make_cuda_ops(device, {.deterministic_attention = deck.run.deterministic,
                                   .matmul_plans = plans,
                                   .own_products = own_kernels_of(deck.run.matmul),
                                   .own_attention = own_kernels_of(deck.run.attention)});
  return wrappers.ops ? wrappers.ops(std::move(made)) : std::move(made);
}

}  // namespace

Engine::Engine(const World& world, const Deck& deck, Device& device, bool shared,
               const EngineWrappers& wrappers)
    : world_(world),
      deck_(deck),
      shape_(shape_of(deck.model)),
      table_(shape_),
      grid_(world.ranks(), grid_sizes(deck.parallel), static_cast<int>(deck.parallel.shard_size)),
      device_(device),
      stages_(plan_stages(deck_, shape_, grid_)),
      tensor_(Transport{device, shared, wrappers}.connect(grid_.tensor(), "tensor")),
      data_gradients_(Transport{device, shared, wrappers}.connect(grid_.shards(), "data (gradients)",
                                                                  data_settings(deck.parallel))),
      data_parameters_(Transport{device, shared, wrappers}.connect(grid_.shards(), "data (parameters)",
                                                                   data_settings(deck.parallel))),
      everyone_(Transport{device, shared, wrappers}.connect(world.ranks(), "world")),
      copies_(Transport{device, shared, wrappers}.connect(grid_.copies(), "data (copies of slices)",
                                                          data_settings(deck.parallel))),
      context_(Transport{device, shared, wrappers}.connect(grid_.context(), "context")),
      stream_(device.make_stream()),
      plans_(world, deck.run, device.kind()),
      ops_(make_ops(world, deck, device, plans_.cache(), wrappers)),
      timer_(device),
      messages_(device, stages_,
                Transport{device, shared, wrappers}.connect(grid_.pipeline(), "pipeline (activations)",
                                                            kMessageSettings),
                Transport{device, shared, wrappers}.connect(grid_.pipeline(), "pipeline (gradients)",
                                                            kMessageSettings),
                timer_),
      axis_(device, *tensor_, deck.parallel.sequence, static_cast<int>(deck.parallel.tensor_chunks), timer_),
      layout_(table_, shape_, tensor_->rank(), tensor_->size(), axis_.sequence_parallel(), stages_.slices) {
  const BatchCut cut = this->cut();
  const DType compute = compute_type(deck_);
  if (stages_.shares_embedding) {
    embedding_gradients_ = Transport{device, shared, wrappers}.connect(grid_.ends(), "embedding (gradients)",
                                                                       data_settings(deck.parallel));
    embedding_parameters_ = Transport{device, shared, wrappers}.connect(
        grid_.ends(), "embedding (parameters)", data_settings(deck.parallel));
  }
  store_ = std::make_unique<ParameterStore>(
      device_, *ops_, layout_, ZeroStage{static_cast<int>(deck_.parallel.zero), deck_.precision.fp8_gather},
      compute, optimizer_format(deck_.optimizer), static_cast<int>(cut.micro_batches()),
      StoreRanks{*data_gradients_, *data_parameters_, *copies_, *tensor_, embedding_gradients_.get(),
                 embedding_parameters_.get()},
      timer_, deck_.parallel.overlap_optimizer);
  const LayerContext context{shape_,
                             table_,
                             *store_,
                             axis_,
                             *context_,
                             timer_,
                             *ops_,
                             compute,
                             cut.micro,
                             cut.local_sequence(),
                             cut.sequence,
                             cut.mask_documents,
                             fp8_recipe(deck_),
                             deck_.precision.fp8_history,
                             deck_.run.fuse_matmul,
                             deck_.memory.recompute != "selective",
                             keeps_fp8_weights(deck_, cut.micro_batches()),
                             deck_.precision.fp8_gather && data_parameters_->size() > 1,
                             !wrappers.quantize_apart};
  std::vector<bool> recomputed;
  for (std::int64_t layer = 0; layer < shape_.layers; ++layer) {
    recomputed.push_back(deck_.memory.recompute == "block" && layer % deck_.memory.recompute_every == 0);
  }
  network_ = std::make_unique<Network>(context, stages_.chunks, stages_.buffers, stages_.split,
                                       deck_.memory.logits_mib << 20, recomputed, saved_, scratch_);

  const std::vector<float> rates = learning_rates(deck_);
  packed_ = small_.reserve(DType::kI32, MicroBatch::kArrays * cut.micro_batches(), cut.tokens());
  rates_ = small_.reserve(DType::kF32, 1, static_cast<std::int64_t>(rates.size()));
  scalars_ = small_.reserve(DType::kI32, 1, sizeof(StepScalars) / 4);
  evaluation_ = small_.reserve(DType::kI32, 1, sizeof(StepScalars) / 4);
  if (deck_.parallel.overlap_optimizer) verdict_ = small_.reserve(DType::kI32, 1, sizeof(StepScalars) / 4);
  saved_.commit(device_);
  scratch_.commit(device_);
  small_.commit(device_);
  ops_->prepare(network_->workload());
  network_->prepare(device_, *stream_);
  device_.copy(*stream_, small_.tensor(rates_).data, rates.data(), small_.tensor(rates_).bytes());
  stream_->synchronize();
  for (Slot& slot : slots_) {
    slot.scalars = device_.allocate_host(sizeof(StepScalars), "step results");
    slot.end = device_.make_event(true);
  }
  restart_clock();
  libraries_ = device_.memory_used();
  for (const auto& [name, bytes] : memory()) libraries_ -= name == "context, libraries" ? 0 : bytes;
  libraries_ = std::max<std::int64_t>(libraries_,
                                      0);  // operators of the CPU keep scratch that its device does not count
}

Engine::~Engine() = default;

BatchCut Engine::cut() const {
  const GridPoint &place = grid_.place(), &sizes = grid_.sizes();
  return {deck_.batch.sequence, deck_.batch.micro, deck_.batch.global, place.data,
          sizes.data,           place.context,     sizes.context,      deck_.data.mask_documents};
}

std::string Engine::layout() const {
  return fmt::format("{}{}, ZeRO {}, micro-batch {}", grid_.describe(),
                     axis_.sequence_parallel() ? " with sequence" : "", deck_.parallel.zero,
                     deck_.batch.micro);
}

std::vector<std::pair<std::string, std::int64_t>> Engine::memory() const {
  auto classes = store_->memory();
  for (const Arena* arena : {&saved_, &scratch_, &small_})
    classes.emplace_back(arena->purpose(), arena->bytes());
  classes.emplace_back("operators", ops_->workspace_bytes());
  classes.emplace_back("context, libraries", libraries_);
  return classes;
}

void Engine::initialise() {
  store_->initialise(*stream_, static_cast<std::uint64_t>(deck_.run.seed));
  restored(0);
}

void Engine::restored(std::int64_t updates) {
  StepScalars scalars;
  scalars.updates = updates;
  device_.copy(*stream_, small_.tensor(scalars_).data, &scalars, sizeof scalars);
  store_->publish(*stream_);
  stream_->synchronize();
  restart_clock();
}

Tensor Engine::fp8_history() const {
  BlockLinears& linears = network_->linears();
  return linears.delayed() ? linears.history() : Tensor{};
}

void Engine::restore_fp8_history(const std::vector<float>& values) {
  const Tensor history = fp8_history();
  OCTET_ASSERT(static_cast<std::int64_t>(values.size()) == history.size());
  device_.copy(*stream_, history.data, values.data(), history.bytes());
  network_->linears().restored(*stream_);
}

void Engine::time_phases(PhaseTimer* phases) {
  phases_ = phases;
  network_->time_phases(phases);
}

void Engine::restart_clock() {
  slot(queued_ + 2).end->record(*stream_);
}

DeviceBatch Engine::upload(const MicroBatch& batch, int index) {
  const Tensor packed = small_.tensor(packed_).row_range(MicroBatch::kArrays * index, MicroBatch::kArrays);
  device_.copy(*stream_, packed.data, batch.packed, batch.bytes());
  const auto row = [&](std::int64_t number) { return packed.row_range(number, 1); };
  return {row(0), row(1), row(2), row(3), row(4), row(5)};
}

void Engine::execute(const Action& action, const DeviceBatch& batch, StepScalars* scalars) {
  const Place& place =
      stages_.places[static_cast<std::size_t>(action.chunk)][static_cast<std::size_t>(action.micro_batch)];
  if (is_message(action.kind)) {
    enter(StepPhase::kMessages);
    const Tensor values = action.kind == ActionKind::kSendForward      ? network_->output(place)
                          : action.kind == ActionKind::kReceiveForward ? network_->input(action.chunk, place)
                                                                       : network_->gradient(place);
    return messages_.pass(*stream_, action, values, stages_.schedule.peer(grid_.place().pipeline, action));
  }
  enter(action.kind == ActionKind::kForward ? StepPhase::kForward : StepPhase::kBackward);
  store_->begin_micro_batch(action.micro_batch);
  messages_.begin(*stream_, action);
  switch (action.kind) {
    case ActionKind::kForward:
      network_->forward(*stream_, action.chunk, place, batch, scalars,
                        [&] { messages_.make_room(*stream_, action); });
      break;
    case ActionKind::kBackwardWeight:
      network_->backward_weights(*stream_, action.chunk, place);
      break;
    default:
      network_->backward(*stream_, action.chunk, place, batch);
      break;
  }
  messages_.end(*stream_, action);
}

void Engine::accumulate(const std::vector<MicroBatch>& batches, StepScalars* scalars) {
  OCTET_ASSERT(static_cast<std::int64_t>(batches.size()) == cut().micro_batches());
  store_->begin_step(*stream_);
  network_->linears().begin_step(*stream_);
  std::vector<DeviceBatch> uploaded;
  for (const MicroBatch& batch : batches)
    uploaded.push_back(upload(batch, static_cast<int>(uploaded.size())));
  for (const Action& action : stages_.schedule.ranks[static_cast<std::size_t>(grid_.place().pipeline)]) {
    execute(action, uploaded[static_cast<std::size_t>(action.micro_batch)], scalars);
  }
  messages_.finish(*stream_);
}

void Engine::warm_up(const std::vector<MicroBatch>& batches) {
  OCTET_ASSERT(pending() == 0);
  timer_.restart(false);
  auto* scalars = static_cast<StepScalars*>(small_.tensor(evaluation_).data);
  accumulate(batches, scalars);
  store_->finish_gradients(*stream_, scalars);
  stream_->synchronize();
  restart_clock();
}

std::string Engine::tune(const std::vector<MicroBatch>& batches) {
  if (!plans_.times()) return plans_.note();
  warm_up(batches);
  // Nothing that a product wrote in the warm-up is needed any more.
  ops_->time_products(*stream_);
  const std::string result = plans_.agree();
  restart_clock();
  return plans_.note() + "\n" + result;
}

void Engine::step(const std::vector<MicroBatch>& batches, bool measured) {
  OCTET_ASSERT(pending() < 2);
  Slot& own = slot(queued_++);
  own.measured = measured;
  own.timing = timer_.restart(measured);
  const Tensor memory = small_.tensor(scalars_);
  auto* scalars = static_cast<StepScalars*>(memory.data);
  if (phases_ != nullptr) phases_->begin_step();
  enter(StepPhase::kUpload);
  device_.zero(*stream_, scalars, kSummedBytes);
  accumulate(batches, scalars);
  enter(StepPhase::kReduction);
  store_->finish_gradients(*stream_, scalars);
  const auto& optimizer = deck_.optimizer;
  const auto beta1 = static_cast<float>(optimizer.beta1), beta2 = static_cast<float>(optimizer.beta2);
  timer_.begin(*stream_);
  everyone_->all_reduce(*stream_, {scalars, DType::kF64, 1, 3}, ReduceOp::kSum);
  BlockLinears& linears = network_->linears();
  if (linears.delayed()) everyone_->all_reduce(*stream_, linears.seen(), ReduceOp::kMax);
  timer_.end(*stream_);
  enter(StepPhase::kOptimizer);
  ops_->finish_step(*stream_, scalars, small_.tensor(rates_), static_cast<float>(optimizer.clip), beta1,
                    beta2);
  linears.finish_step(*stream_, scalars);
  const StepScalars* verdict = scalars;
  if (deck_.parallel.overlap_optimizer) {
    // AdamW reads it while the next step adds up its own sums. AdamW of the step before is done: this step
    // has waited for every bucket.
    store_->settle(*stream_);
    const Tensor own_copy = small_.tensor(verdict_);
    device_.copy(*stream_, own_copy.data, scalars, sizeof(StepScalars));
    verdict = static_cast<const StepScalars*>(own_copy.data);
  }
  store_->update(*stream_,
                 {beta1, beta2, static_cast<float>(optimizer.epsilon),
                  static_cast<float>(optimizer.weight_decay), static_cast<std::uint64_t>(deck_.run.seed)},
                 verdict);
  if (phases_ != nullptr) phases_->finish_step(*stream_);
  device_.copy(*stream_, own.scalars->data(), scalars, sizeof(StepScalars));
  own.end->record(*stream_);
}

StepResult Engine::result() {
  OCTET_ASSERT(pending() > 0);
  const Slot& before = slot(taken_ + 2);
  const Slot& own = slot(taken_++);
  own.end->synchronize();
  const auto& scalars = *static_cast<const StepScalars*>(own.scalars->data());
  StepResult result;
  result.loss = scalars.tokens > 0 ? scalars.loss / scalars.tokens : std::numeric_limits<double>::quiet_NaN();
  result.tokens = scalars.tokens;
  result.gradient_norm = scalars.gradient_norm;
  result.learning_rate = scalars.learning_rate;
  result.skipped = scalars.skip != 0;
  result.updates = scalars.updates;
  result.step_ms = own.end->milliseconds_since(*before.end);
  if (own.measured) result.comm_ms = timer_.milliseconds(own.timing);
  // Whoever now looks at the state finds it whole.
  if (pending() == 0) store_->settle(*stream_);
  return result;
}

std::string Engine::find_differing_replica() {
  OCTET_ASSERT(pending() == 0);
  const auto differs = [](std::uint64_t hash, MPI_Comm ranks) {
    std::uint64_t least = hash, most = hash;
    MPI_Allreduce(MPI_IN_PLACE, &least, 1, MPI_UINT64_T, MPI_MIN, ranks);
    MPI_Allreduce(MPI_IN_PLACE, &most, 1, MPI_UINT64_T, MPI_MAX, ranks);
    return least != most;
  };
  std::string found;
  std::vector<std::byte> bytes;
  for (const ParameterStore::Replica& replica : store_->replicas()) {
    bytes.resize(static_cast<std::size_t>(replica.memory.bytes()));
    device_.copy(*stream_, bytes.data(), replica.memory.data, replica.memory.bytes());
    stream_->synchronize();
    const std::uint64_t hash = XXH3_64bits(bytes.data(), bytes.size());
    // Every rank of a group meets every comparison, whatever it found before.
    const auto compare = [&](bool applies, const char* axis, MPI_Comm ranks) {
      if (applies && differs(hash, ranks) && found.empty())
        found = fmt::format("{} differs over the {} axis", replica.name, axis);
    };
    compare(replica.over_shards, "data", grid_.shards());
    compare(replica.over_copies, "data (copies)", grid_.copies());
    compare(replica.over_ends, "pipeline (first and last stage)", grid_.ends());
    compare(replica.over_tensor, "tensor", grid_.tensor());
  }
  for (const std::string& text : world_.gather(found)) {
    if (!text.empty()) return text;
  }
  return "";
}

void Engine::evaluate_micro_batch(const DeviceBatch& batch, StepScalars* scalars) {
  const PipelineSchedule& schedule = stages_.schedule;
  const int rank = grid_.place().pipeline;
  const Place place{0, 0, 0};
  for (int chunk = 0; chunk < schedule.chunks; ++chunk) {
    const Chunk& part = stages_.chunks[static_cast<std::size_t>(chunk)];
    const Action receive{ActionKind::kReceiveForward, 0, chunk}, send{ActionKind::kSendForward, 0, chunk};
    if (!part.embeds)
      messages_.activations().receive(*stream_, network_->input(chunk, place), schedule.peer(rank, receive));
    network_->evaluate(*stream_, chunk, place, batch, scalars);
    if (!part.head)
      messages_.activations().send(*stream_, network_->output(place), schedule.peer(rank, send));
  }
}

Evaluation Engine::evaluate(const TokenFile& file, std::int64_t samples) {
  OCTET_ASSERT(pending() == 0);
  const BatchCut cut = this->cut();
  const std::int64_t available = samples_in(file, cut.sequence);
  const std::int64_t count = samples > 0 ? std::min(samples, available) : available;
  const std::int64_t round = cut.micro * cut.data_size;
  const std::unique_ptr<Buffer> packed =
      device_.allocate_host(MicroBatch::kArrays * cut.tokens() * 4, "evaluation batch");
  auto* scalars = static_cast<StepScalars*>(small_.tensor(evaluation_).data);
  device_.zero(*stream_, scalars, sizeof(StepScalars));
  for (std::int64_t at = 0; at < count; at += round) {
    std::vector<std::int64_t> own;
    for (std::int64_t j = 0; j < cut.micro; ++j) {
      const std::int64_t sample = at + cut.position(0, j);
      own.push_back(sample < count ? sample : -1);  // past the end: a sample without targets
    }
    fill_micro_batch(file, cut, own, static_cast<std::int32_t*>(packed->data()));
    evaluate_micro_batch(upload({static_cast<const std::int32_t*>(packed->data()), cut.tokens()}, 0),
                         scalars);
    stream_->synchronize();  // the batch memory is used again
  }
  everyone_->all_reduce(*stream_, {scalars, DType::kF64, 1, 3}, ReduceOp::kSum);
  StepScalars sums;
  device_.copy(*stream_, &sums, scalars, sizeof sums);
  stream_->synchronize();
  restart_clock();
  return {sums.tokens > 0 ? sums.loss / sums.tokens : std::numeric_limits<double>::quiet_NaN(), sums.tokens};
}

}  // namespace octet
