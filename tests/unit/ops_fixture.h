#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "octet/ops/ops.h"
#include "reference/reference_file.h"

namespace octet::test {

/// Which operators a test runs: a backend, and the compute dtype of its activations.
struct OpsCase {
  DeviceKind device = DeviceKind::kCpu;
  DType compute = DType::kF32;
};

inline void PrintTo(const OpsCase& which, std::ostream* out) {
  *out << (which.device == DeviceKind::kCpu ? "CPU, " : "CUDA, ") << name_of(which.compute);
}

/// A matrix in host memory, as tests make and judge it.
struct Matrix {
  std::int64_t rows = 0, cols = 0;
  std::vector<float> values;
  DType dtype = DType::kF32;  ///< what a result was stored in

  Matrix() = default;
  Matrix(std::int64_t row_count, std::int64_t col_count)
      : rows(row_count), cols(col_count), values(static_cast<std::size_t>(row_count * col_count)) {}
  Matrix(const ReferenceMatrix& recorded)
      : rows(recorded.rows), cols(recorded.cols), values(recorded.floats()) {}

  std::int64_t size() const { return rows * cols; }
  float& operator()(std::int64_t row, std::int64_t col) {
    return values[static_cast<std::size_t>(row * cols + col)];
  }
  float operator()(std::int64_t row, std::int64_t col) const {
    return values[static_cast<std::size_t>(row * cols + col)];
  }
};

double dot(const Matrix& a, const Matrix& b);
inline double norm_of(const Matrix& a) {
  return std::sqrt(dot(a, a));
}
/// a + factor · b.
Matrix moved(const Matrix& a, double factor, const Matrix& b);

/// Sums over rows, in float64, added to `start` [1, cols] where that is given.
Matrix column_sums(const Matrix& a, const Matrix* start = nullptr);

/// Success when ‖actual - expected‖ <= tolerance · ‖expected‖ and no single element is far off. Where terms
/// may cancel, `rms` tells the usual size of an element, which then counts if ‖expected‖ happens to be
/// smaller.
testing::AssertionResult close(const Matrix& actual, const Matrix& expected, double tolerance,
                               double rms = 0.0);

/// One backend's device, stream and operators, and the memory of a test's operands.
class Workbench {
 public:
  Workbench(OpsCase which, const Workload& workload, const CudaOpsOptions& options = {});

  DType compute() const { return compute_; }
  Ops& ops() { return *ops_; }
  Stream& stream() { return *stream_; }

  /// Uploads, rounded to the compute dtype or kept as float32.
  Tensor put(const Matrix& matrix) { return put(matrix, compute_); }
  Tensor put_float(const Matrix& matrix) { return put(matrix, DType::kF32); }
  Tensor put(const std::vector<std::int32_t>& values);
  /// An output full of NaN, in the compute dtype or float32.
  Tensor blank(std::int64_t rows, std::int64_t cols) { return poisoned(rows, cols, compute_); }
  Tensor blank_float(std::int64_t rows, std::int64_t cols) { return poisoned(rows, cols, DType::kF32); }
  Tensor blank(std::int64_t rows, std::int64_t cols, DType dtype) { return poisoned(rows, cols, dtype); }
  Matrix get(const Tensor& tensor);

  /// Elements of any type as they are stored.
  template <typename T>
  Tensor put_elements(const std::vector<T>& values) {
    const auto count = static_cast<std::int64_t>(values.size());
    return {upload(values.data(), count * static_cast<std::int64_t>(sizeof(T))), DTypeOf<T>::value, 1, count};
  }
  template <typename T>
  std::vector<T> get_elements(const Tensor& tensor) {
    std::vector<T> values(static_cast<std::size_t>(tensor.size()));
    device_->copy(*stream_, values.data(), tensor.as<T>(), tensor.bytes());
    stream_->synchronize();
    return values;
  }

  StepScalars* put_scalars(const StepScalars& scalars);
  StepScalars get_scalars(const StepScalars* scalars);

 private:
  Tensor put(const Matrix& matrix, DType dtype);
  Tensor poisoned(std::int64_t rows, std::int64_t cols, DType dtype);
  void* upload(const void* from, std::int64_t bytes);

  DType compute_;
  std::unique_ptr<Device> device_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<Ops> ops_;
  std::vector<std::unique_ptr<Buffer>> buffers_;
};

/// The named results of some operators on one workbench.
using Results = std::vector<std::pair<std::string, Matrix>>;

/// Base of all operator tests: skips where the backend is missing, and makes random operands.
class OpsTest : public testing::TestWithParam<OpsCase> {
 protected:
  void SetUp() override;

  DType compute() const { return GetParam().compute; }
  /// Norm-wise relative error of results in the compute dtype, or another.
  double tolerance() const { return tolerance_of(compute()); }
  static double tolerance_of(DType dtype) { return dtype == DType::kF32 ? 1e-5 : 1e-2; }

  /// The operators under test.
  Workbench bench() const { return {GetParam(), workload()}; }
  Workbench bench(const AttentionShape& shape) const;

  /// Normal numbers, exact in the compute dtype.
  Matrix random(std::int64_t rows, std::int64_t cols, double deviation = 1.0, double mean = 0.0);
  std::vector<std::int32_t> random_ids(std::int64_t count, std::int32_t low, std::int32_t high);

  /// Runs on the operators under test and on the float32 CPU reference, and compares all results: those
  /// stored in float32 to 1e-5, since both start from the same numbers.
  void expect_like_reference(const std::string& label, const std::function<Results(Workbench&)>& run) {
    expect_like_reference(label, workload(), run);
  }
  void expect_like_reference(const std::string& label, const Workload& workload,
                             const std::function<Results(Workbench&)>& run);

  /// Expects the slope of loss(step) at 0, by central differences, to be `slope` within 0.3 % of `scale`.
  void expect_slope(const std::string& label, const std::function<double(double)>& loss, double slope,
                    double scale, double step = 1e-2);

  Workload workload() const;
  std::mt19937_64 random_;
};

inline std::string name_of_case(const testing::TestParamInfo<OpsCase>& info) {
  return name_of(info.param.compute);
}

/// Recorded values and finite differences: float32 on every backend.
#define OCTET_TEST_BACKENDS(Suite)                                                                \
  INSTANTIATE_TEST_SUITE_P(Cpu, Suite, testing::Values(OpsCase{DeviceKind::kCpu, DType::kF32}),   \
                           name_of_case);                                                         \
  INSTANTIATE_TEST_SUITE_P(Cuda, Suite, testing::Values(OpsCase{DeviceKind::kCuda, DType::kF32}), \
                           name_of_case)

/// 8-bit copies, which are made of bfloat16.
#define OCTET_TEST_BACKENDS_BF16(Suite)                                                            \
  INSTANTIATE_TEST_SUITE_P(Cpu, Suite, testing::Values(OpsCase{DeviceKind::kCpu, DType::kBF16}),   \
                           name_of_case);                                                          \
  INSTANTIATE_TEST_SUITE_P(Cuda, Suite, testing::Values(OpsCase{DeviceKind::kCuda, DType::kBF16}), \
                           name_of_case)

/// Comparisons with the float32 CPU operators, which therefore are not among the cases.
#define OCTET_TEST_AGAINST_REFERENCE(Suite)                                                               \
  INSTANTIATE_TEST_SUITE_P(Cpu, Suite, testing::Values(OpsCase{DeviceKind::kCpu, DType::kBF16}),          \
                           name_of_case);                                                                 \
  INSTANTIATE_TEST_SUITE_P(                                                                               \
      Cuda, Suite,                                                                                        \
      testing::Values(OpsCase{DeviceKind::kCuda, DType::kF32}, OpsCase{DeviceKind::kCuda, DType::kBF16}), \
      name_of_case)

/// Facts that hold in every dtype on every backend.
#define OCTET_TEST_BACKENDS_AND_TYPES(Suite)                                                              \
  INSTANTIATE_TEST_SUITE_P(                                                                               \
      Cpu, Suite,                                                                                         \
      testing::Values(OpsCase{DeviceKind::kCpu, DType::kF32}, OpsCase{DeviceKind::kCpu, DType::kBF16}),   \
      name_of_case);                                                                                      \
  INSTANTIATE_TEST_SUITE_P(                                                                               \
      Cuda, Suite,                                                                                        \
      testing::Values(OpsCase{DeviceKind::kCuda, DType::kF32}, OpsCase{DeviceKind::kCuda, DType::kBF16}), \
      name_of_case)

}  // namespace octet::test
