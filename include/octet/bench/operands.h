#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "octet/base/tensor.h"
#include "octet/runtime/device.h"

namespace octet {

/// Repeats `period` over the whole tensor, which it must be of the type of; ends in the middle of one where
/// it does not divide.
void fill_periodic(Device& device, Stream& stream, const Tensor& to, const void* period,
                   std::int64_t elements);

/// Device memory of a measurement, freed together. Random numbers come from the host, so that no operator
/// under test makes its own inputs: those of two objects with one seed, asked for in one order, are equal.
class Operands {
 public:
  /// `rounded`: the type whose numbers all random ones are, also those that are stored wider, so that a
  /// reference can start from the same numbers.
  Operands(Device& device, Stream& stream, std::uint64_t seed, DType rounded)
      : device_(device), stream_(stream), seed_(seed), rounded_(rounded) {}

  Tensor zeros(DType type, std::int64_t rows, std::int64_t cols);
  /// Normal numbers (float32 or bfloat16) that repeat after a prime number of elements.
  Tensor random(DType type, std::int64_t rows, std::int64_t cols, double deviation = 1.0, double mean = 0.0);
  Tensor put(const std::vector<std::int32_t>& values);
  Tensor put(const std::vector<float>& values, std::int64_t rows, std::int64_t cols);

  Device& device() { return device_; }
  Stream& stream() { return stream_; }

 private:
  void* allocate(std::int64_t bytes);

  Device& device_;
  Stream& stream_;
  std::uint64_t seed_;
  DType rounded_;
  std::uint64_t next_ = 0;  ///< number of the next random tensor
  std::vector<std::unique_ptr<Buffer>> buffers_;
};

/// The elements of a float32, bfloat16 or 8-bit tensor, without scales; waits for the stream.
std::vector<float> to_host(Device& device, Stream& stream, const Tensor& tensor);

/// Whether ‖actual - expected‖ <= tolerance·‖expected‖, no element is off by more than 20 tolerances of
/// itself and the usual size of one together, and all are finite.
bool agree(std::span<const float> actual, std::span<const float> expected, double tolerance);

/// What results stored in a type may be off by: the tolerance of `agree`.
constexpr double tolerance_of(DType type) {
  return type == DType::kBF16 ? 1e-2 : 2e-5;
}

}  // namespace octet
