#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <cstdio>
#include <optional>

#include "octet/runtime/topology.h"

namespace octet {
namespace {

/// What we use of NVML, NVIDIA's management library, which comes with the driver and is loaded where it
/// exists. Its header is not needed to build octet: these declarations follow its documented C interface.
class Nvml {
 public:
  using Device = void*;

  Nvml() {
    library_ = dlopen("libnvidia-ml.so.1", RTLD_LAZY | RTLD_LOCAL);
    if (library_ == nullptr) return;
    find(init_, "nvmlInit_v2");
    find(shutdown_, "nvmlShutdown");
    find(by_address_, "nvmlDeviceGetHandleByPciBusId_v2");
    find(link_state_, "nvmlDeviceGetNvLinkState");
    find(link_peer_, "nvmlDeviceGetNvLinkRemotePciInfo_v2");
    find(peer_status_, "nvmlDeviceGetP2PStatus");
    const bool whole = init_ != nullptr && shutdown_ != nullptr && by_address_ != nullptr &&
                       link_state_ != nullptr && link_peer_ != nullptr && peer_status_ != nullptr;
    ready_ = whole && init_() == kSuccess;
  }
  ~Nvml() {
    if (ready_) shutdown_();
    if (library_ != nullptr) dlclose(library_);
  }
  Nvml(const Nvml&) = delete;
  Nvml& operator=(const Nvml&) = delete;

  std::optional<Device> device(const std::string& address) const {
    Device device = nullptr;
    if (!ready_ || by_address_(address.c_str(), &device) != kSuccess) return std::nullopt;
    return device;
  }

  /// Active links of `from` that end at the GPU `to`; all active ones where `to` is empty.
  int active_links(Device from, const std::string& to) const {
    int count = 0;
    for (unsigned link = 0; link < kMostLinks; ++link) {
      int state = 0;
      if (link_state_(from, link, &state) != kSuccess || state != kEnabled) continue;
      PciInfo peer{};
      count += to.empty() || (link_peer_(from, link, &peer) == kSuccess && address_of(peer) == to) ? 1 : 0;
    }
    return count;
  }

  /// Whether two GPUs reach one another over NVLink, directly or through switches; nothing where unknown.
  std::optional<bool> nvlink_peers(Device a, Device b) const {
    int status = -1;
    if (peer_status_(a, b, kPeersByNvlink, &status) != kSuccess) return std::nullopt;
    return status == kPeerStatusOk;
  }

 private:
  static constexpr int kSuccess = 0;          // NVML_SUCCESS
  static constexpr int kEnabled = 1;          // NVML_FEATURE_ENABLED
  static constexpr int kPeersByNvlink = 2;    // NVML_P2P_CAPS_INDEX_NVLINK
  static constexpr int kPeerStatusOk = 0;     // NVML_P2P_STATUS_OK
  static constexpr unsigned kMostLinks = 18;  // NVML_NVLINK_MAX_LINKS

  struct PciInfo {  // nvmlPciInfo_t
    char legacy_address[16];
    unsigned domain, bus, device, device_id, subsystem_id;
    char address[32];
  };

  static std::string address_of(const PciInfo& pci) {
    char text[32];
    std::snprintf(text, sizeof text, "%04x:%02x:%02x.0", pci.domain, pci.bus, pci.device);
    return text;
  }
  template <typename Function>
  void find(Function& function, const char* name) {
    function = reinterpret_cast<Function>(dlsym(library_, name));
  }

  void* library_ = nullptr;
  bool ready_ = false;
  int (*init_)() = nullptr;
  int (*shutdown_)() = nullptr;
  int (*by_address_)(const char*, Device*) = nullptr;
  int (*link_state_)(Device, unsigned, int*) = nullptr;
  int (*link_peer_)(Device, unsigned, PciInfo*) = nullptr;
  int (*peer_status_)(Device, Device, int, int*) = nullptr;
};

/// The number of NVLinks of a pair by NVML; nothing where it does not know, 0 where there are none.
std::optional<int> count_nvlinks(const Nvml& nvml, const std::string& from, const std::string& to) {
  const auto a = nvml.device(from), b = nvml.device(to);
  if (!a || !b) return std::nullopt;
  const int direct = nvml.active_links(*a, to);
  if (direct > 0) return direct;
  const std::optional<bool> peers = nvml.nvlink_peers(*a, *b);
  if (!peers) return std::nullopt;
  if (!*peers) return 0;
  // Through switches a GPU may use all its links for one peer.
  const int own = nvml.active_links(*a, ""), other = nvml.active_links(*b, "");
  return own < other ? own : other;
}

/// What CUDA knows of a pair that this process sees: links with atomic operations are NVLinks, of which it
/// does not tell the number.
GpuLink::Kind kind_by_cuda(const std::string& from, const std::string& to) {
  int a = -1, b = -1, access = 0, atomics = 0;
  const bool known =
      cudaDeviceGetByPCIBusId(&a, from.c_str()) == cudaSuccess &&
      cudaDeviceGetByPCIBusId(&b, to.c_str()) == cudaSuccess &&
      cudaDeviceGetP2PAttribute(&access, cudaDevP2PAttrAccessSupported, a, b) == cudaSuccess &&
      cudaDeviceGetP2PAttribute(&atomics, cudaDevP2PAttrNativeAtomicSupported, a, b) == cudaSuccess;
  static_cast<void>(cudaGetLastError());
  if (!known) return GpuLink::Kind::kUnknown;
  if (access == 0) return GpuLink::Kind::kHost;
  return atomics != 0 ? GpuLink::Kind::kNvlink : GpuLink::Kind::kPci;
}

GpuLink link_of(const Nvml& nvml, const std::string& from, const std::string& to) {
  const GpuLink::Kind kind = kind_by_cuda(from, to);
  const std::optional<int> nvlinks = count_nvlinks(nvml, from, to);
  if (!nvlinks) return {kind, 0};
  if (*nvlinks > 0) return {GpuLink::Kind::kNvlink, *nvlinks};
  // NVML has just denied NVLink; that two GPUs have peer access over PCI Express is for CUDA to say.
  return {kind == GpuLink::Kind::kNvlink ? GpuLink::Kind::kPci : kind, 0};
}

}  // namespace

std::vector<std::vector<GpuLink>> gpu_links(const std::vector<std::string>& addresses) {
  const Nvml nvml;
  std::vector<std::vector<GpuLink>> links(addresses.size(), std::vector<GpuLink>(addresses.size()));
  for (std::size_t from = 0; from < addresses.size(); ++from) {
    for (std::size_t to = 0; to < addresses.size(); ++to) {
      if (from != to) links[from][to] = link_of(nvml, addresses[from], addresses[to]);
    }
  }
  return links;
}

}  // namespace octet
