#pragma once

#include <string>
#include <utility>
#include <vector>

#include "octet/runtime/pinning.h"
#include "octet/runtime/report_text.h"
#include "octet/runtime/topology.h"

namespace octet {

/// A node as text: NUMA nodes with their processors, GPUs, network interfaces, ranks (by their number on the
/// node), how GPUs are linked (`links` may be empty), and how ranks are pinned. Lines of at most
/// kReportColumns bytes, without a name of the node, so that nodes which look alike have the same text.
std::string node_picture(const NodeTopology& node, const std::vector<RankOnNode>& ranks,
                         const std::vector<Binding>& bindings,
                         const std::vector<std::vector<GpuLink>>& links);

/// The pictures of several nodes, given with their hosts' names: nodes that look alike once, and of many
/// kinds the first few.
std::string show_nodes(const std::vector<std::pair<std::string, std::string>>& nodes);

}  // namespace octet
