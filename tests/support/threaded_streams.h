#pragma once

#include <cstdint>
#include <memory>

#include "octet/comm/communicator.h"
#include "octet/ops/ops.h"
#include "octet/runtime/device.h"

namespace octet::test {

/// A CPU device whose streams behave as a GPU's: each is a thread that takes its work in order, behind the
/// host and beside the other streams, with pauses of random length in between. Only events and synchronize()
/// bring them together, so an event too few shows as wrong numbers, and one too many as a deadlock, without a
/// GPU. Copies wait where an end is neither memory of the device nor from allocate_host.
std::unique_ptr<Device> make_threaded_device(std::unique_ptr<Device> cpu, std::uint64_t seed);

/// Operators and communicators whose work is queued on such streams. MPI must allow calls from many threads.
std::unique_ptr<Ops> make_threaded_ops(std::unique_ptr<Ops> cpu);
std::unique_ptr<Communicator> make_threaded_communicator(std::unique_ptr<Communicator> cpu);

}  // namespace octet::test
