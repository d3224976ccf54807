#include <mpi.h>
#include <nccl.h>

#include <cstddef>
#include <exception>

#include "../../runtime/cuda/cuda_check.h"
#include "../../runtime/cuda/cuda_stream.h"
#include "octet/base/error.h"
#include "octet/comm/communicator.h"

namespace octet {
namespace {

static_assert(static_cast<int>(CtaPolicy::kDefault) == NCCL_CTA_POLICY_DEFAULT);
static_assert(static_cast<int>(CtaPolicy::kEfficiency) == NCCL_CTA_POLICY_EFFICIENCY);

ncclDataType_t type_of(DType type) {
  switch (type) {
    case DType::kF32:
      return ncclFloat32;
    case DType::kF64:
      return ncclFloat64;
    case DType::kI32:
      return ncclInt32;
    case DType::kBF16:
      return ncclBfloat16;
    case DType::kE4M3:
      return ncclFloat8e4m3;
    case DType::kE5M2:
      return ncclFloat8e5m2;
    case DType::kI16:
    case DType::kI8:
    case DType::kU8:
      break;
  }
  return ncclNumTypes;
}

class NcclCommunicator final : public Communicator {
 public:
  NcclCommunicator(MPI_Comm ranks, Device& device, std::string name, const CommunicatorSettings& settings)
      : ordinal_(ordinal_of(device)), name_(std::move(name)) {
    MPI_Comm_rank(ranks, &rank_);
    MPI_Comm_size(ranks, &size_);
    if (size_ == 1) return;
    OCTET_CUDA(cudaSetDevice(ordinal_));
    // A failure here is broadcast as well, so that no rank is left waiting for an id that never comes.
    struct {
      ncclUniqueId id;
      ncclResult_t status;
    } start{};
    if (rank_ == 0) start.status = ncclGetUniqueId(&start.id);
    if (MPI_Bcast(&start, sizeof start, MPI_BYTE, 0, ranks) != MPI_SUCCESS) {
      fail(ErrorKind::kDevice, "cannot share the NCCL id over the {} axis", name_);
    }
    check(start.status, "ncclGetUniqueId");
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.commName = name_.c_str();
    if (settings.max_ctas > 0) {
      config.minCTAs = 1;
      config.maxCTAs = settings.max_ctas;
    }
    if (settings.cta_policy != CtaPolicy::kDefault) config.CTAPolicy = static_cast<int>(settings.cta_policy);
    if (settings.traffic_class >= 0) config.trafficClass = settings.traffic_class;
    check(ncclCommInitRankConfig(&handle_, size_, start.id, rank_, &config), "ncclCommInitRankConfig");
  }

  ~NcclCommunicator() override {
    if (handle_ == nullptr) return;
    // Destroying waits for the peers' operations, which may never come when this rank is failing.
    if (std::uncaught_exceptions() > 0) {
      static_cast<void>(ncclCommAbort(handle_));
    } else {
      static_cast<void>(ncclCommDestroy(handle_));
    }
  }
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  const std::string& name() const override { return name_; }

  void all_reduce(Stream& stream, Tensor values, ReduceOp op) override {
    if (size_ == 1 || values.size() == 0) return;
    check(ncclAllReduce(values.data, values.data, count(values), type_of(values.dtype),
                        op == ReduceOp::kSum ? ncclSum : ncclMax, handle_, enter(stream)),
          "ncclAllReduce");
  }

  void reduce_scatter(Stream& stream, Tensor in, Tensor out) override {
    OCTET_ASSERT(in.size() == out.size() * size_ && in.dtype == out.dtype);
    if (size_ == 1) return copy(stream, in, out);
    if (out.size() == 0) return;
    check(
        ncclReduceScatter(in.data, out.data, count(out), type_of(out.dtype), ncclSum, handle_, enter(stream)),
        "ncclReduceScatter");
  }

  void all_gather(Stream& stream, Tensor in, Tensor out) override {
    OCTET_ASSERT(out.size() == in.size() * size_ && in.dtype == out.dtype);
    if (size_ == 1) return copy(stream, in, out);
    if (in.size() == 0) return;
    check(ncclAllGather(in.data, out.data, count(in), type_of(in.dtype), handle_, enter(stream)),
          "ncclAllGather");
  }

  void all_to_all(Stream& stream, Tensor in, Tensor out) override {
    OCTET_ASSERT(in.size() == out.size() && in.dtype == out.dtype && in.size() % size_ == 0);
    if (size_ == 1) return copy(stream, in, out);
    if (in.size() == 0) return;
    // As sends and receives of one group, which every release of NCCL has.
    const std::int64_t part = in.size() / size_;
    const cudaStream_t queue = enter(stream);
    check(ncclGroupStart(), "ncclGroupStart");
    for (int peer = 0; peer < size_; ++peer) {
      const Tensor from = in.range(peer * part, part), to = out.range(peer * part, part);
      check(ncclSend(from.data, count(from), type_of(from.dtype), peer, handle_, queue), "ncclSend");
      check(ncclRecv(to.data, count(to), type_of(to.dtype), peer, handle_, queue), "ncclRecv");
    }
    check(ncclGroupEnd(), "ncclGroupEnd");
  }

  void send(Stream& stream, Tensor values, int to) override {
    check(ncclSend(values.data, count(values), type_of(values.dtype), to, handle_, enter(stream)),
          "ncclSend");
  }

  void receive(Stream& stream, Tensor values, int from) override {
    check(ncclRecv(values.data, count(values), type_of(values.dtype), from, handle_, enter(stream)),
          "ncclRecv");
  }

 private:
  void check(ncclResult_t status, const char* operation) const {
    if (status == ncclSuccess) return;
    fail(ErrorKind::kDevice, "NCCL: {} in {} over the {} axis, rank {} of {}: {}", ncclGetErrorString(status),
         operation, name_, rank_, size_, ncclGetLastError(handle_));
  }
  static std::size_t count(const Tensor& tensor) { return static_cast<std::size_t>(tensor.size()); }

  cudaStream_t enter(Stream& stream) const {
    OCTET_CUDA(cudaSetDevice(ordinal_));
    return native(stream);
  }
  void copy(Stream& stream, const Tensor& from, const Tensor& to) const {
    if (from.data == to.data || from.size() == 0) return;
    OCTET_CUDA(cudaMemcpyAsync(to.data, from.data, static_cast<std::size_t>(from.bytes()),
                               cudaMemcpyDeviceToDevice, enter(stream)));
  }

  int ordinal_;
  std::string name_;
  int rank_ = 0, size_ = 1;
  ncclComm_t handle_ = nullptr;
};

}  // namespace

std::unique_ptr<Communicator> make_nccl_communicator(MPI_Comm ranks, Device& device, std::string name,
                                                     const CommunicatorSettings& settings) {
  return std::make_unique<NcclCommunicator>(ranks, device, std::move(name), settings);
}

}  // namespace octet
