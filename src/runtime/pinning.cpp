#include "octet/runtime/pinning.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "hwloc_handles.h"

namespace octet {
namespace {

/// Cores of which all that is in `allowed` is kept; others are left out.
std::vector<CpuList> usable_cores(const NodeTopology& node, const CpuList& allowed) {
  std::vector<CpuList> cores;
  for (const CpuList& core : node.cores) {
    CpuList usable = common_cpus(core, allowed);
    if (!usable.empty()) cores.push_back(std::move(usable));
  }
  return cores;
}

/// Part `index` of `parts` equal runs of the cores.
CpuList share_of(const std::vector<CpuList>& cores, std::size_t index, std::size_t parts) {
  CpuList cpus;
  const std::size_t end = cores.size() * (index + 1) / parts;
  for (std::size_t i = cores.size() * index / parts; i < end; ++i)
    cpus.insert(cpus.end(), cores[i].begin(), cores[i].end());
  std::ranges::sort(cpus);
  return cpus;
}

Binding near_gpu(const NodeTopology& node, const RankOnNode& rank) {
  const PciDevice& gpu = node.gpus[static_cast<std::size_t>(rank.gpu)];
  const CpuList near = common_cpus(gpu.cpus, rank.allowed);
  if (gpu.cpus.empty())
    return {rank.allowed, false, "none: the system does not say which cores are near the GPU"};
  if (near.empty()) return {rank.allowed, false, "none: this job may use no core near the GPU"};
  if (near == rank.allowed) return {rank.allowed, false, "none needed: all cores are equally near the GPU"};
  return {near, true, "to the cores and memory of the GPU's NUMA node"};
}

}  // namespace

std::vector<Binding> plan_bindings(const NodeTopology& node, const std::vector<RankOnNode>& ranks, bool pin) {
  std::vector<Binding> plan;
  const auto leave = [&](const std::string& reason) {
    for (const RankOnNode& rank : ranks) plan.push_back({rank.allowed, false, reason});
    return plan;
  };
  if (!pin) return leave("none: run.pin = none");
  if (node.cores.empty()) return leave("none: the machine's cores are not known");
  // A launcher that gives each rank a control group of its own has bound them as well.
  const bool bound = std::ranges::any_of(ranks, [&](const RankOnNode& rank) {
    return rank.bound || rank.allowed.empty() || rank.allowed != ranks.front().allowed;
  });
  if (bound) return leave("kept as the launcher bound the ranks");
  const std::vector<CpuList> cores = usable_cores(node, ranks.front().allowed);
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    const RankOnNode& rank = ranks[i];
    if (rank.gpu >= 0) {
      plan.push_back(near_gpu(node, rank));
    } else if (ranks.size() > cores.size()) {
      plan.push_back({rank.allowed, false,
                      fmt::format("none: {} ranks outnumber {} core{}", ranks.size(), cores.size(),
                                  cores.size() == 1 ? "" : "s")});
    } else if (ranks.size() == 1) {
      plan.push_back({rank.allowed, false, "none: one rank has all cores"});
    } else {
      plan.push_back({share_of(cores, i, ranks.size()), true, "to equal shares of the cores"});
    }
  }
  return plan;
}

std::string bind_process(const CpuList& cpus, int numa) {
  const HwlocTopology machine = make_hwloc_topology();
  if (!machine) return "cannot be pinned: hwloc has no memory for it";
  hwloc_topology_set_all_types_filter(machine.get(), HWLOC_TYPE_FILTER_KEEP_NONE);
  hwloc_topology_set_flags(machine.get(), HWLOC_TOPOLOGY_FLAG_INCLUDE_DISALLOWED);
  if (hwloc_topology_load(machine.get()) != 0) return "cannot be pinned: hwloc cannot read the machine";
  if (hwloc_set_cpubind(machine.get(), bitmap_of(cpus).get(), HWLOC_CPUBIND_PROCESS) != 0) {
    return fmt::format("cannot be pinned: {}", std::strerror(errno));
  }
  // Without HWLOC_MEMBIND_STRICT this is a preference: where the node is full, others serve.
  if (numa >= 0 && hwloc_set_membind(machine.get(), bitmap_of({numa}).get(), HWLOC_MEMBIND_BIND,
                                     HWLOC_MEMBIND_THREAD | HWLOC_MEMBIND_BYNODESET) != 0) {
    return fmt::format("cannot prefer the memory of a NUMA node: {}", std::strerror(errno));
  }
  return "";
}

}  // namespace octet
