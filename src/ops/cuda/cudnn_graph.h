#pragma once

#include <cudnn.h>

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "handle.h"

namespace octet::cuda {

/// Throws Error(kDevice) with cuDNN's own explanation when a call failed.
void check_cudnn(cudnnStatus_t status, const char* what);

/// A descriptor of cuDNN's backend API: created, given attributes, finalised, destroyed.
class CudnnDescriptor {
 public:
  explicit CudnnDescriptor(cudnnBackendDescriptorType_t type);

  CudnnDescriptor& set(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, std::int64_t count,
                       const void* values);
  CudnnDescriptor& set(cudnnBackendAttributeName_t name, const CudnnDescriptor& value);
  CudnnDescriptor& set(cudnnBackendAttributeName_t name, cudnnDataType_t value);
  CudnnDescriptor& finalize();
  cudnnBackendDescriptor_t get() const { return descriptor_.get(); }

 private:
  struct Destroy {
    void operator()(void* descriptor) const { static_cast<void>(cudnnBackendDestroyDescriptor(descriptor)); }
  };
  std::unique_ptr<void, Destroy> descriptor_;
};

using Extents = std::array<std::int64_t, 4>;

/// One operand of an execution: the number that the graph gave its tensor, and where it lies.
struct CudnnOperand {
  std::int64_t id;
  const void* data;  ///< device memory; host memory for scalars
};

/// A graph's kernels, ready to run.
class CudnnPlan {
 public:
  CudnnPlan(CudnnDescriptor plan, std::int64_t workspace) : plan_(std::move(plan)), workspace_(workspace) {}

  std::int64_t workspace_bytes() const { return workspace_; }
  void execute(cudnnHandle_t handle, const std::vector<CudnnOperand>& operands, void* workspace) const;

 private:
  CudnnDescriptor plan_;
  std::int64_t workspace_;
};

/// Builds a graph of operations on four-dimensional tensors. Arithmetic is float32.
class CudnnGraph {
 public:
  using Tensor = const CudnnDescriptor&;

  /// An operand in device memory.
  Tensor operand(std::int64_t id, cudnnDataType_t type, const Extents& extents, const Extents& strides);
  /// A float32 scalar in host memory.
  Tensor scalar(std::int64_t id) { return scalar(id, CUDNN_DATA_FLOAT); }
  /// A scalar of another type.
  Tensor scalar(std::int64_t id, cudnnDataType_t type);
  /// A value inside the graph, row-major.
  Tensor value(cudnnDataType_t type, const Extents& extents);
  /// The same with strides.
  Tensor value(cudnnDataType_t type, const Extents& extents, const Extents& strides);

  void matmul(Tensor a, Tensor b, Tensor c);
  void unary(cudnnPointwiseMode_t mode, Tensor x, Tensor y);
  void binary(cudnnPointwiseMode_t mode, Tensor x, Tensor b, Tensor y);
  /// y = x + b, int32.
  void add_integers(Tensor x, Tensor b, Tensor y);
  /// y = the position of each element along `axis`, int32.
  void index(std::int64_t axis, Tensor like, Tensor y);
  /// y = whether x >= b, boolean.
  void at_least(Tensor x, Tensor b, Tensor y);
  /// y = whether x < b, boolean.
  void less(Tensor x, Tensor b, Tensor y);
  /// y = x where `mask` is true, else b.
  void select(Tensor x, Tensor b, Tensor mask, Tensor y);
  /// Reduces the dimensions in which y has extent 1, or fewer elements.
  void reduce(cudnnReduceTensorOp_t mode, Tensor x, Tensor y);
  void reshape(Tensor x, Tensor y);

  /// Compiles the graph with the first engine that takes it. Throws Error(kDevice) when none does.
  CudnnPlan build(cudnnHandle_t handle) const;

 private:
  CudnnDescriptor& add_tensor(std::int64_t id, cudnnDataType_t type, const Extents& extents,
                              const Extents& strides);
  CudnnDescriptor& add_pointwise(cudnnPointwiseMode_t mode, cudnnDataType_t precision,
                                 std::int64_t axis = -1);
  void binary(cudnnPointwiseMode_t mode, cudnnDataType_t precision, Tensor x, Tensor b, Tensor y);

  std::deque<CudnnDescriptor> tensors_, modes_, operations_;
  std::int64_t next_id_ = 1000;
};

}  // namespace octet::cuda
