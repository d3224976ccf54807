#pragma once

#include <vector>

#include "octet/base/tensor.h"
#include "octet/runtime/device.h"

namespace octet {

/// Known messages: element i of rank r's is a hash of both, a whole number from -2 to 2, so that sums are
/// exact in bfloat16 up to 128 ranks. Repeats after a prime number of elements.
class MessagePattern {
 public:
  MessagePattern(Device& device, Stream& stream, int ranks, DType type);

  /// to[i] = element first + i of `rank`.
  void fill(const Tensor& to, int rank, std::int64_t first);
  /// Whether that is what a tensor holds, in every element; waits for the stream.
  bool is(const Tensor& values, int rank, std::int64_t first);
  /// The same for the sum over all ranks.
  bool is_sum(const Tensor& values, std::int64_t first);

 private:
  bool compare(const Tensor& values, const std::vector<float>& expected, std::int64_t first, float tolerance);

  Device& device_;
  Stream& stream_;
  DType type_;
  std::vector<std::vector<float>> ranks_;  ///< one period of each
  std::vector<float> sum_;
};

}  // namespace octet
