#pragma once

#include <string>
#include <vector>

#include "octet/runtime/world.h"

namespace octet {

/// Exit code of a run that stopped on request after a checkpoint: run the same command again.
constexpr int kStoppedOnRequest = 85;

/// Trains as the deck says, from deck files to the last step. Collective; returns the exit code. Errors that
/// all ranks know of are thrown on all of them; a failure that only this rank knows of is printed and ends
/// the job.
int run_training(const World& world, const std::vector<std::string>& files,
                 const std::vector<std::string>& assignments);

}  // namespace octet
