#include <algorithm>
#include <cstring>
#include <vector>

#include "octet/comm/communicator.h"

namespace octet {

namespace {

/// Copies through page-locked host memory around collectives of MPI. Host memory grows to the largest call
/// and stays.
class StagedCommunicator final : public Communicator {
 public:
  StagedCommunicator(MPI_Comm ranks, Device& device, std::string name)
      : device_(device), host_(make_mpi_communicator(ranks, std::move(name))) {}

  int rank() const override { return host_->rank(); }
  int size() const override { return host_->size(); }
  const std::string& name() const override { return host_->name(); }

  void all_reduce(Stream& stream, Tensor values, ReduceOp op) override {
    if (size() == 1) return;
    const Tensor staged = fetch(stream, values, 0);
    host_->all_reduce(stream, staged, op);
    store(stream, staged, values);
  }
  void reduce_scatter(Stream& stream, Tensor in, Tensor out) override {
    if (size() == 1) return copy(stream, in, out);
    const Tensor staged = fetch(stream, in, out.bytes());
    const Tensor result{static_cast<std::byte*>(staged.data) + staged.bytes(), out.dtype, out.rows, out.cols};
    host_->reduce_scatter(stream, staged, result);
    store(stream, result, out);
  }
  void all_gather(Stream& stream, Tensor in, Tensor out) override {
    if (size() == 1) return copy(stream, in, out);
    const Tensor staged = fetch(stream, in, out.bytes());
    const Tensor result{static_cast<std::byte*>(staged.data) + staged.bytes(), out.dtype, out.rows, out.cols};
    host_->all_gather(stream, staged, result);
    store(stream, result, out);
  }
  void all_to_all(Stream& stream, Tensor in, Tensor out) override {
    if (size() == 1) return copy(stream, in, out);
    const Tensor staged = fetch(stream, in, out.bytes());
    const Tensor result{static_cast<std::byte*>(staged.data) + staged.bytes(), out.dtype, out.rows, out.cols};
    host_->all_to_all(stream, staged, result);
    store(stream, result, out);
  }
  void send(Stream& stream, Tensor values, int to) override {
    host_->send(stream, fetch(stream, values, 0), to);
  }
  void receive(Stream& stream, Tensor values, int from) override {
    const Tensor staged = room(values, 0);
    host_->receive(stream, staged, from);
    store(stream, staged, values);
  }

 private:
  void copy(Stream& stream, Tensor from, Tensor to) {
    if (from.data != to.data) device_.copy(stream, to.data, from.data, from.bytes());
  }
  /// Host memory of the size of `values`, with `more` bytes behind it.
  Tensor room(Tensor values, std::int64_t more) {
    const std::int64_t need = values.bytes() + more;
    if (!memory_ || memory_->bytes() < need) memory_ = device_.allocate_host(need, "staged collectives");
    return {memory_->data(), values.dtype, values.rows, values.cols};
  }
  /// The same, holding `values`.
  Tensor fetch(Stream& stream, Tensor values, std::int64_t more) {
    const Tensor staged = room(values, more);
    device_.copy(stream, staged.data, values.data, values.bytes());
    stream.synchronize();
    return staged;
  }
  void store(Stream& stream, Tensor from, Tensor to) {
    device_.copy(stream, to.data, from.data, from.bytes());
    stream.synchronize();
  }

  Device& device_;
  std::unique_ptr<Communicator> host_;
  std::unique_ptr<Buffer> memory_;
};

}  // namespace

std::unique_ptr<Communicator> make_staged_communicator(MPI_Comm ranks, Device& device, std::string name) {
  return std::make_unique<StagedCommunicator>(ranks, device, std::move(name));
}

}  // namespace octet
