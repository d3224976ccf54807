#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace octet {

/// Numbers of logical processors (hardware threads) as the system counts them, rising.
using CpuList = std::vector<int>;

/// "0-3,8" of 0, 1, 2, 3, 8; "-" of none.
std::string cpu_list_text(const CpuList& cpus);
/// The list that cpu_list_text wrote.
CpuList parse_cpu_list(const std::string& text);
CpuList common_cpus(const CpuList& a, const CpuList& b);

/// Memory with the processors nearest to it.
struct NumaNode {
  int number = 0;  ///< the system's
  int package = 0;
  CpuList cpus;             ///< empty for memory without processors
  std::int64_t memory = 0;  ///< bytes
};

/// A GPU or a network interface on the PCI bus.
struct PciDevice {
  std::string name;     ///< of an interface, such as "mlx5_0/ib0"; empty for a GPU
  std::string address;  ///< such as "0000:18:00.0"
  CpuList cpus;         ///< nearest to it; empty where the system does not say
  int numa = -1;        ///< index into NodeTopology::numa; -1 where no single NUMA node is nearest
};

/// One machine, whole, whatever part of it the job may use. Empty where it could not be discovered.
struct NodeTopology {
  int packages = 0;
  std::vector<NumaNode> numa;
  std::vector<CpuList> cores;   ///< hardware threads of each core, in the order of NUMA nodes
  std::vector<PciDevice> gpus;  ///< of NVIDIA, in the order of addresses, as nvidia-smi counts them
  std::vector<PciDevice> nics;  ///< Ethernet, InfiniBand, RoCE

  CpuList cpus() const;
  /// Index into `numa` of the node that is near all of `cpus`; -1 where there is none.
  int numa_of(const CpuList& cpus) const;
  /// Index into `gpus`; a GPU that the system does not show is added, near nothing. -1 for an empty address.
  int gpu_at(const std::string& address);
};

/// The machine that this process runs on.
struct ThisNode {
  NodeTopology topology;
  CpuList allowed;  ///< that the calling thread may run on
  CpuList
      group;  ///< that the job's control group allows: more than `allowed` where a launcher bound the process
};

/// Asks hwloc, which reads files: tens of milliseconds.
ThisNode discover_node();
/// A machine that hwloc described (lstopo FILE.xml). Throws Error(kData) where hwloc cannot read the text.
NodeTopology topology_from_xml(const std::string& xml);

/// How two GPUs of a node reach one another.
struct GpuLink {
  enum class Kind {
    kUnknown,
    kNvlink,
    kPci,   ///< peer access over PCI Express
    kHost,  ///< no peer access: through host memory
  };
  Kind kind = Kind::kUnknown;
  int nvlinks = 0;  ///< links of a GPU, directly or through switches; 0 where their number is not known
};
/// The links between each pair of GPUs, by PCI address, as NVML (if it can be loaded) and CUDA know them.
/// Empty in a build without CUDA.
std::vector<std::vector<GpuLink>> gpu_links(const std::vector<std::string>& addresses);

}  // namespace octet
