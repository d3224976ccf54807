#pragma once

#include <string>
#include <vector>

#include "octet/runtime/world.h"

namespace octet {

/// A variable of the environment that changes how NCCL, MPI, UCX or CUDA work.
struct EnvironmentVariable {
  std::string name, value;
  std::string cost;  ///< of a setting made for debugging: what a run loses by it; empty for others

  bool operator==(const EnvironmentVariable&) const = default;
};

/// Those of `entries` ("NAME=value") that a user set and that steer behaviour, in the order of names: NCCL_*,
/// OMPI_MCA_*, UCX_*, CUDA_*, and some of cuBLAS and cuDNN. What Open MPI's launchers set for the processes
/// that they start is left out.
std::vector<EnvironmentVariable> steering_variables(const std::vector<std::string>& entries);

/// One text of several lines for `environments`, each rank's list: the variables of rank 0; a warning for
/// each debugging one; a warning for each that ranks do not have alike, with the ranks. Devices may be given
/// by rank, so CUDA_VISIBLE_DEVICES may differ. Empty where no rank has a steering variable.
std::string environment_report(const std::vector<std::vector<EnvironmentVariable>>& environments);

/// environment_report of all ranks, on all ranks: collective.
std::string describe_environment(const World& world);

}  // namespace octet
