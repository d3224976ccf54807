#include "octet/runtime/node_picture.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <map>

namespace octet {
namespace {

constexpr std::size_t kMostKinds = 4;     ///< of nodes, of which pictures are shown
constexpr std::size_t kMostGpus = 16;     ///< that a matrix of links has room for
constexpr std::size_t kLongestList = 36;  ///< bytes of a list of processors
constexpr std::size_t kMostSeparate = 8;  ///< sets of processors of a NUMA node shown each by itself
constexpr double kGiB = 1024.0 * 1024.0 * 1024.0;
const std::string kIndent(13, ' ');

std::string counted(std::size_t count, const char* what) {
  return fmt::format("{} {}{}", count, what, count == 1 ? "" : "s");
}

std::string gib(std::int64_t bytes) {
  const double size = static_cast<double>(bytes) / kGiB;
  return size < 100 ? fmt::format("{:.1f} GiB", size) : fmt::format("{:.0f} GiB", size);
}

/// "CPUs 0-3"; of a list that is too long its beginning and how many there are.
std::string cpus_text(const CpuList& cpus) {
  std::string list = cpu_list_text(cpus);
  if (list.size() > kLongestList) {
    list = fmt::format("{},... ({})", list.substr(0, list.rfind(',', kLongestList - 12)), cpus.size());
  }
  return fmt::format("CPU{} {}", cpus.size() == 1 ? "" : "s", list);
}

class Picture {
 public:
  Picture(const NodeTopology& node, const std::vector<RankOnNode>& ranks,
          const std::vector<Binding>& bindings)
      : node_(node), ranks_(ranks), bindings_(bindings) {}

  std::string draw(const std::vector<std::vector<GpuLink>>& links) {
    heading();
    for (int numa = 0; numa < static_cast<int>(node_.numa.size()); ++numa) numa_node(numa);
    devices(-1);
    ranks_without_gpu(-1, kIndent);
    if (links.size() > 1) matrix(links);
    pinning();
    text_.pop_back();  // the last line's end
    return text_;
  }

 private:
  void line(const std::string& text) { text_ += text + "\n"; }

  void heading() {
    if (node_.cores.empty()) return line("topology not known");
    const std::size_t threads = node_.cpus().size();
    std::int64_t memory = 0;
    for (const NumaNode& numa : node_.numa) memory += numa.memory;
    line(fmt::format("{}, {}, {}{}, {}", counted(static_cast<std::size_t>(node_.packages), "package"),
                     counted(node_.numa.size(), "NUMA node"), counted(node_.cores.size(), "core"),
                     threads > node_.cores.size() ? fmt::format(" ({} hardware threads)", threads) : "",
                     gib(memory)));
    CpuList usable;
    for (const RankOnNode& rank : ranks_) {
      CpuList sum;
      std::ranges::set_union(usable, rank.allowed, std::back_inserter(sum));
      usable = std::move(sum);
    }
    if (usable != node_.cpus())
      line(fmt::format("{}of these the ranks may use {}", kIndent, cpus_text(usable)));
  }

  void numa_node(int index) {
    const NumaNode& numa = node_.numa[static_cast<std::size_t>(index)];
    line(fmt::format("    NUMA {:<3} package {}, {}, {}", numa.number, numa.package,
                     numa.cpus.empty() ? "no CPUs" : cpus_text(numa.cpus), gib(numa.memory)));
    devices(index);
    ranks_without_gpu(index, kIndent);
  }

  void devices(int numa) {
    for (std::size_t i = 0; i < node_.gpus.size(); ++i) {
      const PciDevice& gpu = node_.gpus[i];
      if (gpu.numa == numa)
        line(
            wrapped(fmt::format("{}GPU {:<2} {}  ", kIndent, i, gpu.address), ranks_of(static_cast<int>(i))));
    }
    std::vector<std::string> names;
    for (const PciDevice& nic : node_.nics) {
      if (nic.numa == numa) names.push_back(nic.name);
    }
    if (!names.empty()) line(wrapped(kIndent + "NIC    ", names));
  }

  /// Ranks of a GPU; several share it in tests only.
  std::vector<std::string> ranks_of(int gpu) const {
    std::vector<std::string> items;
    for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
      if (ranks_[rank].gpu == gpu)
        items.push_back(fmt::format("rank {} on {}", rank, runs_on(bindings_[rank].cpus)));
    }
    if (items.empty()) items.emplace_back("no rank");
    return separated(std::move(items));
  }

  /// Ranks without a GPU whose processors lie in one NUMA node, or (-1) in several.
  void ranks_without_gpu(int numa, const std::string& indent) {
    std::map<CpuList, std::vector<int>> groups;
    for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
      if (ranks_[rank].gpu < 0 && node_.numa_of(bindings_[rank].cpus) == numa)
        groups[bindings_[rank].cpus].push_back(static_cast<int>(rank));
    }
    if (groups.size() > kMostSeparate) return line(indent + summary(groups));
    std::vector<std::string> items;
    for (const auto& [cpus, ranks] : groups)
      items.push_back(fmt::format("{} on {}", ranks_text(ranks), runs_on(cpus)));
    if (!items.empty()) line(wrapped(indent, separated(std::move(items))));
  }

  /// "ranks 0-63 on 1 CPU each".
  static std::string summary(const std::map<CpuList, std::vector<int>>& groups) {
    std::vector<int> all;
    std::size_t fewest = groups.begin()->first.size(), most = fewest;
    for (const auto& [cpus, ranks] : groups) {
      all.insert(all.end(), ranks.begin(), ranks.end());
      fewest = std::min(fewest, cpus.size());
      most = std::max(most, cpus.size());
    }
    std::ranges::sort(all);
    return fmt::format("{} on {}{} each", ranks_text(all), fewest < most ? fmt::format("{} to ", fewest) : "",
                       counted(most, "CPU"));
  }

  std::string runs_on(const CpuList& cpus) const {
    return cpus == node_.cpus() ? "all CPUs" : cpus_text(cpus);
  }

  static std::vector<std::string> separated(std::vector<std::string> items) {
    for (std::size_t i = 0; i + 1 < items.size(); ++i) items[i] += ";";
    return items;
  }

  const char* label(const GpuLink& link, std::size_t from, std::size_t to) const {
    if (link.kind == GpuLink::Kind::kUnknown) return "?";
    if (link.kind == GpuLink::Kind::kHost) return "host";
    const int a = node_.gpus[from].numa, b = node_.gpus[to].numa;
    const bool across =
        a >= 0 && b >= 0 &&
        node_.numa[static_cast<std::size_t>(a)].package != node_.numa[static_cast<std::size_t>(b)].package;
    return across ? "SYS" : "PCI";
  }

  void matrix(const std::vector<std::vector<GpuLink>>& links) {
    const std::size_t size = std::min(links.size(), kMostGpus);
    std::string row = "    links    GPU ";
    for (std::size_t i = 0; i < size; ++i) row += fmt::format("{:>5}", i);
    line(row);
    std::map<std::string, const char*> legend;
    for (std::size_t from = 0; from < size; ++from) {
      row = fmt::format("{}{:<4}", kIndent, from);
      for (std::size_t to = 0; to < size; ++to) {
        const GpuLink& link = links[from][to];
        std::string cell = "-";
        if (from != to && link.kind == GpuLink::Kind::kNvlink) {
          cell = link.nvlinks > 0 ? fmt::format("NV{}", link.nvlinks) : "NV";
          legend["NV"] = link.nvlinks > 0 ? "NVn: n NVLinks" : "NV: NVLink";
        } else if (from != to) {
          cell = label(link, from, to);
          legend[cell] = explain(cell);
        }
        row += fmt::format("{:>5}", cell);
      }
      line(row);
    }
    std::vector<std::string> meanings;
    for (const auto& [cell, meaning] : legend) meanings.emplace_back(meaning);
    line(wrapped(kIndent, separated(std::move(meanings))));
  }

  static const char* explain(const std::string& cell) {
    if (cell == "PCI") return "PCI: PCI Express";
    if (cell == "SYS") return "SYS: PCI Express and between packages";
    return cell == "host" ? "host: no peer access, through host memory" : "?: not known";
  }

  void pinning() {
    std::map<std::string, std::vector<int>> reasons;
    for (std::size_t rank = 0; rank < bindings_.size(); ++rank)
      reasons[bindings_[rank].reason].push_back(static_cast<int>(rank));
    for (const auto& [reason, ranks] : reasons) {
      line(fmt::format("    pinning  {}{}", reasons.size() > 1 ? ranks_text(ranks) + " " : "", reason));
    }
    std::vector<int> far;
    for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
      const int gpu = ranks_[rank].gpu;
      const CpuList& near = gpu < 0 ? CpuList() : node_.gpus[static_cast<std::size_t>(gpu)].cpus;
      if (!near.empty() && common_cpus(near, bindings_[rank].cpus).empty())
        far.push_back(static_cast<int>(rank));
    }
    if (!far.empty())
      line(fmt::format("{}{} far from the GPU: on no CPU of its NUMA node", kIndent, ranks_text(far)));
  }

  const NodeTopology& node_;
  const std::vector<RankOnNode>& ranks_;
  const std::vector<Binding>& bindings_;
  std::string text_;
};

}  // namespace

std::string node_picture(const NodeTopology& node, const std::vector<RankOnNode>& ranks,
                         const std::vector<Binding>& bindings,
                         const std::vector<std::vector<GpuLink>>& links) {
  return Picture(node, ranks, bindings).draw(links);
}

std::string show_nodes(const std::vector<std::pair<std::string, std::string>>& nodes) {
  struct Kind {
    std::string picture;
    std::vector<std::string> hosts;
  };
  std::vector<Kind> kinds;
  for (const auto& [host, picture] : nodes) {
    auto like = std::ranges::find(kinds, picture, &Kind::picture);
    if (like == kinds.end()) like = kinds.insert(kinds.end(), {picture, {}});
    like->hosts.push_back(host);
  }
  std::string text;
  for (std::size_t i = 0; i < std::min(kinds.size(), kMostKinds); ++i) {
    const auto& [picture, hosts] = kinds[i];
    text += i > 0 ? "\n  node       " : "  node       ";
    if (nodes.size() == 1) {
      text += hosts.front() + ": ";
    } else if (hosts.size() == 1) {
      text += fmt::format("{}; ranks as numbered on it\n{}", hosts.front(), kIndent);
    } else {
      text += fmt::format("{} nodes like this, {} to {}; ranks as numbered on each\n{}", hosts.size(),
                          hosts.front(), hosts.back(), kIndent);
    }
    text += picture;
  }
  if (kinds.size() > kMostKinds)
    text += fmt::format("\n  node       {} more kinds of nodes", kinds.size() - kMostKinds);
  return text;
}

}  // namespace octet
