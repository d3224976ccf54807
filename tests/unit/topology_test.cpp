// Nodes as hwloc describes them: what is near what, where ranks are bound, and the picture of it.
#include <fmt/ranges.h>
#include <gtest/gtest.h>
#include <hwloc.h>
#include <sched.h>

#include <algorithm>
#include <cstdio>
#include <numeric>
#include <sstream>

#include "octet/base/error.h"
#include "octet/runtime/device.h"
#include "octet/runtime/node_picture.h"
#include "octet/runtime/pinning.h"
#include "octet/runtime/topology.h"

namespace octet {
namespace {

using testing::AssertionFailure;
using testing::AssertionResult;
using testing::AssertionSuccess;

/// hwloc's own XML of a machine without cards, such as "pack:2 [numa] core:4 pu:2".
std::string synthetic_xml(const char* description) {
  hwloc_topology_t machine = nullptr;
  EXPECT_EQ(hwloc_topology_init(&machine), 0);
  EXPECT_EQ(hwloc_topology_set_synthetic(machine, description), 0);
  EXPECT_EQ(hwloc_topology_load(machine), 0);
  char* buffer = nullptr;
  int length = 0;
  EXPECT_EQ(hwloc_topology_export_xmlbuffer(machine, &buffer, &length, 0), 0);
  std::string xml = buffer;
  hwloc_free_xmlbuffer(machine, buffer);
  hwloc_topology_destroy(machine);
  return xml;
}

std::string card(int bus, const char* type, const std::string& inside = "") {
  return fmt::format(
      R"(<object type="PCIDev" gp_index="{}" pci_busid="0000:{:02x}:00.0" pci_type="{}" pci_link_speed="0">{}</object>)",
      1000 + bus, bus, type, inside);
}
std::string os_device(int index, const char* name, int type) {
  return fmt::format(R"(<object type="OSDev" gp_index="{}" name="{}" osdev_type="{}"/>)", index, name, type);
}
constexpr const char* kH200 = "0302 [10de:2335] [10de:18be] a1";
constexpr const char* kInfiniband = "0207 [15b3:1021] [15b3:0041] 00";
constexpr const char* kScreen = "0300 [1a03:2000] [1a03:2000] 41";

/// Two sockets of `cores` cores with two threads each; at each socket four GPUs and an InfiniBand card, a
/// service processor's screen at the first.
NodeTopology two_sockets(int cores = 16) {
  std::string xml = synthetic_xml(fmt::format("pack:2 [numa(memory=64GiB)] core:{} pu:2", cores).c_str());
  std::size_t from = 0;
  for (int package = 0; package < 2; ++package) {
    const int first = package == 0 ? 0x10 : 0x90;
    std::string cards;
    for (int gpu = 0; gpu < 4; ++gpu) cards += card(first + 0x10 * gpu, kH200);
    cards += card(first + 1, kInfiniband,
                  os_device(3000 + package, package == 0 ? "ib0" : "ib1", 2) +
                      os_device(3100 + package, package == 0 ? "mlx5_0" : "mlx5_1", 3));
    if (package == 0) cards += card(first + 2, kScreen);
    const std::string bridge = fmt::format(
        R"(<object type="Bridge" gp_index="{}" bridge_type="0-1" depth="0" bridge_pci="0000:[{:02x}-{:02x}]">{}</object>)",
        2000 + package, first, first + 0x3f, cards);
    // Cards are the last children of their package, which the last end of a core within it precedes.
    from = package == 0 ? xml.find(R"(<object type="Package" os_index="1")") : xml.find("</topology>");
    from = xml.rfind("</object>", from - 1);
    if (package == 1) from = xml.rfind("</object>", from - 1);
    xml.insert(from, bridge);
  }
  return topology_from_xml(xml);
}

CpuList range(int first, int last) {
  CpuList cpus(static_cast<std::size_t>(last - first + 1));
  std::iota(cpus.begin(), cpus.end(), first);
  return cpus;
}

std::vector<RankOnNode> ranks_on(const NodeTopology& node, int count, bool gpus) {
  std::vector<RankOnNode> ranks;
  for (int rank = 0; rank < count; ++rank)
    ranks.push_back({.allowed = node.cpus(), .bound = false, .gpu = gpus ? rank : -1});
  return ranks;
}

AssertionResult has(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) return AssertionSuccess();
  return AssertionFailure() << "`" << part << "` is not in:\n" << text;
}

AssertionResult fits(const std::string& text) {
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (line.size() > kReportColumns) return AssertionFailure() << "too wide: " << line;
  }
  return AssertionSuccess();
}

TEST(Topology, GpusAndNetworkCardsAreNearTheirSocket) {
  const NodeTopology node = two_sockets();
  EXPECT_EQ(node.packages, 2);
  ASSERT_EQ(node.numa.size(), 2u);
  EXPECT_EQ(node.numa[1].package, 1);
  EXPECT_EQ(node.numa[1].cpus, range(32, 63));
  EXPECT_EQ(node.numa[1].memory, std::int64_t{64} << 30);
  EXPECT_EQ(node.cores.size(), 32u);
  ASSERT_EQ(node.gpus.size(), 8u) << "the screen is no GPU to train on";
  for (std::size_t gpu = 0; gpu < 8; ++gpu) {
    EXPECT_EQ(node.gpus[gpu].numa, gpu < 4 ? 0 : 1);
    EXPECT_EQ(node.gpus[gpu].cpus, gpu < 4 ? range(0, 31) : range(32, 63));
  }
  EXPECT_EQ(node.gpus[5].address, "0000:a0:00.0");
  ASSERT_EQ(node.nics.size(), 2u);
  EXPECT_EQ(node.nics[0].name, "mlx5_0/ib0") << "one card, one entry";
  EXPECT_EQ(node.nics[1].numa, 1);
}

TEST(Topology, GpuThatTheSystemHidesIsAddedNearNothing) {
  NodeTopology node = two_sockets();
  EXPECT_EQ(node.gpu_at(""), -1);
  EXPECT_EQ(node.gpu_at("0000:a0:00.0"), 5);
  EXPECT_EQ(node.gpu_at("0000:ff:00.0"), 8);
  EXPECT_EQ(node.gpu_at("0000:ff:00.0"), 8);
  std::vector<RankOnNode> ranks = ranks_on(node, 1, true);
  ranks[0].gpu = 8;
  const auto bindings = plan_bindings(node, ranks, true);
  EXPECT_FALSE(bindings[0].bind);
  EXPECT_TRUE(has(node_picture(node, ranks, bindings, {}), "GPU 8  0000:ff:00.0  rank 0 on all CPUs"));
}

TEST(Topology, TextThatIsNoMachineIsRefused) {
  EXPECT_THROW(topology_from_xml("<topology version=\"2.0\"></topology"), Error);
}

TEST(Topology, ThisMachineHasTheCoresThatThisThreadMayUse) {
  const ThisNode own = discover_node();
  cpu_set_t allowed;
  ASSERT_EQ(sched_getaffinity(0, sizeof allowed, &allowed), 0);
  EXPECT_EQ(static_cast<int>(own.allowed.size()), CPU_COUNT(&allowed));
  for (const int cpu : own.allowed) EXPECT_TRUE(CPU_ISSET(cpu, &allowed)) << cpu;
  EXPECT_TRUE(std::ranges::includes(own.topology.cpus(), own.allowed));
  EXPECT_TRUE(std::ranges::includes(own.group, own.allowed));
  EXPECT_GE(own.topology.numa.size(), 1u);
}

TEST(Topology, ListsOfProcessorsReadAsTheyAreWritten) {
  for (const CpuList& cpus : {CpuList{}, CpuList{7}, CpuList{0, 1, 2, 3, 8, 64, 65, 200}})
    EXPECT_EQ(parse_cpu_list(cpu_list_text(cpus)), cpus);
  EXPECT_EQ(cpu_list_text({0, 1, 2, 3, 8}), "0-3,8");
}

TEST(Topology, CudaDevicesLieOnTheBusAndHaveLinksBothWays) {
  if (cuda_device_count() == 0) GTEST_SKIP() << "no CUDA device";
  std::vector<std::string> addresses;
  for (int ordinal = 0; ordinal < cuda_device_count(); ++ordinal) {
    addresses.push_back(make_cuda_device(ordinal)->pci_address());
    unsigned domain = 0, bus = 0, device = 0;
    EXPECT_EQ(std::sscanf(addresses.back().c_str(), "%x:%x:%x.0", &domain, &bus, &device), 3)
        << addresses.back();
  }
  const auto links = gpu_links(addresses);
  ASSERT_EQ(links.size(), addresses.size());
  for (std::size_t from = 0; from < links.size(); ++from) {
    for (std::size_t to = 0; to < links.size(); ++to) {
      if (from == to) continue;
      EXPECT_NE(links[from][to].kind, GpuLink::Kind::kUnknown) << "CUDA sees both";
      EXPECT_EQ(links[from][to].kind, links[to][from].kind);
      EXPECT_EQ(links[from][to].nvlinks, links[to][from].nvlinks);
    }
  }
}

TEST(Pinning, RanksWithGpusGetTheNumaNodeOfTheirGpu) {
  const NodeTopology node = two_sockets();
  const auto bindings = plan_bindings(node, ranks_on(node, 8, true), true);
  for (std::size_t rank = 0; rank < 8; ++rank) {
    EXPECT_TRUE(bindings[rank].bind);
    EXPECT_EQ(bindings[rank].cpus, rank < 4 ? range(0, 31) : range(32, 63));
  }
}

TEST(Pinning, StaysWithinTheControlGroupOfTheJob) {
  const NodeTopology node = two_sockets();
  auto ranks = ranks_on(node, 8, true);
  for (RankOnNode& rank : ranks) rank.allowed = range(24, 39);
  const auto bindings = plan_bindings(node, ranks, true);
  EXPECT_EQ(bindings[0].cpus, range(24, 31));
  EXPECT_EQ(bindings[7].cpus, range(32, 39));
  for (RankOnNode& rank : ranks) rank.allowed = range(0, 15);
  const auto one_socket = plan_bindings(node, ranks, true);
  EXPECT_FALSE(one_socket[0].bind) << "all of the job's cores are near GPU 0";
  EXPECT_FALSE(one_socket[7].bind) << "none is near GPU 7";
  EXPECT_EQ(one_socket[7].cpus, range(0, 15));
  EXPECT_TRUE(has(node_picture(node, ranks, one_socket, {}), "ranks 4-7 far from the GPU"));
}

TEST(Pinning, KeepsWhatALauncherBound) {
  const NodeTopology node = two_sockets();
  auto ranks = ranks_on(node, 2, true);
  ranks[1].allowed = range(40, 43);
  ranks[1].bound = true;
  auto bindings = plan_bindings(node, ranks, true);
  EXPECT_FALSE(bindings[0].bind || bindings[1].bind);
  EXPECT_EQ(bindings[0].cpus, node.cpus());
  EXPECT_EQ(bindings[1].cpus, range(40, 43));
  const std::string picture = node_picture(node, ranks, bindings, {});
  EXPECT_TRUE(has(picture, "pinning  kept as the launcher bound the ranks"));
  EXPECT_TRUE(has(picture, "rank 1 on CPUs 40-43"));
  EXPECT_TRUE(has(picture, "rank 1 far from the GPU")) << "GPU 1 is at the other socket";

  // Slurm may give each task a control group of its own: nothing is bound within it, and all is said.
  for (int rank = 0; rank < 2; ++rank)
    ranks[static_cast<std::size_t>(rank)] = {range(8 * rank, 8 * rank + 7), false, -1};
  bindings = plan_bindings(node, ranks, true);
  EXPECT_FALSE(bindings[0].bind || bindings[1].bind);
  EXPECT_EQ(bindings[1].cpus, range(8, 15));
}

TEST(Pinning, CpuRanksShareWholeCoresEvenlyAndNumaNodesInOrder) {
  const NodeTopology node = topology_from_xml(synthetic_xml("pack:2 [numa] core:6 pu:2"));
  for (const int count : {2, 3, 5, 8, 12}) {
    const auto bindings = plan_bindings(node, ranks_on(node, count, false), true);
    CpuList all;
    std::size_t fewest = 24, most = 0;
    for (const Binding& binding : bindings) {
      EXPECT_TRUE(binding.bind);
      for (std::size_t i = 0; i < binding.cpus.size(); i += 2) {
        EXPECT_EQ(binding.cpus[i] % 2, 0);
        EXPECT_EQ(binding.cpus[i + 1], binding.cpus[i] + 1) << "both threads of a core, or none";
      }
      all.insert(all.end(), binding.cpus.begin(), binding.cpus.end());
      fewest = std::min(fewest, binding.cpus.size());
      most = std::max(most, binding.cpus.size());
    }
    std::ranges::sort(all);
    EXPECT_EQ(all, node.cpus()) << count << " ranks: each core is some rank's, and of no two";
    EXPECT_LE(most - fewest, 2u);
    if (count % 2 == 0) {
      for (std::size_t rank = 0; rank < bindings.size(); ++rank)
        EXPECT_EQ(node.numa_of(bindings[rank].cpus), 2 * rank < bindings.size() ? 0 : 1);
    }
  }
}

TEST(Pinning, RanksThatOutnumberCoresAreLeftAlone) {
  const NodeTopology node = topology_from_xml(synthetic_xml("pack:1 [numa] core:2 pu:2"));
  const auto ranks = ranks_on(node, 3, false);
  const auto bindings = plan_bindings(node, ranks, true);
  for (const Binding& binding : bindings) {
    EXPECT_FALSE(binding.bind);
    EXPECT_EQ(binding.cpus, node.cpus());
  }
  const std::string picture = node_picture(node, ranks, bindings, {});
  EXPECT_TRUE(has(picture, "3 ranks outnumber 2 cores"));
  EXPECT_TRUE(has(picture, "ranks 0-2 on all CPUs"));
  EXPECT_FALSE(plan_bindings(node, ranks_on(node, 2, false), false)[0].bind) << "run.pin = none";
}

TEST(Pinning, BindsTheProcessAndSaysWhyItCannot) {
  cpu_set_t before;
  ASSERT_EQ(sched_getaffinity(0, sizeof before, &before), 0);
  const CpuList allowed = discover_node().allowed;
  ASSERT_FALSE(allowed.empty());
  EXPECT_EQ(bind_process({allowed.back()}, -1), "");
  EXPECT_EQ(discover_node().allowed, CpuList{allowed.back()});
  EXPECT_TRUE(has(bind_process({4000}, -1), "cannot be pinned: "));
  EXPECT_EQ(sched_setaffinity(0, sizeof before, &before), 0);
}

TEST(NodePicture, ShowsRanksGpusAndLinksWithinTheWidth) {
  const NodeTopology node = two_sockets(56);
  const auto ranks = ranks_on(node, 7, true);
  std::vector<std::vector<GpuLink>> links(8, std::vector<GpuLink>(8, {GpuLink::Kind::kNvlink, 18}));
  links[0][1] = {GpuLink::Kind::kPci, 0};
  links[0][7] = {GpuLink::Kind::kPci, 0};
  links[1][2] = {GpuLink::Kind::kNvlink, 0};
  links[2][3] = {GpuLink::Kind::kHost, 0};
  const std::string picture = node_picture(node, ranks, plan_bindings(node, ranks, true), links);
  EXPECT_TRUE(fits(picture));
  EXPECT_TRUE(has(picture, "2 packages, 2 NUMA nodes, 112 cores (224 hardware threads), 128 GiB\n"));
  EXPECT_TRUE(has(picture, "NUMA 1   package 1, CPUs 112-223, 64.0 GiB\n"));
  EXPECT_TRUE(has(picture, "GPU 5  0000:a0:00.0  rank 5 on CPUs 112-223\n"));
  EXPECT_TRUE(has(picture, "GPU 7  0000:c0:00.0  no rank\n"));
  EXPECT_TRUE(has(picture, "NIC    mlx5_1/ib1\n"));
  EXPECT_TRUE(has(picture, "0       -  PCI NV18 NV18 NV18 NV18 NV18  SYS\n"));
  EXPECT_TRUE(has(picture, "1    NV18    -   NV NV18"));
  EXPECT_TRUE(has(picture, "host: no peer access"));
}

TEST(NodePicture, IsShortAndNarrowWhereManyRanksHaveScatteredCores) {
  std::vector<int> numbers;
  for (int cpu = 0; cpu < 128; ++cpu) numbers.push_back(cpu < 64 ? 2 * cpu : 2 * (cpu - 64) + 1);
  const NodeTopology node = topology_from_xml(
      synthetic_xml(fmt::format("pack:2 [numa] core:64 pu:1(indexes={})", fmt::join(numbers, ",")).c_str()));
  ASSERT_EQ(node.numa[1].cpus[1], 3) << "even processors on the first socket, odd ones on the second";
  for (const int count : {1, 2, 16, 128, 200}) {
    const auto ranks = ranks_on(node, count, false);
    const std::string picture = node_picture(node, ranks, plan_bindings(node, ranks, true), {});
    EXPECT_TRUE(fits(picture));
    EXPECT_LE(std::ranges::count(picture, '\n'), 14);
  }
  const auto two = ranks_on(node, 2, false), many = ranks_on(node, 100, false);
  EXPECT_TRUE(has(node_picture(node, two, plan_bindings(node, two, true), {}), ",... (64)"));
  EXPECT_TRUE(
      has(node_picture(node, many, plan_bindings(node, many, true), {}), "ranks 50-99 on 1 to 2 CPUs each"));
}

TEST(NodePicture, NodesThatLookAlikeAreShownOnce) {
  EXPECT_EQ(show_nodes({{"n1", "P"}}), "  node       n1: P");
  EXPECT_EQ(show_nodes({{"n1", "P"}, {"n2", "Q"}, {"n3", "P"}, {"n4", "P"}}),
            "  node       3 nodes like this, n1 to n4; ranks as numbered on each\n             P\n"
            "  node       n2; ranks as numbered on it\n             Q");
  EXPECT_TRUE(has(show_nodes({{"a", "1"}, {"b", "2"}, {"c", "3"}, {"d", "4"}, {"e", "5"}, {"f", "6"}}),
                  "2 more kinds of nodes"));
}

}  // namespace
}  // namespace octet
