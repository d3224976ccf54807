#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "octet/comm/communicator.h"
#include "octet/model/parameter_access.h"
#include "octet/ops/ops.h"
#include "octet/parallel/bucket.h"
#include "octet/runtime/arena.h"
#include "octet/runtime/stream_timer.h"

namespace octet {

/// Which parts of training state a data rank keeps a slice of (Rajbhandari et al. 2020).
struct ZeroStage {
  int stage = 1;
  bool codes = false;  ///< matrices of blocks are gathered, and then resident, as E4M3 codes
  bool shards_optimizer() const { return stage >= 1; }
  bool shards_gradients() const { return stage >= 2; }
  bool shards_parameters() const { return stage >= 3; }
};

/// Communicators that the store uses. Gradients and parameters travel at the same time, so each has its own.
struct StoreRanks {
  Communicator& data_gradients;
  Communicator& data_parameters;
  /// Ranks of other sets that hold copies of this rank's slices (hierarchical data parallelism).
  Communicator& copies;
  Communicator& tensor;
  /// The data ranks of the first and the last pipeline stage together, where both hold a tied embedding: its
  /// one gradient is the sum over all of them, and its one optimizer state is cut over all of them. Null
  /// elsewhere.
  Communicator* embedding_gradients = nullptr;
  Communicator* embedding_parameters = nullptr;
};

/// AdamW's settings that do not change from step to step.
struct AdamwSettings {
  float beta1 = 0.9f, beta2 = 0.95f, epsilon = 1e-8f, weight_decay = 0.1f;
  std::uint64_t seed = 0;  ///< of the random numbers by which narrow moments are rounded
};

/// How optimizer state is kept; the forms are Adamw's. Bytes a parameter: masters 4, or split 2 beside the
/// parameters (and 4 where those lie in slots); moments 8, 4, or 2 and a 32nd.
struct OptimizerFormat {
  DType moments = DType::kF32;  ///< kF32, kBF16, or kI8 for codes
  bool split_masters = false;   ///< with bfloat16 parameters only
};

/// Parameters, gradients and optimizer state of one rank, in buckets, for ZeRO stages 0 to 3. Collectives run
/// on streams of their own: a bucket is reduced as soon as its gradients are queued, and gathered as soon as
/// it is updated (stages 1 and 2) or while the bucket before it is at work (stage 3).
///
/// With ZeroStage::codes a rank makes the 8-bit codes of its slice of a block's matrices, each scaled for the
/// largest magnitude of the whole matrix, which all ranks agree on once after every update: the codes are
/// those that each rank would make of the gathered matrix. The block's vectors are gathered beside them.
class ParameterStore final : public ParameterAccess {
 public:
  /// `overlaps_update`: AdamW runs on a stream of its own, beside the next step's forward pass.
  ParameterStore(Device& device, Ops& ops, const BucketLayout& layout, ZeroStage stage, DType compute,
                 OptimizerFormat format, int micro_batches, const StoreRanks& ranks, StreamTimer& timer,
                 bool overlaps_update = false);

  /// Bytes by class, for the memory report.
  std::vector<std::pair<std::string, std::int64_t>> memory() const;

  /// Sets masters to the table's initial values (equal for every layout) and publishes them.
  void initialise(Stream& stream, std::uint64_t seed);
  /// Makes compute parameters of the masters on all ranks.
  void publish(Stream& stream);

  void begin_step(Stream& stream);
  /// What follows belongs to micro-batch `index` of the step; each bucket meets them in rising order.
  void begin_micro_batch(int index) { micro_batch_ = index; }
  Tensor parameter(int first, int last) override;
  LinearWeight weight(int first, int last) override;
  void scale_weights_for(std::vector<Tensor> largest) override { scaled_for_ = std::move(largest); }
  std::int64_t version() const override { return version_; }
  Tensor gradient(int first, int last) override;
  bool accumulates(int bucket) const override;
  void begin_forward(Stream& stream, int bucket) override;
  void begin_backward(Stream& stream, int bucket, bool reads = true, bool writes = true) override;
  void finish_backward(Stream& stream, int bucket) override;

  /// After the last micro-batch: completes the sums over ranks and adds this rank's share of the squared
  /// gradient to the scalars.
  void finish_gradients(Stream& stream, StepScalars* scalars);
  /// AdamW on what this rank owns, then gathers parameters, bucket by bucket. Where the update overlaps with
  /// what is queued on the stream next, that must leave `scalars` alone until settle().
  void update(Stream& stream, const AdamwSettings& settings, const StepScalars* scalars);

  /// What is queued on the stream next finds all state updated and gathered. A step needs it nowhere: it
  /// waits for each bucket when it comes to it.
  void settle(Stream& stream);

  enum class StateKind { kMaster, kFirstMoment, kSecondMoment, kGradient };
  /// One contiguous box of state.
  struct StateBox {
    std::string name;  ///< such as "parameters/layers.0.attention.q.weight", which are the masters
    std::int64_t rows = 0, cols = 0;
    Box box;
    StateKind kind = StateKind::kMaster;
    int bucket = 0, row = 0;  ///< row of the parameter table
    std::int64_t offset = 0;  ///< first element in the bucket
    Tensor memory = {};       ///< float32 on the device; empty where the state is kept in another form
  };
  /// What this rank saves, so that all ranks' boxes cover every tensor once; or all that it holds, for
  /// loading. All boxes of a bucket and kind are neighbours.
  std::vector<StateBox> saved_boxes() const;
  std::vector<StateBox> held_boxes() const;
  /// Copies a box to host memory as float32, queued on the stream. State that is not kept as float32 passes
  /// through the memory of this rank's reduced gradients, which thereby lose what they held.
  void read(Stream& stream, const StateBox& box, float* host) const;
  /// Fills boxes from host memory, in the same way, rounding to nearest; publish() must follow. Boxes are
  /// those of held_boxes(), of some buckets and kinds all. What read() gave comes back bit for bit.
  void write(Stream& stream, const std::vector<StateBox>& boxes, const std::vector<const float*>& host);
  /// Memory that other ranks hold bitwise copies of, and along which axes.
  struct Replica {
    std::string name;
    Tensor memory;
    bool over_shards = false, over_copies = false, over_tensor = false;
    bool over_ends = false;  ///< a tied embedding on the first and the last pipeline stage
  };
  std::vector<Replica> replicas() const;
  /// The reduced gradient that this rank holds, unscaled, as boxes named "gradients/…"; valid after
  /// finish_gradients. For tests and tools.
  std::vector<StateBox> gradient_boxes() const;

 private:
  struct BucketState {
    /// Compute dtype, in memory of its own or of a slot: all of the bucket, or where matrices are codes its
    /// last elements, the vectors among them.
    Tensor parameters;
    Tensor gradients;       ///< float32: whole, or a staging buffer shared with other buckets
    Tensor gradient_slice;  ///< float32, with sharded gradients
    /// Over the optimizer range, in the forms of Adamw.
    Tensor master, first_moment, second_moment;
    Tensor resident;  ///< parameters over the optimizer range; empty where rounded() makes them of masters
    Tensor first_scale, second_scale;        ///< of codes: float32, those of one run behind the other
    std::vector<PlacedRun> runs;             ///< the optimizer range by parameter
    std::vector<std::int64_t> first_blocks;  ///< of each run, where its scales begin
    /// Where matrices are codes: those of the whole bucket and a scale a matrix, kScaleSpacing apart, where
    /// parameters lie; the largest magnitudes of the matrices, and the version of the parameters that had
    /// them.
    Tensor codes, scales, largest;
    std::vector<PlacedMatrix> matrices;
    std::int64_t measured = -1;
    std::unique_ptr<Event> gathered, reduced, updated;
    int place = 0;  ///< number of the staging buffer and of the slot
  };
  struct Staging {  ///< gradients on their way to their slices
    int handle = -1;
    std::unique_ptr<Event> free;  ///< the last reduction out of this buffer is done
  };
  struct Slot {  ///< gathered parameters, with sharded parameters
    int handle = -1, codes = -1, scales = -1;
    int holds = -1;  ///< bucket
    std::unique_ptr<Event> gathered,
        released;  ///< filled; no longer read by what is queued on the compute stream
  };

  bool held(int bucket) const { return layout_.bucket(bucket).size > 0; }
  /// Whether two pipeline stages share the bucket. Its gradients are reduced when the step's last micro-batch
  /// is done everywhere, since stages reach it at different times.
  bool shared(int bucket) const { return bucket == 0 && ranks_.embedding_gradients != nullptr; }
  Communicator& gradient_ranks(int bucket) const {
    return shared(bucket) ? *ranks_.embedding_gradients : ranks_.data_gradients;
  }
  Communicator& parameter_ranks(int bucket) const {
    return shared(bucket) ? *ranks_.embedding_parameters : ranks_.data_parameters;
  }
  std::int64_t slice(int bucket) const { return layout_.bucket(bucket).slice(); }
  /// What the optimizer of this rank updates, in elements of the bucket.
  std::pair<std::int64_t, std::int64_t> optimizer_range(int bucket) const;
  std::pair<std::int64_t, std::int64_t> owned_range(int bucket) const;
  /// The reduced gradient over the optimizer range.
  Tensor reduced_gradient(int bucket) const;
  int group_size(int bucket) const { return gradient_ranks(bucket).size(); }
  /// Whether this rank speaks for a slice that others hold copies of: where norms are summed and state is
  /// saved.
  bool speaks(int bucket) const { return shared(bucket) || ranks_.copies.rank() == 0; }
  /// Adds up this rank's reduced slice over the sets that hold copies of it.
  void reduce_copies(Stream& reduce, int bucket, Tensor slice);
  bool staged(int bucket) const {
    return stage_.shards_gradients() && group_size(bucket) > 1 && !shared(bucket);
  }
  /// Whether other ranks update parts of the bucket.
  bool gathers(int bucket) const { return stage_.shards_optimizer() && group_size(bucket) > 1; }
  bool slotted(int bucket) const { return stage_.shards_parameters() && group_size(bucket) > 1; }
  /// Whether the bucket's matrices are gathered as codes. They come before its vectors.
  bool coded(int bucket) const {
    return stage_.codes && gathers(bucket) && bucket > 0 &&
           bucket + 1 < static_cast<int>(layout_.buckets().size());
  }
  /// Whether what is gathered of the bucket is made of masters just then: what AdamW would round is resident
  /// nowhere.
  bool rounded(int bucket) const { return slotted(bucket) || coded(bucket); }
  /// Of every rank's slice, the last elements that are gathered in the compute dtype. The vectors of a coded
  /// bucket are in the last rank's, unless slices are shorter than that.
  std::int64_t gathered_part(int bucket) const;
  /// What is resident of the bucket in the compute dtype, in elements.
  std::int64_t gathered_size(int bucket) const {
    return coded(bucket) ? gathered_part(bucket) * group_size(bucket) : layout_.bucket(bucket).size;
  }
  /// Sums a bucket's gradients over its ranks, on the reduction stream, leaving them in the optimizer range.
  void reduce_whole(Stream& stream, int bucket);
  int place_of(int bucket) const;
  BucketState& state(int bucket) { return states_.at(static_cast<std::size_t>(bucket)); }
  const BucketState& state(int bucket) const { return states_.at(static_cast<std::size_t>(bucket)); }
  void reserve(DType compute);
  void gather(Stream& stream, int bucket);
  /// Lets the stream go on only after AdamW of the last step has read the bucket's gradients and written its
  /// masters.
  void await_update(Stream& stream, int bucket) {
    if (update_stream_) state(bucket).updated->block(stream);
  }
  /// With sharded parameters: gathers a bucket into its slot once the slot is released.
  void fetch(int bucket);
  /// Queues all that brings a bucket from the ranks' slices.
  void collect(Stream& gather, int bucket);
  void collect_codes(Stream& gather, int bucket);
  /// Of the part of matrix `number` that is in this rank's slice: first element of the slice, and elements.
  std::pair<std::int64_t, std::int64_t> own_run(int bucket, std::size_t number) const;
  /// Makes ranks agree on the largest magnitudes of a bucket's matrices, unless they have since the update.
  void measure_matrices(Stream& gather, int bucket);
  void use(Stream& stream, int bucket, int next);
  void drop_slots(Stream& stream);
  void update_bucket(Stream& stream, int bucket, const AdamwSettings& settings, const StepScalars* scalars);
  Slot& slot_of(int bucket) { return slots_.at(static_cast<std::size_t>(state(bucket).place)); }
  /// Rows of the table in memory that holds a bucket, or its last elements.
  Tensor view(Tensor flat, int first, int last) const;
  std::vector<StateBox> state_boxes(bool saving) const;
  const Tensor& stored(int bucket, StateKind kind) const;
  /// State of a bucket from element `offset` on, all in one run.
  NarrowState narrow_state(int bucket, StateKind kind, int row, std::int64_t offset, std::int64_t size) const;
  /// Float32 memory for elements of the optimizer range while the reduced gradient is not needed.
  Tensor staging(int bucket, std::int64_t offset, std::int64_t size) const;
  /// Keeps the staged values of a bucket as its state of that kind.
  void keep_staged(Stream& stream, int bucket, StateKind kind);

  Device& device_;
  Ops& ops_;
  const BucketLayout& layout_;
  ZeroStage stage_;
  OptimizerFormat format_;
  int micro_batches_;
  int micro_batch_ = 0;
  std::int64_t version_ = 0;
  StoreRanks ranks_;
  StreamTimer& timer_;
  std::unique_ptr<Stream> reduce_stream_, gather_stream_;
  std::unique_ptr<Stream> update_stream_;  ///< null: AdamW runs on the compute stream
  std::unique_ptr<Event> ready_;           ///< reused: "this stream has come so far"
  Arena parameters_{"parameters"}, gradients_{"gradients"}, optimizer_{"optimizer state"};
  std::vector<BucketState> states_;
  std::vector<Staging> stagings_;
  std::vector<Slot> slots_;
  std::vector<Tensor> scaled_for_;  ///< empty: for the largest magnitudes that matrices have
  int in_use_ = -1;                 ///< bucket whose slot the compute stream reads now
  int incoming_ = -1;               ///< where slices arrive that are to be added
};

}  // namespace octet
