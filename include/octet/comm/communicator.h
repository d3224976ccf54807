#pragma once

#include <mpi.h>

#include <memory>
#include <string>

#include "octet/base/tensor.h"
#include "octet/runtime/device.h"

namespace octet {

enum class ReduceOp { kSum, kMax };

/// A group of ranks that exchange tensors. All members make the same calls in the same order. Calls are
/// queued on the stream (CPU: done when they return). Elements are float32, float64, bfloat16 or int32. A
/// reduction of bfloat16 adds in float32 where the transport allows. A group of one copies where input and
/// output differ.
class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  /// Which axis this is, for messages: "data", "tensor", …
  virtual const std::string& name() const = 0;

  virtual void all_reduce(Stream& stream, Tensor values, ReduceOp op) = 0;
  /// out (n elements) = element-wise sum over ranks of part `rank()` of in (size()·n elements). `out` may be
  /// exactly that part of `in`.
  virtual void reduce_scatter(Stream& stream, Tensor in, Tensor out) = 0;
  /// Part r of out (size()·n elements) = rank r's in (n elements). `in` may be exactly this rank's part of
  /// `out`.
  virtual void all_gather(Stream& stream, Tensor in, Tensor out) = 0;
  /// Part r of out on rank q = part q of in on rank r. in, out: size() parts of n elements each, not
  /// overlapping.
  virtual void all_to_all(Stream& stream, Tensor in, Tensor out) = 0;
  /// Point to point. Neither returns (CPU), or lets the stream go on (GPU), before the other side has met it.
  virtual void send(Stream& stream, Tensor values, int to) = 0;
  virtual void receive(Stream& stream, Tensor values, int from) = 0;
};

/// Blocking collectives of MPI on host memory. Duplicates `ranks`.
std::unique_ptr<Communicator> make_mpi_communicator(MPI_Comm ranks, std::string name);

/// Which resources NCCL's collectives may take, in the numbers of NCCL_CTA_POLICY_….
enum class CtaPolicy {
  kDefault = 0,     ///< as many thread blocks as make the collective fast
  kEfficiency = 1,  ///< fewer where that costs little
  kZero = 2,        ///< none where copy engines can do the work, which needs registered windows
};

/// What is asked of NCCL for one communicator; all ranks of it ask alike. The defaults leave all to NCCL. A
/// variable of the environment (NCCL_MAX_CTAS, …) wins over what is set here.
struct CommunicatorSettings {
  int max_ctas = 0;  ///< thread blocks, and so multiprocessors, of a collective at most; 0: NCCL's choice
  CtaPolicy cta_policy = CtaPolicy::kDefault;
  int traffic_class = -1;  ///< of InfiniBand and RoCE packets; -1: NCCL's choice
};

/// NCCL on device memory, one rank a device. Throws Error(kDevice) in a build without CUDA.
std::unique_ptr<Communicator> make_nccl_communicator(MPI_Comm ranks, Device& device, std::string name,
                                                     const CommunicatorSettings& settings = {});

/// MPI with copies through host memory, for several ranks on one GPU (run.share_gpus): slow, for tests.
std::unique_ptr<Communicator> make_staged_communicator(MPI_Comm ranks, Device& device, std::string name);

/// Which of these suits the device: MPI on the CPU; NCCL on GPUs, but for groups of one and for GPUs that
/// several ranks share. `settings` are NCCL's.
std::unique_ptr<Communicator> make_communicator(MPI_Comm ranks, Device& device, bool shared, std::string name,
                                                const CommunicatorSettings& settings = {});

}  // namespace octet
