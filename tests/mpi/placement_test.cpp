// Ranks of one node and their cores.
#include <gtest/gtest.h>

#include "octet/runtime/pinning.h"
#include "octet/runtime/rank_placement.h"
#include "octet/runtime/topology.h"

namespace octet {
namespace {

class RankPlacementTest : public testing::Test {
 protected:
  ~RankPlacementTest() override { bind_process(start_.allowed, -1); }

  const ThisNode start_ = discover_node();
  World world_;
  std::unique_ptr<Device> device_ = make_cpu_device();
};

TEST_F(RankPlacementTest, WithoutPinningNoRankMoves) {
  const RankPlacement placement = place_ranks(world_, *device_, false);
  EXPECT_EQ(discover_node().allowed, start_.allowed);
  EXPECT_NE(placement.nodes.find("pinning  none: run.pin = none"), std::string::npos) << placement.nodes;
  EXPECT_TRUE(placement.notes.empty());
}

TEST_F(RankPlacementTest, RanksShareTheCoresWhereTheseSufficeAndElseStay) {
  const RankPlacement placement = place_ranks(world_, *device_, true);
  const CpuList now = discover_node().allowed;
  EXPECT_EQ(common_cpus(now, start_.allowed), now) << "nothing is widened";
  const bool bound = start_.allowed != start_.group;
  std::vector<CpuList> sets;
  for (const std::string& text : world_.gather(cpu_list_text(now))) sets.push_back(parse_cpu_list(text));
  std::size_t cores = 0;
  for (const CpuList& core : start_.topology.cores)
    cores += common_cpus(core, start_.allowed).empty() ? 0 : 1;
  if (bound || static_cast<std::size_t>(world_.local_size()) > cores || world_.local_size() == 1) {
    EXPECT_EQ(now, start_.allowed);
  } else {
    for (int rank = 0; rank < world_.size(); ++rank) {
      const CpuList& other = sets[static_cast<std::size_t>(rank)];
      if (rank == world_.rank()) continue;
      EXPECT_TRUE(common_cpus(now, other).empty()) << cpu_list_text(now) << " and " << cpu_list_text(other);
    }
    EXPECT_FALSE(now.empty());
  }
  for (const std::string& nodes : world_.gather(placement.nodes)) EXPECT_EQ(nodes, placement.nodes);
  EXPECT_NE(placement.nodes.find("  node       " + world_.host() + ": "), std::string::npos)
      << placement.nodes;
}

}  // namespace
}  // namespace octet
