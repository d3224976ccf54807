#include <cstring>
#include <vector>

#include "octet/comm/communicator.h"

namespace octet {

namespace {

void check(int code, const char* operation, const std::string& axis) {
  if (code == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING] = {};
  int length = 0;
  MPI_Error_string(code, text, &length);
  fail(ErrorKind::kDevice, "{} over the {} axis failed: {}", operation, axis, text);
}

MPI_Datatype type_of(DType type) {
  switch (type) {
    case DType::kF32:
      return MPI_FLOAT;
    case DType::kF64:
      return MPI_DOUBLE;
    case DType::kI32:
      return MPI_INT32_T;
    case DType::kBF16:
      return MPI_UINT16_T;
    case DType::kE4M3:
    case DType::kE5M2:
      return MPI_UINT8_T;
    case DType::kI16:
    case DType::kI8:
    case DType::kU8:
      break;
  }
  return MPI_DATATYPE_NULL;
}

/// Elements a single MPI call may carry: its counts are int.
constexpr std::int64_t kLargestCall = std::int64_t{1} << 30;

class MpiCommunicator final : public Communicator {
 public:
  MpiCommunicator(MPI_Comm ranks, std::string name) : name_(std::move(name)) {
    MPI_Comm_dup(ranks, &ranks_);
    MPI_Comm_set_errhandler(ranks_, MPI_ERRORS_RETURN);
    MPI_Comm_rank(ranks_, &rank_);
    MPI_Comm_size(ranks_, &size_);
  }
  ~MpiCommunicator() override {
    if (std::uncaught_exceptions() == 0) MPI_Comm_free(&ranks_);
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  const std::string& name() const override { return name_; }

  void all_reduce(Stream&, Tensor values, ReduceOp op) override {
    if (size_ == 1) return;
    const MPI_Op mpi_op = op == ReduceOp::kSum ? MPI_SUM : MPI_MAX;
    if (values.dtype == DType::kBF16) {
      float* wide = widen(values);
      reduce_in_place(wide, values.size(), MPI_FLOAT, sizeof(float), mpi_op);
      narrow(wide, values);
      return;
    }
    reduce_in_place(values.data, values.size(), type_of(values.dtype), size_of(values.dtype), mpi_op);
  }

  void reduce_scatter(Stream&, Tensor in, Tensor out) override {
    OCTET_ASSERT(in.size() == out.size() * size_ && in.dtype == out.dtype && out.size() < kLargestCall);
    if (size_ == 1) return copy(in, out);
    const int count = static_cast<int>(out.size());
    const bool narrow_type = in.dtype == DType::kBF16;
    const void* from = narrow_type ? widen(in) : in.data;
    const MPI_Datatype type = narrow_type ? MPI_FLOAT : type_of(in.dtype);
    // Into memory of our own, since the result may be a part of the input, which MPI does not allow.
    result_.resize(static_cast<std::size_t>(out.size() * (narrow_type ? 4 : size_of(in.dtype))));
    check(MPI_Reduce_scatter_block(from, result_.data(), count, type, MPI_SUM, ranks_), "reduce-scatter",
          name_);
    if (narrow_type) {
      narrow(reinterpret_cast<const float*>(result_.data()), out);
    } else {
      std::memcpy(out.data, result_.data(), result_.size());
    }
  }

  void all_gather(Stream&, Tensor in, Tensor out) override {
    OCTET_ASSERT(out.size() == in.size() * size_ && in.dtype == out.dtype && in.size() < kLargestCall);
    if (size_ == 1) return copy(in, out);
    const int count = static_cast<int>(in.size());
    const auto* own = static_cast<const std::byte*>(out.data) + in.bytes() * rank_;
    const void* from = in.data == own ? MPI_IN_PLACE : in.data;
    check(MPI_Allgather(from, count, type_of(in.dtype), out.data, count, type_of(in.dtype), ranks_),
          "all-gather", name_);
  }

  void all_to_all(Stream&, Tensor in, Tensor out) override {
    OCTET_ASSERT(in.size() == out.size() && in.dtype == out.dtype && in.size() % size_ == 0);
    OCTET_ASSERT(in.size() / size_ < kLargestCall);
    const int count = static_cast<int>(in.size() / size_);
    const MPI_Datatype type = type_of(in.dtype);
    check(MPI_Alltoall(in.data, count, type, out.data, count, type, ranks_), "all-to-all", name_);
  }

  void send(Stream&, Tensor values, int to) override {
    OCTET_ASSERT(values.size() < kLargestCall);
    const int count = static_cast<int>(values.size());
    check(MPI_Ssend(values.data, count, type_of(values.dtype), to, 0, ranks_), "send", name_);
  }

  void receive(Stream&, Tensor values, int from) override {
    OCTET_ASSERT(values.size() < kLargestCall);
    const int count = static_cast<int>(values.size());
    check(MPI_Recv(values.data, count, type_of(values.dtype), from, 0, ranks_, MPI_STATUS_IGNORE), "receive",
          name_);
  }

 private:
  void reduce_in_place(void* data, std::int64_t count, MPI_Datatype type, std::int64_t width, MPI_Op op) {
    for (std::int64_t at = 0; at < count; at += kLargestCall) {
      const int part = static_cast<int>(std::min(kLargestCall, count - at));
      check(MPI_Allreduce(MPI_IN_PLACE, static_cast<std::byte*>(data) + at * width, part, type, op, ranks_),
            "all-reduce", name_);
    }
  }
  static void copy(Tensor from, Tensor to) {
    if (from.data != to.data) std::memcpy(to.data, from.data, static_cast<std::size_t>(from.bytes()));
  }
  float* widen(Tensor values) {
    wide_.resize(static_cast<std::size_t>(values.size()));
    const BF16* from = values.as<BF16>();
    for (std::int64_t i = 0; i < values.size(); ++i)
      wide_[static_cast<std::size_t>(i)] = static_cast<float>(from[i]);
    return wide_.data();
  }
  static void narrow(const float* from, Tensor to) {
    BF16* out = to.as<BF16>();
    for (std::int64_t i = 0; i < to.size(); ++i) out[i] = BF16(from[i]);
  }

  MPI_Comm ranks_ = MPI_COMM_NULL;
  int rank_ = 0, size_ = 1;
  std::string name_;
  std::vector<float> wide_;  ///< bfloat16 operands as float32, since MPI has no such type
  std::vector<std::byte> result_;
};

}  // namespace

std::unique_ptr<Communicator> make_mpi_communicator(MPI_Comm ranks, std::string name) {
  return std::make_unique<MpiCommunicator>(ranks, std::move(name));
}

}  // namespace octet
