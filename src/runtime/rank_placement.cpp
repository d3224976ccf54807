#include "octet/runtime/rank_placement.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <sstream>

#include "octet/runtime/node_picture.h"
#include "octet/runtime/pinning.h"
#include "octet/runtime/topology.h"

namespace octet {
namespace {

/// What the ranks of this node bring, each having told the others.
std::vector<RankOnNode> ranks_of_node(const World& node, const ThisNode& own, const Device& device,
                                      NodeTopology& topology) {
  const std::string address = device.pci_address();
  const std::vector<std::string> all =
      node.gather(fmt::format("{} {} {}", cpu_list_text(own.allowed), own.allowed != own.group ? 1 : 0,
                              address.empty() ? "-" : address));
  std::vector<RankOnNode> ranks;
  for (const std::string& text : all) {
    std::istringstream words(text);
    std::string cpus, gpu;
    RankOnNode rank;
    words >> cpus >> rank.bound >> gpu;
    rank.allowed = parse_cpu_list(cpus);
    rank.gpu = topology.gpu_at(gpu == "-" ? "" : gpu);
    ranks.push_back(std::move(rank));
  }
  return ranks;
}

/// The picture that the first rank of a node draws.
std::string draw(const NodeTopology& topology, const std::vector<RankOnNode>& ranks,
                 const std::vector<Binding>& bindings, const Device& device) {
  std::vector<std::string> addresses;
  for (const PciDevice& gpu : topology.gpus) addresses.push_back(gpu.address);
  const bool linked = device.kind() == DeviceKind::kCuda && addresses.size() > 1;
  return node_picture(topology, ranks, bindings,
                      linked ? gpu_links(addresses) : std::vector<std::vector<GpuLink>>());
}

}  // namespace

RankPlacement place_ranks(const World& world, const Device& device, bool pin) {
  const ThisNode own = discover_node();
  const World node(world.node());
  NodeTopology topology = own.topology;
  const std::vector<RankOnNode> ranks = ranks_of_node(node, own, device, topology);
  const std::vector<Binding> bindings = plan_bindings(topology, ranks, pin);
  const Binding& binding = bindings[static_cast<std::size_t>(node.rank())];
  std::string failure;
  if (binding.bind) {
    const int numa = topology.numa_of(binding.cpus);
    failure =
        bind_process(binding.cpus, numa < 0 ? -1 : topology.numa[static_cast<std::size_t>(numa)].number);
  }
  RankPlacement placement;
  std::map<std::string, std::vector<int>> failures;
  for (int rank = 0; const std::string& text : world.gather(failure)) {
    if (!text.empty()) failures[text].push_back(rank);
    ++rank;
  }
  for (const auto& [text, failed] : failures) placement.notes.push_back(ranks_text(failed) + " " + text);
  const std::vector<std::string> pictures =
      world.gather(node.rank() == 0 ? world.host() + "\n" + draw(topology, ranks, bindings, device) : "");
  std::vector<std::pair<std::string, std::string>> nodes;
  for (const std::string& text : pictures) {
    if (text.empty()) continue;
    const std::size_t end = text.find('\n');
    nodes.emplace_back(text.substr(0, end), text.substr(end + 1));
  }
  placement.nodes = show_nodes(nodes);
  return placement;
}

}  // namespace octet
