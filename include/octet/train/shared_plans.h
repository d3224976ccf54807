#pragma once

#include <filesystem>
#include <string>

#include "octet/config/deck.h"
#include "octet/ops/plan_cache.h"
#include "octet/runtime/device.h"
#include "octet/runtime/world.h"

namespace octet {

/// The run's timed plans of matrix products (run.tune_matmul), the same on all ranks: all begin with what
/// rank 0 reads from its file, and agree on what any rank times later.
class SharedPlans {
 public:
  /// Collective. Nothing is read unless the deck and the kind of device want timed plans.
  SharedPlans(const World& world, const Deck::Run& run, DeviceKind device);

  /// nullptr where products are not to be timed nor their choices remembered.
  PlanCache* cache() { return active_ ? &cache_ : nullptr; }
  /// Whether new products are timed; not with run.deterministic, where only remembered plans are used.
  bool times() const { return active_ && !deterministic_; }

  /// Collective, after ranks timed products: all take the same plans, and one rank a node writes them to its
  /// file. Returns what happened, in words.
  std::string agree();
  /// What the file gave, in words; empty where none was wanted.
  const std::string& note() const { return note_; }

 private:
  const World& world_;
  bool active_, deterministic_;
  std::filesystem::path file_;  ///< empty: none
  PlanCache cache_;
  std::string note_;
};

}  // namespace octet
