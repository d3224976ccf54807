#pragma once

#include <string>
#include <vector>

#include "octet/runtime/topology.h"

namespace octet {

/// What a rank brings to its node.
struct RankOnNode {
  CpuList allowed;     ///< that it was started with
  bool bound = false;  ///< these are fewer than its control group has: a launcher or taskset bound it
  int gpu = -1;        ///< index into NodeTopology::gpus; -1 without
};

/// Where a rank of a node shall run.
struct Binding {
  CpuList cpus;
  bool bind = false;   ///< false: as it was started
  std::string reason;  ///< a phrase that follows "pinning"
};

/// Bindings of all ranks of a node. Nothing is widened: where a rank was bound when it started, all keep what
/// they have. A rank with a GPU gets the processors of the GPU's NUMA node. Ranks without GPUs get equal runs
/// of whole cores, in the order of NUMA nodes; they are left alone where they outnumber the cores, as a free
/// core is then worth more than a near one.
std::vector<Binding> plan_bindings(const NodeTopology& node, const std::vector<RankOnNode>& ranks, bool pin);

/// Binds all threads of this process to `cpus`, and new memory of this thread, and of threads that it will
/// start, to NUMA node `numa` of the system (-1: none) as long as that has room. Returns what failed and why
/// (a phrase that follows "rank 3"), or an empty text.
std::string bind_process(const CpuList& cpus, int numa);

}  // namespace octet
