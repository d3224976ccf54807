#include "octet/runtime/device_choice.h"

#include <sched.h>

#include <algorithm>
#include <map>

#include "octet/base/error.h"

namespace octet {

int choose_gpu(int visible, int local_rank, int local_size, bool share, const std::string& host) {
  if (visible == 1) return 0;
  if (visible >= local_size) return local_rank;
  if (share && visible > 0) return local_rank % visible;
  fail(ErrorKind::kUsage,
       "{} ranks, {} GPUs on host {}: start at most {} ranks there, or set run.share_gpus = true (slow, for "
       "tests)",
       local_size, visible, host, visible);
}

DeviceChoice open_device(const World& world, const Deck::Run& run) {
  const int visible = run.device == "cpu" ? 0 : cuda_device_count();
  int fewest = visible, most = visible;
  MPI_Allreduce(MPI_IN_PLACE, &fewest, 1, MPI_INT, MPI_MIN, world.ranks());
  MPI_Allreduce(MPI_IN_PLACE, &most, 1, MPI_INT, MPI_MAX, world.ranks());
  DeviceChoice choice;
  world.together([&] {
    if (run.device == "cuda" && visible == 0) {
      fail(ErrorKind::kUsage, "run.device = cuda, but no CUDA device is visible on host {} ({})",
           world.host(), cuda_versions());
    }
    if (fewest == 0 && most > 0) {
      fail(ErrorKind::kUsage,
           "some ranks see up to {} GPUs and others none; host {} shows {}. Set run.device = cpu or mend the "
           "job",
           most, world.host(), visible);
    }
    choice.device = most == 0 ? make_cpu_device()
                              : make_cuda_device(choose_gpu(visible, world.local_rank(), world.local_size(),
                                                            run.share_gpus, world.host()));
  });
  if (choice.device->kind() == DeviceKind::kCpu) return choice;
  const std::string own = world.host() + " " + choice.device->identity();
  std::map<std::string, std::vector<int>> holders;
  const std::vector<std::string> all = world.gather(own);
  for (int rank = 0; rank < world.size(); ++rank)
    holders[all[static_cast<std::size_t>(rank)]].push_back(rank);
  for (const auto& [gpu, ranks] : holders) {
    if (ranks.size() < 2) continue;
    if (!run.share_gpus) {
      fail(ErrorKind::kUsage,
           "ranks {} share one GPU ({}): give each its own, or set run.share_gpus = true (slow, for tests)",
           fmt::join(ranks, ", "), gpu);
    }
    choice.shared = true;
  }
  return choice;
}

void check_fp8(const std::string& recipe, const std::string& device, int compute_capability) {
  constexpr int kTensorScales = 89, kBlockScales = 90;
  if (recipe == "none" || compute_capability == 0) return;
  if (compute_capability < kTensorScales) {
    fail(ErrorKind::kUsage,
         "precision.fp8 = {}: {} (compute capability {}.{}) has no 8-bit float matrix units, which come with "
         "8.9; "
         "allowed here: none",
         recipe, device, compute_capability / 10, compute_capability % 10);
  }
  if (recipe == "block" && compute_capability != kBlockScales) {
    fail(ErrorKind::kUsage,
         "precision.fp8 = block: cuBLASLt takes scales by blocks of 128 on compute capability 9.0; {} has "
         "{}.{}; "
         "allowed here: none, current, delayed",
         device, compute_capability / 10, compute_capability % 10);
  }
}

int cpu_threads(const World& world) {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  const int usable = sched_getaffinity(0, sizeof cores, &cores) == 0 ? CPU_COUNT(&cores) : 1;
  // Bound ranks see their own cores; unbound ones see the node's and share them.
  int least = usable;
  MPI_Allreduce(MPI_IN_PLACE, &least, 1, MPI_INT, MPI_MIN, world.node());
  cpu_set_t united = cores;
  std::vector<unsigned char> bytes(sizeof united);
  std::copy_n(reinterpret_cast<const unsigned char*>(&united), sizeof united, bytes.begin());
  MPI_Allreduce(MPI_IN_PLACE, bytes.data(), static_cast<int>(bytes.size()), MPI_UNSIGNED_CHAR, MPI_BOR,
                world.node());
  std::copy(bytes.begin(), bytes.end(), reinterpret_cast<unsigned char*>(&united));
  return std::max(1, std::min(least, CPU_COUNT(&united) / world.local_size()));
}

}  // namespace octet
