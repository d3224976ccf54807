#include "octet/comm/communicator.h"

namespace octet {

std::unique_ptr<Communicator> make_communicator(MPI_Comm ranks, Device& device, bool shared, std::string name,
                                                const CommunicatorSettings& settings) {
  if (device.kind() == DeviceKind::kCpu) return make_mpi_communicator(ranks, std::move(name));
  int size = 1;
  MPI_Comm_size(ranks, &size);
  // A group of one needs no NCCL, whose every communicator takes device memory.
  if (shared || size == 1) return make_staged_communicator(ranks, device, std::move(name));
  return make_nccl_communicator(ranks, device, std::move(name), settings);
}

}  // namespace octet
