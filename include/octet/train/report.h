#pragma once

#include <string>
#include <vector>

#include "octet/train/engine.h"

namespace octet {

/// What a run prints before its first step: world, grid, nodes, memory by class, precision, FLOPs per token
/// and the peak that MFU is taken against, data. Collective: `places` holds a line of every rank ("host GPU
/// name"), `nodes` the pictures of place_ranks. `validation` may be null.
std::string startup_report(const World& world, const Deck& deck, const Engine& engine, const Device& device,
                           const std::vector<std::string>& places, const std::string& nodes,
                           const TokenFile& train, const TokenFile* validation);

}  // namespace octet
