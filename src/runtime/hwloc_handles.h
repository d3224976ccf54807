#pragma once

#include <hwloc.h>

#include <memory>

#include "octet/runtime/topology.h"

namespace octet {

struct HwlocDelete {
  void operator()(hwloc_topology_t topology) const { hwloc_topology_destroy(topology); }
  void operator()(hwloc_bitmap_t bitmap) const { hwloc_bitmap_free(bitmap); }
};
using HwlocTopology = std::unique_ptr<hwloc_topology, HwlocDelete>;
using HwlocBitmap = std::unique_ptr<hwloc_bitmap_s, HwlocDelete>;

/// A topology that is not loaded yet; null where hwloc has no memory for it.
inline HwlocTopology make_hwloc_topology() {
  hwloc_topology_t topology = nullptr;
  return HwlocTopology(hwloc_topology_init(&topology) == 0 ? topology : nullptr);
}

inline HwlocBitmap bitmap_of(const CpuList& cpus) {
  HwlocBitmap set(hwloc_bitmap_alloc());
  for (const int cpu : cpus) hwloc_bitmap_set(set.get(), static_cast<unsigned>(cpu));
  return set;
}

/// Members of a finite set; none of a null pointer.
inline CpuList cpus_of(hwloc_const_bitmap_t set) {
  CpuList cpus;
  if (set == nullptr) return cpus;
  for (int cpu = hwloc_bitmap_first(set); cpu >= 0; cpu = hwloc_bitmap_next(set, cpu)) cpus.push_back(cpu);
  return cpus;
}

}  // namespace octet
