#include "ops_fixture.h"
#include "support/seed.h"

#include <algorithm>
#include <cstring>

namespace octet::test {

double dot(const Matrix& a, const Matrix& b) {
  double total = 0.0;
  for (std::size_t i = 0; i < a.values.size(); ++i) total += double{a.values[i]} * double{b.values[i]};
  return total;
}

Matrix moved(const Matrix& a, double factor, const Matrix& b) {
  Matrix result = a;
  for (std::size_t i = 0; i < a.values.size(); ++i) {
    result.values[i] = static_cast<float>(double{a.values[i]} + factor * double{b.values[i]});
  }
  return result;
}

Matrix column_sums(const Matrix& a, const Matrix* start) {
  Matrix sums(1, a.cols);
  for (std::int64_t col = 0; col < a.cols; ++col) {
    double total = start == nullptr ? 0.0 : (*start)(0, col);
    for (std::int64_t row = 0; row < a.rows; ++row) total += double{a(row, col)};
    sums(0, col) = static_cast<float>(total);
  }
  return sums;
}

testing::AssertionResult close(const Matrix& actual, const Matrix& expected, double tolerance, double rms) {
  if (actual.rows != expected.rows || actual.cols != expected.cols) {
    return testing::AssertionFailure() << fmt::format("shape [{}, {}], expected [{}, {}]", actual.rows,
                                                      actual.cols, expected.rows, expected.cols);
  }
  const double root = std::sqrt(std::max(1.0, static_cast<double>(expected.size())));
  rms = std::max(rms, norm_of(expected) / root);
  const double scale = rms * root;
  double square = 0.0, worst_excess = -1.0;
  std::size_t worst = 0, not_finite = 0;
  for (std::size_t i = 0; i < expected.values.size(); ++i) {
    const double difference = double{actual.values[i]} - double{expected.values[i]};
    if (!std::isfinite(difference)) {
      if (not_finite++ == 0) worst = i;
      continue;
    }
    square += difference * difference;
    const double excess = std::abs(difference) / (rms + std::abs(double{expected.values[i]}) + 1e-30);
    if (not_finite == 0 && excess > worst_excess) {
      worst_excess = excess;
      worst = i;
    }
  }
  const double error = std::sqrt(square);
  constexpr double kElementSlack = 20.0;
  if (not_finite == 0 && error <= tolerance * scale && worst_excess <= kElementSlack * tolerance) {
    return testing::AssertionSuccess();
  }
  const auto cols = static_cast<std::size_t>(std::max<std::int64_t>(1, expected.cols));
  return testing::AssertionFailure() << fmt::format(
             "[{}, {}]: relative error {:.3g} (allowed {:.3g}), {} elements not finite; worst at ({}, {}): "
             "{} expected "
             "{}",
             expected.rows, expected.cols, error / scale, tolerance, not_finite, worst / cols, worst % cols,
             expected.values.empty() ? 0.0f : actual.values[worst],
             expected.values.empty() ? 0.0f : expected.values[worst]);
}

Workbench::Workbench(OpsCase which, const Workload& workload, const CudaOpsOptions& options)
    : compute_(which.compute) {
  const bool cpu = which.device == DeviceKind::kCpu;
  device_ = cpu ? make_cpu_device() : make_cuda_device(0);
  stream_ = device_->make_stream();
  ops_ = cpu ? make_cpu_ops(2) : make_cuda_ops(*device_, options);
  Workload own = workload;
  own.compute = compute_;
  ops_->prepare(own);
}

void* Workbench::upload(const void* from, std::int64_t bytes) {
  buffers_.push_back(device_->allocate(std::max<std::int64_t>(bytes, 1), "a test operand"));
  device_->copy(*stream_, buffers_.back()->data(), from, bytes);
  stream_->synchronize();
  return buffers_.back()->data();
}

Tensor Workbench::put(const Matrix& matrix, DType dtype) {
  if (dtype == DType::kF32) {
    return {upload(matrix.values.data(), matrix.size() * size_of(dtype)), dtype, matrix.rows, matrix.cols};
  }
  std::vector<BF16> narrow;
  narrow.reserve(matrix.values.size());
  for (const float value : matrix.values) narrow.emplace_back(value);
  return {upload(narrow.data(), matrix.size() * size_of(dtype)), dtype, matrix.rows, matrix.cols};
}

Tensor Workbench::put(const std::vector<std::int32_t>& values) {
  const auto count = static_cast<std::int64_t>(values.size());
  return {upload(values.data(), count * size_of(DType::kI32)), DType::kI32, 1, count};
}

Tensor Workbench::poisoned(std::int64_t rows, std::int64_t cols, DType dtype) {
  const std::vector<std::uint8_t> ones(static_cast<std::size_t>(rows * cols * size_of(dtype)),
                                       0xff);  // NaN in all types
  return {upload(ones.data(), rows * cols * size_of(dtype)), dtype, rows, cols};
}

Matrix Workbench::get(const Tensor& tensor) {
  Matrix matrix(tensor.rows, tensor.cols);
  matrix.dtype = tensor.dtype;
  std::vector<std::uint8_t> bytes(static_cast<std::size_t>(tensor.bytes()));
  device_->copy(*stream_, bytes.data(), tensor.data, tensor.bytes());
  stream_->synchronize();
  if (tensor.dtype == DType::kF32) {
    std::memcpy(matrix.values.data(), bytes.data(), bytes.size());
    return matrix;
  }
  const auto widen = [&](auto zero) {
    std::vector<decltype(zero)> narrow(matrix.values.size());
    std::memcpy(narrow.data(), bytes.data(), bytes.size());
    std::transform(narrow.begin(), narrow.end(), matrix.values.begin(),
                   [](auto x) { return static_cast<float>(x); });
  };
  switch (tensor.dtype) {
    case DType::kE4M3:
      widen(E4M3{});
      break;
    case DType::kE5M2:
      widen(E5M2{});
      break;
    default:
      widen(BF16{});
  }
  return matrix;
}

StepScalars* Workbench::put_scalars(const StepScalars& scalars) {
  return static_cast<StepScalars*>(upload(&scalars, sizeof scalars));
}

StepScalars Workbench::get_scalars(const StepScalars* scalars) {
  StepScalars result;
  device_->copy(*stream_, &result, scalars, sizeof result);
  stream_->synchronize();
  return result;
}

void OpsTest::SetUp() {
  if (GetParam().device == DeviceKind::kCuda && cuda_device_count() == 0) {
    const char* required = std::getenv("OCTET_REQUIRE_GPU");
    if (required != nullptr && std::string(required) == "1") {
      FAIL() << "OCTET_REQUIRE_GPU=1, but there is no CUDA device (" << cuda_versions() << ")";
    }
    GTEST_SKIP() << "no CUDA device (" << cuda_versions() << ")";
  }
  const std::uint64_t seed = test_seed();
  random_.seed(seed);
  RecordProperty("OCTET_TEST_SEED", std::to_string(seed));
}

Workload OpsTest::workload() const {
  Workload result;
  result.compute = compute();
  result.tokens = 2048;
  result.widest = 16384;
  result.attention = {{4, 2, 64, 2, 0}, 2, 64, 0.125f};
  return result;
}

Workbench OpsTest::bench(const AttentionShape& shape) const {
  Workload own = workload();
  own.attention = shape;
  return {GetParam(), own};
}

Matrix OpsTest::random(std::int64_t rows, std::int64_t cols, double deviation, double mean) {
  std::normal_distribution<double> normal(mean, deviation);
  Matrix matrix(rows, cols);
  for (float& value : matrix.values) {
    value = static_cast<float>(normal(random_));
    if (compute() == DType::kBF16) value = static_cast<float>(BF16(value));
  }
  return matrix;
}

std::vector<std::int32_t> OpsTest::random_ids(std::int64_t count, std::int32_t low, std::int32_t high) {
  std::uniform_int_distribution<std::int32_t> uniform(low, high);
  std::vector<std::int32_t> ids(static_cast<std::size_t>(count));
  std::generate(ids.begin(), ids.end(), [&] { return uniform(random_); });
  return ids;
}

void OpsTest::expect_like_reference(const std::string& label, const Workload& workload,
                                    const std::function<Results(Workbench&)>& run) {
  Workbench tested(GetParam(), workload);
  Workbench reference({DeviceKind::kCpu, DType::kF32}, workload);
  const Results actual = run(tested), expected = run(reference);
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t i = 0; i < actual.size(); ++i) {
    const double allowed = tolerance_of(actual[i].second.dtype);
    EXPECT_TRUE(close(actual[i].second, expected[i].second, allowed)) << label << ": " << actual[i].first;
  }
}

void OpsTest::expect_slope(const std::string& label, const std::function<double(double)>& loss, double slope,
                           double scale, double step) {
  const double measured = (loss(step) - loss(-step)) / (2.0 * step);
  EXPECT_NEAR(slope, measured, 3e-3 * scale) << label << ": gradient against central differences";
}

}  // namespace octet::test
