#include "octet/bench/operands.h"

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "octet/base/rng.h"

namespace octet {

namespace {

constexpr std::int64_t kPeriod = 65537;  ///< prime, so that rows of a matrix differ

}  // namespace

void fill_periodic(Device& device, Stream& stream, const Tensor& to, const void* period,
                   std::int64_t elements) {
  const std::int64_t bytes = to.bytes(), first = std::min(bytes, elements * size_of(to.dtype));
  auto* const data = static_cast<std::byte*>(to.data);
  device.copy(stream, data, period, first);
  for (std::int64_t done = first; done < bytes;) {
    const std::int64_t part = std::min(done, bytes - done);
    device.copy(stream, data + done, data, part);
    done += part;
  }
  stream.synchronize();  // `period` is ordinary memory
}

void* Operands::allocate(std::int64_t bytes) {
  buffers_.push_back(device_.allocate(std::max<std::int64_t>(bytes, 1), "measurements"));
  return buffers_.back()->data();
}

Tensor Operands::zeros(DType type, std::int64_t rows, std::int64_t cols) {
  return {allocate(rows * cols * size_of(type)), type, rows, cols};
}

Tensor Operands::random(DType type, std::int64_t rows, std::int64_t cols, double deviation, double mean) {
  const Tensor tensor = zeros(type, rows, cols);
  const std::uint64_t key = mix(seed_, next_++);
  std::vector<float> wide(static_cast<std::size_t>(std::min(kPeriod, tensor.size())));
  std::vector<BF16> narrow(wide.size());
  for (std::size_t i = 0; i < wide.size(); ++i) {
    wide[i] = static_cast<float>(mean + deviation * normal_at(key, i));
    narrow[i] = BF16(wide[i]);
    if (rounded_ == DType::kBF16) wide[i] = static_cast<float>(narrow[i]);
  }
  const void* const period = type == DType::kBF16 ? static_cast<const void*>(narrow.data()) : wide.data();
  fill_periodic(device_, stream_, tensor, period, static_cast<std::int64_t>(wide.size()));
  return tensor;
}

Tensor Operands::put(const std::vector<std::int32_t>& values) {
  const Tensor tensor = zeros(DType::kI32, 1, static_cast<std::int64_t>(values.size()));
  device_.copy(stream_, tensor.data, values.data(), tensor.bytes());
  stream_.synchronize();
  return tensor;
}

Tensor Operands::put(const std::vector<float>& values, std::int64_t rows, std::int64_t cols) {
  const Tensor tensor = zeros(DType::kF32, rows, cols);
  OCTET_ASSERT(static_cast<std::int64_t>(values.size()) == rows * cols);
  device_.copy(stream_, tensor.data, values.data(), tensor.bytes());
  stream_.synchronize();
  return tensor;
}

namespace {

template <typename T>
std::vector<float> read(Device& device, Stream& stream, const Tensor& tensor) {
  std::vector<T> stored(static_cast<std::size_t>(tensor.size()));
  device.copy(stream, stored.data(), tensor.data, tensor.bytes());
  stream.synchronize();
  if constexpr (std::is_same_v<T, float>) return stored;
  std::vector<float> values(stored.size());
  std::transform(stored.begin(), stored.end(), values.begin(), [](T x) { return static_cast<float>(x); });
  return values;
}

}  // namespace

std::vector<float> to_host(Device& device, Stream& stream, const Tensor& tensor) {
  switch (tensor.dtype) {
    case DType::kF32:
      return read<float>(device, stream, tensor);
    case DType::kBF16:
      return read<BF16>(device, stream, tensor);
    case DType::kE4M3:
      return read<E4M3>(device, stream, tensor);
    case DType::kE5M2:
      return read<E5M2>(device, stream, tensor);
    default:
      break;
  }
  OCTET_ASSERT(!"a type that no measurement reads");
  return {};
}

bool agree(std::span<const float> actual, std::span<const float> expected, double tolerance) {
  constexpr double kElementSlack = 20.0;
  if (actual.size() != expected.size()) return false;
  double square = 0.0, error = 0.0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const double difference = double{actual[i]} - double{expected[i]};
    if (!std::isfinite(difference)) return false;
    square += double{expected[i]} * double{expected[i]};
    error += difference * difference;
  }
  if (std::sqrt(error) > tolerance * std::sqrt(square)) return false;
  const double usual = std::sqrt(square / static_cast<double>(std::max<std::size_t>(expected.size(), 1)));
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const double difference = std::abs(double{actual[i]} - double{expected[i]});
    if (difference > kElementSlack * tolerance * (usual + std::abs(double{expected[i]}))) return false;
  }
  return true;
}

}  // namespace octet
