#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <functional>
#include <optional>

namespace octet::cuda {

struct FastestLaunch {
  std::size_t number = 0;
  double microseconds = 0.0;  ///< median of one launch
};

/// Which of `count` ways to do the same work is the fastest. launch(i) queues the work done in way i and says
/// whether it could. Those near the fastest are timed in turns, several times each, since a GPU's clock
/// drifts; the first is preferred unless another is clearly faster. Waits for the stream. Nothing where no
/// way could be launched.
std::optional<FastestLaunch> find_fastest(cudaStream_t stream, std::size_t count,
                                          const std::function<bool(std::size_t)>& launch);

}  // namespace octet::cuda
