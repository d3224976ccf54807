#pragma once

#include <string>
#include <vector>

namespace octet {

/// What a rank of the pipeline does next. Forward messages are activations (residual stream) on their way to
/// the next virtual stage; backward messages are their gradients on their way back.
enum class ActionKind {
  kForward,
  kBackward,        ///< gradients of input and weights at once
  kBackwardInput,   ///< gradient of the input alone (B of Qi et al.)
  kBackwardWeight,  ///< gradients of the weights, later (W of Qi et al.)
  kSendForward,
  kReceiveForward,
  kSendBackward,
  kReceiveBackward,
};

bool is_message(ActionKind kind);
bool is_send(ActionKind kind);
/// Whether a message is an activation rather than a gradient.
bool is_forward_message(ActionKind kind);

/// A message has the chunk of the rank that lists it: the one whose output is sent, or that gets its input.
struct Action {
  ActionKind kind = ActionKind::kForward;
  int micro_batch = 0;
  int chunk = 0;
  bool operator==(const Action&) const = default;
};

/// Such as "send-forward of micro-batch 3, chunk 0".
std::string describe(const Action& action);

/// A training step of a pipeline as data: for each rank the list of what it does, in order. Layers are cut
/// into stages × chunks virtual stages; virtual stage g is chunk g / stages of rank g % stages. Neighbours on
/// the same rank (stages = 1) hand over without messages.
///
/// How it is executed. Each rank takes its actions in order. Messages between two ranks need no tags: both
/// list them in the same order, activations and gradients mixed. A receive holds the rank up until the
/// message is there. A send may
///   - wait until the receiver has come to its receive (rendezvous), or
///   - return at once, the buffer being reused only when the message has left it (buffered).
/// Messages may also run on streams of their own in list order (Transfer::kStreams): activations on one,
/// gradients on the other, each send behind its computation, each computation behind its receive, and
/// whatever writes a buffer behind the last user of it. CPU ranks run the list with rendezvous, GPU ranks
/// with streams.
///
/// Why none of these deadlocks. The generators list messages and computations of all ranks in one total
/// order, in which a message is one event, standing in two lists. Take the first event of that order which
/// did not happen: everything before it in its lists did, so both ends have come to it, and it happens. Every
/// other way above waits for less than rendezvous does: with streams, for nothing that does not stand before
/// it in one of its two lists. That holds for waits which no event asks for as well, such as those of two
/// streams that share a hardware queue, since the host hands work to all streams in list order.
struct PipelineSchedule {
  std::string name;  ///< parallel.schedule
  int stages = 1, chunks = 1, micro_batches = 1;
  std::vector<std::vector<Action>> ranks;

  int virtual_stages() const { return stages * chunks; }
  int virtual_stage(int rank, int chunk) const { return chunk * stages + rank; }
  /// The virtual stage below the boundary that a message crosses: activations from g to g + 1 and gradients
  /// back cross boundary g.
  int boundary(int rank, const Action& message) const;
  /// The rank at the other end of a message.
  int peer(int rank, const Action& message) const;
};

/// 1F1B of PipeDream-Flush (Narayanan et al. 2021, "Memory-Efficient Pipeline-Parallel DNN Training"): rank r
/// runs min(stages - 1 - r, micro-batches) forwards, then forward and backward in turn, then the rest of the
/// backwards. With p stages, m micro-batches, costs F and B of a stage, no latency: time (m + p - 1)(F + B),
/// bubble (p - 1)/(m + p - 1) of it on every rank, activations of min(p - r, m) micro-batches.
PipelineSchedule one_forward_one_backward(int stages, int micro_batches);

/// Interleaved 1F1B (Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters
/// Using Megatron-LM"): v ≥ 2 chunks a rank, micro-batches taken p at a time through all chunks. Bubble
/// (p - 1)/(vm + p - 1); v times the messages. The warm-up is (v - 1)p + p - 1 - r forwards, Megatron's being
/// longer by p - 1 - r: the bubble is the same, activations are vp - r chunks and not vp + p - 1 - 2r, and
/// neighbours meet at every message, where the longer one makes blocking sends wait. Throws Error(kUsage)
/// unless micro-batches divide by stages.
PipelineSchedule interleaved(int stages, int chunks, int micro_batches);

/// ZB-H1 (Qi et al. 2023, "Zero Bubble Pipeline Parallelism"): 1F1B with the backward split, rank r doing the
/// weight gradients r micro-batches late, which lets input gradients travel sooner and fills the end. Time
/// m(F + B + W) + (p - 1)(F + B - W) for m ≥ p and F = B = W: a third of 1F1B's bubble time. On rank r,
/// min(p - r, m) micro-batches are between forward and input gradient as in 1F1B, at most min(r + 1, m)
/// wait for their weight gradient, and all together are at most min(p, m), what 1F1B has on rank 0.
PipelineSchedule zero_bubble_h1(int stages, int micro_batches);

/// By deck name: 1f1b, interleaved, zero_bubble. Throws Error(kUsage) with key, value and what is allowed.
/// All generators take the micro-batches of a chunk in rising order, by every kind of action, so
/// `micro_batch % peak` (peak of memory_need) is always a free place.
PipelineSchedule make_schedule(const std::string& name, int stages, int chunks, int micro_batches);

/// Throws Error(kUsage) unless every micro-batch passes every virtual stage once, forward and backward
/// (whole, or input and then weights), behind the messages that it needs and before those that it gives, both
/// ends list the messages between them in the same order, and neither rendezvous nor streams deadlock.
void validate(const PipelineSchedule& schedule);

/// The first part of validate: every action names a micro-batch and chunk that exist, and every message a
/// neighbour.
void check_ranges(const PipelineSchedule& schedule);

}  // namespace octet
