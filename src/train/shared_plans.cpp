#include "octet/train/shared_plans.h"

#include <fmt/format.h>

namespace octet {

SharedPlans::SharedPlans(const World& world, const Deck::Run& run, DeviceKind device)
    : world_(world),
      active_(run.tune_matmul && device == DeviceKind::kCuda),
      deterministic_(run.deterministic) {
  if (!active_) return;
  if (world.local_rank() == 0) file_ = plan_cache_file(run.tune_cache, run.directory);
  const std::string name = file_.empty() ? "no file" : file_.string();
  const std::string text = world.gather(world.rank() == 0 ? read_plan_file(file_) : "").front();
  if (text.empty()) {
    note_ = fmt::format("timed matrix products: none remembered in {}", name);
  } else if (cache_.take(text)) {
    note_ = fmt::format("timed matrix products: remembered in {}", name);
  } else {
    note_ = fmt::format("timed matrix products: {} is damaged or of another version, and ignored", name);
  }
}

std::string SharedPlans::agree() {
  cache_.agree(world_.gather(cache_.added_text()));
  std::string result = fmt::format("timed matrix products: {} chosen anew", cache_.added());
  if (cache_.added() == 0 || file_.empty()) return result;
  const std::string problem = cache_.save(file_);
  return result + (problem.empty() ? fmt::format(", written to {}", file_.string()) : "; " + problem);
}

}  // namespace octet
