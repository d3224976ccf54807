#include "octet/runtime/topology.h"

#include <fmt/format.h>
#include <hwloc.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <memory>

#include "hwloc_handles.h"
#include "octet/base/error.h"

namespace octet {
namespace {

using PciAttributes = hwloc_obj_attr_u::hwloc_pcidev_attr_s;

constexpr unsigned kNvidia = 0x10de, kDisplayClass = 0x03;

std::string address_of(const PciAttributes& pci) {
  return fmt::format("{:04x}:{:02x}:{:02x}.{:x}", static_cast<unsigned>(pci.domain), pci.bus, pci.dev,
                     pci.func);
}

void add_numa_nodes(hwloc_topology_t machine, NodeTopology& node) {
  for (hwloc_obj_t object = nullptr;
       (object = hwloc_get_next_obj_by_type(machine, HWLOC_OBJ_NUMANODE, object)) != nullptr;) {
    NumaNode numa;
    numa.number = static_cast<int>(object->os_index);
    numa.cpus = cpus_of(object->cpuset);
    numa.memory = static_cast<std::int64_t>(object->attr->numanode.local_memory);
    for (hwloc_obj_t package = nullptr;
         (package = hwloc_get_next_obj_by_type(machine, HWLOC_OBJ_PACKAGE, package)) != nullptr;) {
      if (hwloc_bitmap_intersects(package->cpuset, object->cpuset) != 0) {
        numa.package = static_cast<int>(package->logical_index);
        break;
      }
    }
    if (!numa.cpus.empty() || numa.memory > 0) node.numa.push_back(std::move(numa));
  }
}

/// Cores in the order of NUMA nodes; where two nodes are near the same cores, such as fast and large memory,
/// the first counts.
void add_cores(hwloc_topology_t machine, NodeTopology& node) {
  const bool has_cores = hwloc_get_nbobjs_by_type(machine, HWLOC_OBJ_CORE) > 0;
  std::multimap<int, CpuList> by_numa;
  for (hwloc_obj_t object = nullptr;
       (object = hwloc_get_next_obj_by_type(machine, has_cores ? HWLOC_OBJ_CORE : HWLOC_OBJ_PU, object)) !=
       nullptr;) {
    CpuList cpus = cpus_of(object->cpuset);
    by_numa.emplace(node.numa_of(cpus), std::move(cpus));
  }
  for (auto& [numa, cpus] : by_numa) node.cores.push_back(std::move(cpus));
}

PciDevice place_device(hwloc_topology_t machine, hwloc_obj_t object, const NodeTopology& node) {
  PciDevice device;
  device.address = address_of(object->attr->pcidev);
  device.cpus = cpus_of(hwloc_get_non_io_ancestor_obj(machine, object)->cpuset);
  device.numa = node.numa_of(device.cpus);
  return device;
}

void add_devices(hwloc_topology_t machine, NodeTopology& node) {
  for (hwloc_obj_t object = nullptr; (object = hwloc_get_next_pcidev(machine, object)) != nullptr;) {
    const PciAttributes& pci = object->attr->pcidev;
    if (pci.vendor_id == kNvidia && pci.class_id >> 8 == kDisplayClass)
      node.gpus.push_back(place_device(machine, object, node));
  }
  // One card may have several names: of its verbs, and of its IP interface.
  std::map<std::string, PciDevice> nics;
  for (const hwloc_obj_osdev_type_t type : {HWLOC_OBJ_OSDEV_OPENFABRICS, HWLOC_OBJ_OSDEV_NETWORK}) {
    for (hwloc_obj_t object = nullptr; (object = hwloc_get_next_osdev(machine, object)) != nullptr;) {
      hwloc_obj_t card = object->parent;
      if (object->attr->osdev.type != type || object->name == nullptr) continue;
      while (card != nullptr && card->type != HWLOC_OBJ_PCI_DEVICE) card = card->parent;
      if (card == nullptr) continue;
      PciDevice& nic = nics[address_of(card->attr->pcidev)];
      if (nic.name.empty()) nic = place_device(machine, card, node);
      nic.name += (nic.name.empty() ? "" : "/") + std::string(object->name);
    }
  }
  for (auto& [address, nic] : nics) node.nics.push_back(std::move(nic));
  const auto by_address = [](const PciDevice& a, const PciDevice& b) { return a.address < b.address; };
  std::ranges::sort(node.gpus, by_address);
}

NodeTopology read_topology(hwloc_topology_t machine) {
  NodeTopology node;
  node.packages = std::max(1, hwloc_get_nbobjs_by_type(machine, HWLOC_OBJ_PACKAGE));
  add_numa_nodes(machine, node);
  add_cores(machine, node);
  add_devices(machine, node);
  return node;
}

/// A topology to be loaded, with cards that matter, and without what would start GPU or display libraries.
HwlocTopology prepare_topology() {
  HwlocTopology machine = make_hwloc_topology();
  if (!machine) return machine;
  hwloc_topology_set_io_types_filter(machine.get(), HWLOC_TYPE_FILTER_KEEP_IMPORTANT);
  for (const char* plugin : {"cuda", "nvml", "opencl", "gl", "rsmi", "levelzero"}) {
    hwloc_topology_set_components(machine.get(), HWLOC_TOPOLOGY_COMPONENTS_FLAG_BLACKLIST, plugin);
  }
  return machine;
}

}  // namespace

std::string cpu_list_text(const CpuList& cpus) {
  if (cpus.empty()) return "-";
  const HwlocBitmap set = bitmap_of(cpus);
  std::string text(static_cast<std::size_t>(hwloc_bitmap_list_snprintf(nullptr, 0, set.get())), '\0');
  hwloc_bitmap_list_snprintf(text.data(), text.size() + 1, set.get());
  return text;
}

CpuList parse_cpu_list(const std::string& text) {
  if (text == "-") return {};
  const HwlocBitmap set(hwloc_bitmap_alloc());
  OCTET_ASSERT(hwloc_bitmap_list_sscanf(set.get(), text.c_str()) == 0);
  return cpus_of(set.get());
}

CpuList common_cpus(const CpuList& a, const CpuList& b) {
  CpuList common;
  std::ranges::set_intersection(a, b, std::back_inserter(common));
  return common;
}

CpuList NodeTopology::cpus() const {
  CpuList all;
  for (const CpuList& core : cores) all.insert(all.end(), core.begin(), core.end());
  std::ranges::sort(all);
  return all;
}

int NodeTopology::numa_of(const CpuList& wanted) const {
  const auto holds = [&](const NumaNode& node) { return std::ranges::includes(node.cpus, wanted); };
  const auto found = wanted.empty() ? numa.end() : std::ranges::find_if(numa, holds);
  return found == numa.end() ? -1 : static_cast<int>(found - numa.begin());
}

int NodeTopology::gpu_at(const std::string& address) {
  if (address.empty()) return -1;
  const auto found = std::ranges::find(gpus, address, &PciDevice::address);
  const auto index = static_cast<int>(found - gpus.begin());
  if (found == gpus.end()) gpus.push_back({.name = "", .address = address, .cpus = {}, .numa = -1});
  return index;
}

ThisNode discover_node() {
  ThisNode node;
  const HwlocTopology machine = prepare_topology();
  if (!machine) return node;
  hwloc_topology_set_flags(machine.get(), HWLOC_TOPOLOGY_FLAG_INCLUDE_DISALLOWED);
  if (hwloc_topology_load(machine.get()) != 0) return node;
  node.topology = read_topology(machine.get());
  node.group = cpus_of(hwloc_topology_get_allowed_cpuset(machine.get()));
  const HwlocBitmap own(hwloc_bitmap_alloc());
  if (hwloc_get_cpubind(machine.get(), own.get(), HWLOC_CPUBIND_THREAD) == 0)
    node.allowed = cpus_of(own.get());
  return node;
}

NodeTopology topology_from_xml(const std::string& xml) {
  const HwlocTopology machine = prepare_topology();
  // The length that hwloc asks for counts the zero at the end.
  if (!machine ||
      hwloc_topology_set_xmlbuffer(machine.get(), xml.c_str(), static_cast<int>(xml.size()) + 1) != 0 ||
      hwloc_topology_load(machine.get()) != 0) {
    fail(ErrorKind::kData, "hwloc cannot read {} bytes as the description of a machine", xml.size());
  }
  return read_topology(machine.get());
}

}  // namespace octet
