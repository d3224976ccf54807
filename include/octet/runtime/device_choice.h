#pragma once

#include <memory>
#include <string>

#include "octet/config/deck.h"
#include "octet/runtime/device.h"
#include "octet/runtime/world.h"

namespace octet {

/// Which of `visible` devices a local rank takes: the only one where the launcher shows one a rank, else its
/// own number. With `share` ranks that outnumber the devices take turns. Throws Error(kUsage) naming host,
/// ranks and devices where they do not fit.
int choose_gpu(int visible, int local_rank, int local_size, bool share, const std::string& host);

/// What the ranks of a run work on.
struct DeviceChoice {
  std::unique_ptr<Device> device;
  bool shared = false;  ///< several ranks on one GPU
};

/// Opens this rank's device as run.device and run.share_gpus say: collective. Throws Error(kUsage) where two
/// ranks would share a GPU unasked, where only some hosts have GPUs, or where a GPU is asked for and there is
/// none.
DeviceChoice open_device(const World& world, const Deck::Run& run);

/// Throws Error(kUsage) where a GPU of this name and compute capability (0: the CPU) lacks the matrix units
/// that precision.fp8 = `recipe` takes.
void check_fp8(const std::string& recipe, const std::string& device, int compute_capability);

/// Threads for a rank's matrix products on the CPU: its share of the cores, at least one.
int cpu_threads(const World& world);

}  // namespace octet
