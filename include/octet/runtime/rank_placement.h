#pragma once

#include <string>
#include <vector>

#include "octet/runtime/device.h"
#include "octet/runtime/world.h"

namespace octet {

struct RankPlacement {
  std::string nodes;               ///< pictures of the nodes, nodes that look alike once
  std::vector<std::string> notes;  ///< which ranks could not be pinned, and why, a line each
};

/// Discovers this rank's node and binds the rank as plan_bindings says, unless `pin` is false: collective.
/// Threads that the process starts later inherit the binding. Nothing here is an error: what fails is a note.
RankPlacement place_ranks(const World& world, const Device& device, bool pin);

}  // namespace octet
