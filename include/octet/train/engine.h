#pragma once

#include <array>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "octet/comm/communicator.h"
#include "octet/config/deck.h"
#include "octet/data/batch_loader.h"
#include "octet/model/network.h"
#include "octet/parallel/parameter_store.h"
#include "octet/runtime/grid.h"
#include "octet/runtime/world.h"
#include "octet/train/shared_plans.h"
#include "octet/train/stage_messages.h"
#include "octet/train/stage_plan.h"

namespace octet {

/// What a finished step says.
struct StepResult {
  double loss = 0.0;           ///< mean over target tokens, nats; NaN when there were none
  double tokens = 0.0;         ///< target tokens
  double gradient_norm = 0.0;  ///< of the mean gradient, before clipping
  double learning_rate = 0.0;
  bool skipped = false;
  std::int64_t updates = 0;  ///< optimizer updates so far
  double step_ms = 0.0;      ///< on the device, from the end of the step before to the end of this
  double comm_ms = 0.0;  ///< collectives, and waits for them, that compute stood still for; 0 unless measured
};

struct Evaluation {
  double loss = 0.0;  ///< mean over target tokens, nats
  double tokens = 0.0;
};

/// What may be put between an engine and its operators and communicators, such as what a test watches them
/// with. Empty: nothing.
struct EngineWrappers {
  std::function<std::unique_ptr<Ops>(std::unique_ptr<Ops>)> ops;
  std::function<std::unique_ptr<Communicator>(std::unique_ptr<Communicator>)> communicator;
  bool quantize_apart = false;  ///< 8-bit operands are all made by Ops::quantize
};

/// A model and its training state on this rank: everything between a micro-batch of tokens and a weight
/// update. The deck is resolved. All ranks make the same calls.
class Engine {
 public:
  Engine(const World& world, const Deck& deck, Device& device, bool shared_device,
         const EngineWrappers& wrappers = {});
  ~Engine();

  const ModelShape& shape() const { return shape_; }
  const ParameterTable& table() const { return table_; }
  const Grid& grid() const { return grid_; }
  const StagePlan& stages() const { return stages_; }
  BatchCut cut() const;
  std::string layout() const;
  /// Bytes on the device by class; the last class, what the driver and libraries took by themselves until
  /// now, is measured.
  std::vector<std::pair<std::string, std::int64_t>> memory() const;

  void initialise();
  /// Queues one training step. `measured`: also time collectives. The micro-batches must stay valid until
  /// result() of this step returned.
  void step(const std::vector<MicroBatch>& batches, bool measured);
  /// From the next step on, marks in `phases` what each part of a step takes; null: nothing. Not during
  /// evaluations.
  void time_phases(PhaseTimer* phases);
  /// Runs the forward and backward passes of a step and forgets what came of them, so that what is made at
  /// first use is made.
  void warm_up(const std::vector<MicroBatch>& batches);
  /// With run.tune_matmul on a GPU: warms up, and chooses how matrix products are computed, alike on all
  /// ranks. Before the first step, whose micro-batches serve. Returns what happened in words, if anything.
  std::string tune(const std::vector<MicroBatch>& batches);
  /// Marks "now" as the start of the next step's time, after a pause such as an evaluation.
  void restart_clock();
  /// Steps queued whose result was not taken yet: 0 to 2.
  int pending() const { return static_cast<int>(queued_ - taken_); }
  /// The oldest of them; waits for it. Behind the last of them the stream finds all state updated.
  StepResult result();

  /// Mean loss of the first `samples` samples of a file (0: all): the same for every layout and micro-batch.
  Evaluation evaluate(const TokenFile& file, std::int64_t samples);

  /// State by box: what this rank saves, or all that it holds. `updates` belongs to it.
  const ParameterStore& store() const { return *store_; }
  ParameterStore& store() { return *store_; }
  Stream& stream() { return *stream_; }
  Device& device() { return device_; }
  /// Compares everything that several ranks hold copies of, by hash. Collective; returns what differs first
  /// on any rank, with the axis, or an empty text. Waits for the device.
  std::string find_differing_replica();
  /// With precision.fp8 = delayed: float32 on the device, the same on all ranks (BlockLinears); else empty.
  Tensor fp8_history() const;
  void restore_fp8_history(const std::vector<float>& values);
  /// After masters were written: publishes them and sets the optimizer's step count.
  void restored(std::int64_t updates);

 private:
  /// Copies a micro-batch into device place `index`.
  DeviceBatch upload(const MicroBatch& batch, int index);
  void enter(StepPhase phase) {
    if (phases_ != nullptr) phases_->enter(*stream_, phase);
  }
  /// Queues the forward and backward passes of a step.
  void accumulate(const std::vector<MicroBatch>& batches, StepScalars* scalars);
  void execute(const Action& action, const DeviceBatch& batch, StepScalars* scalars);
  /// Forward pass of one micro-batch through all stages in turn.
  void evaluate_micro_batch(const DeviceBatch& batch, StepScalars* scalars);

  struct Slot {  ///< what is read back of one step
    std::unique_ptr<Buffer> scalars;
    std::unique_ptr<Event> end;
    int timing = 0;  ///< number of the collectives' time sum
    bool measured = false;
  };
  Slot& slot(std::int64_t step) { return slots_[static_cast<std::size_t>(step) % slots_.size()]; }

  const World& world_;
  Deck deck_;
  ModelShape shape_;
  ParameterTable table_;
  Grid grid_;
  Device& device_;
  StagePlan stages_;
  std::unique_ptr<Communicator> tensor_, data_gradients_, data_parameters_, everyone_, copies_, context_;
  std::unique_ptr<Communicator> embedding_gradients_,
      embedding_parameters_;  ///< null where no embedding is shared
  std::unique_ptr<Stream> stream_;
  SharedPlans plans_;
  std::unique_ptr<Ops> ops_;
  StreamTimer timer_;
  PhaseTimer* phases_ = nullptr;
  StageMessages messages_;
  TensorAxis axis_;
  Arena saved_{"activations"}, scratch_{"work space"}, small_{"tables"};
  BucketLayout layout_;
  std::unique_ptr<ParameterStore> store_;
  std::unique_ptr<Network> network_;
  int packed_ = 0, rates_ = 0, scalars_ = 0, evaluation_ = 0;
  int verdict_ = -1;  ///< what an overlapped AdamW goes by: a copy of the step's scalars
  std::int64_t libraries_ = 0;
  std::array<Slot, 3> slots_;  ///< two steps in flight, and the end of the one before
  std::int64_t queued_ = 0, taken_ = 0;
};

}  // namespace octet
