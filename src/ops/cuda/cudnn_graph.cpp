#include "cudnn_graph.h"

#include "octet/base/error.h"

namespace octet::cuda {
namespace {

constexpr std::int64_t kAlignment = 16;  // bytes, of every operand

// The attributes that tie a graph and a plan to a handle are marked as deprecated in newer headers, where the
// handle is optional; older versions require them.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
constexpr cudnnBackendAttributeName_t kGraphHandle = CUDNN_ATTR_OPERATIONGRAPH_HANDLE;
constexpr cudnnBackendAttributeName_t kPlanHandle = CUDNN_ATTR_EXECUTION_PLAN_HANDLE;
#pragma GCC diagnostic pop

Extents row_major(const Extents& extents) {
  return {extents[1] * extents[2] * extents[3], extents[2] * extents[3], extents[3], 1};
}

std::vector<cudnnBackendDescriptor_t> pointers(const std::deque<CudnnDescriptor>& descriptors) {
  std::vector<cudnnBackendDescriptor_t> result;
  for (const CudnnDescriptor& descriptor : descriptors) result.push_back(descriptor.get());
  return result;
}

}  // namespace

void check_cudnn(cudnnStatus_t status, const char* what) {
  if (status == CUDNN_STATUS_SUCCESS) return;
  char reason[512] = "";
  cudnnGetLastErrorString(reason, sizeof reason);
  fail(ErrorKind::kDevice, "cuDNN: {} in {}: {}", cudnnGetErrorString(status), what, reason);
}

CudnnDescriptor::CudnnDescriptor(cudnnBackendDescriptorType_t type) {
  cudnnBackendDescriptor_t created = nullptr;
  check_cudnn(cudnnBackendCreateDescriptor(type, &created), "cudnnBackendCreateDescriptor");
  descriptor_.reset(created);
}

CudnnDescriptor& CudnnDescriptor::set(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type,
                                      std::int64_t count, const void* values) {
  check_cudnn(cudnnBackendSetAttribute(descriptor_.get(), name, type, count, values),
              "cudnnBackendSetAttribute");
  return *this;
}

CudnnDescriptor& CudnnDescriptor::set(cudnnBackendAttributeName_t name, const CudnnDescriptor& value) {
  const cudnnBackendDescriptor_t pointer = value.get();
  return set(name, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &pointer);
}

CudnnDescriptor& CudnnDescriptor::set(cudnnBackendAttributeName_t name, cudnnDataType_t value) {
  return set(name, CUDNN_TYPE_DATA_TYPE, 1, &value);
}

CudnnDescriptor& CudnnDescriptor::finalize() {
  check_cudnn(cudnnBackendFinalize(descriptor_.get()), "cudnnBackendFinalize");
  return *this;
}

void CudnnPlan::execute(cudnnHandle_t handle, const std::vector<CudnnOperand>& operands,
                        void* workspace) const {
  std::vector<std::int64_t> ids;
  std::vector<const void*> data;
  for (const CudnnOperand& operand : operands) {
    ids.push_back(operand.id);
    data.push_back(operand.data);
  }
  const auto count = static_cast<std::int64_t>(operands.size());
  CudnnDescriptor pack(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);
  pack.set(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, count, ids.data());
  pack.set(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, count, data.data());
  pack.set(CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, 1, &workspace);
  pack.finalize();
  check_cudnn(cudnnBackendExecute(handle, plan_.get(), pack.get()), "cudnnBackendExecute");
}

CudnnDescriptor& CudnnGraph::add_tensor(std::int64_t id, cudnnDataType_t type, const Extents& extents,
                                        const Extents& strides) {
  CudnnDescriptor& tensor = tensors_.emplace_back(CUDNN_BACKEND_TENSOR_DESCRIPTOR);
  tensor.set(CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, 1, &id);
  tensor.set(CUDNN_ATTR_TENSOR_DATA_TYPE, type);
  tensor.set(CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, 4, extents.data());
  tensor.set(CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, 4, strides.data());
  tensor.set(CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, 1, &kAlignment);
  return tensor;
}

CudnnGraph::Tensor CudnnGraph::operand(std::int64_t id, cudnnDataType_t type, const Extents& extents,
                                       const Extents& strides) {
  return add_tensor(id, type, extents, strides).finalize();
}

CudnnGraph::Tensor CudnnGraph::scalar(std::int64_t id, cudnnDataType_t type) {
  const bool by_value = true;
  return add_tensor(id, type, {1, 1, 1, 1}, {1, 1, 1, 1})
      .set(CUDNN_ATTR_TENSOR_IS_BY_VALUE, CUDNN_TYPE_BOOLEAN, 1, &by_value)
      .finalize();
}

CudnnGraph::Tensor CudnnGraph::value(cudnnDataType_t type, const Extents& extents) {
  return value(type, extents, row_major(extents));
}

CudnnGraph::Tensor CudnnGraph::value(cudnnDataType_t type, const Extents& extents, const Extents& strides) {
  const bool is_virtual = true;
  return add_tensor(next_id_++, type, extents, strides)
      .set(CUDNN_ATTR_TENSOR_IS_VIRTUAL, CUDNN_TYPE_BOOLEAN, 1, &is_virtual)
      .finalize();
}

void CudnnGraph::matmul(Tensor a, Tensor b, Tensor c) {
  CudnnDescriptor& mode = modes_.emplace_back(CUDNN_BACKEND_MATMUL_DESCRIPTOR);
  mode.set(CUDNN_ATTR_MATMUL_COMP_TYPE, CUDNN_DATA_FLOAT).finalize();
  operations_.emplace_back(CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR)
      .set(CUDNN_ATTR_OPERATION_MATMUL_ADESC, a)
      .set(CUDNN_ATTR_OPERATION_MATMUL_BDESC, b)
      .set(CUDNN_ATTR_OPERATION_MATMUL_CDESC, c)
      .set(CUDNN_ATTR_OPERATION_MATMUL_DESC, mode)
      .finalize();
}

CudnnDescriptor& CudnnGraph::add_pointwise(cudnnPointwiseMode_t mode, cudnnDataType_t precision,
                                           std::int64_t axis) {
  CudnnDescriptor& pointwise = modes_.emplace_back(CUDNN_BACKEND_POINTWISE_DESCRIPTOR);
  pointwise.set(CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, 1, &mode);
  pointwise.set(CUDNN_ATTR_POINTWISE_MATH_PREC, precision);
  if (axis >= 0) pointwise.set(CUDNN_ATTR_POINTWISE_AXIS, CUDNN_TYPE_INT64, 1, &axis);
  pointwise.finalize();
  return operations_.emplace_back(CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR)
      .set(CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, pointwise);
}

void CudnnGraph::unary(cudnnPointwiseMode_t mode, Tensor x, Tensor y) {
  add_pointwise(mode, CUDNN_DATA_FLOAT)
      .set(CUDNN_ATTR_OPERATION_POINTWISE_XDESC, x)
      .set(CUDNN_ATTR_OPERATION_POINTWISE_YDESC, y)
      .finalize();
}

void CudnnGraph::binary(cudnnPointwiseMode_t mode, cudnnDataType_t precision, Tensor x, Tensor b, Tensor y) {
  add_pointwise(mode, precision)
      .set(CUDNN_ATTR_OPERATION_POINTWISE_XDESC, x)
      .set(CUDNN_ATTR_OPERATION_POINTWISE_BDESC, b)
      .set(CUDNN_ATTR_OPERATION_POINTWISE_YDESC, y)
      .finalize();
}

void CudnnGraph::binary(cudnnPointwiseMode_t mode, Tensor x, Tensor b, Tensor y) {
  binary(mode, CUDNN_DATA_FLOAT, x, b, y);
}

void CudnnGraph::add_integers(Tensor x, Tensor b, Tensor y) {
  binary(CUDNN_POINTWISE_ADD, CUDNN_DATA_INT32, x, b, y);
}

void CudnnGraph::index(std::int64_t axis, Tensor like, Tensor y) {
  add_pointwise(CUDNN_POINTWISE_GEN_INDEX, CUDNN_DATA_INT32, axis)
      .set(CUDNN_ATTR_OPERATION_POINTWISE_XDESC, like)
      .set(CUDNN_ATTR_OPERATION_POINTWISE_YDESC, y)
      .finalize();
}

void CudnnGraph::at_least(Tensor x, Tensor b, Tensor y) {
  binary(CUDNN_POINTWISE_CMP_GE, CUDNN_DATA_BOOLEAN, x, b, y);
}

void CudnnGraph::less(Tensor x, Tensor b, Tensor y) {
  binary(CUDNN_POINTWISE_CMP_LT, CUDNN_DATA_BOOLEAN, x, b, y);
}

void CudnnGraph::select(Tensor x, Tensor b, Tensor mask, Tensor y) {
  add_pointwise(CUDNN_POINTWISE_BINARY_SELECT, CUDNN_DATA_FLOAT)
      .set(CUDNN_ATTR_OPERATION_POINTWISE_XDESC, x)
      .set(CUDNN_ATTR_OPERATION_POINTWISE_BDESC, b)
      .set(CUDNN_ATTR_OPERATION_POINTWISE_TDESC, mask)
      .set(CUDNN_ATTR_OPERATION_POINTWISE_YDESC, y)
      .finalize();
}

void CudnnGraph::reduce(cudnnReduceTensorOp_t mode, Tensor x, Tensor y) {
  CudnnDescriptor& reduction = modes_.emplace_back(CUDNN_BACKEND_REDUCTION_DESCRIPTOR);
  reduction.set(CUDNN_ATTR_REDUCTION_OPERATOR, CUDNN_TYPE_REDUCTION_OPERATOR_TYPE, 1, &mode)
      .set(CUDNN_ATTR_REDUCTION_COMP_TYPE, CUDNN_DATA_FLOAT)
      .finalize();
  operations_.emplace_back(CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR)
      .set(CUDNN_ATTR_OPERATION_REDUCTION_XDESC, x)
      .set(CUDNN_ATTR_OPERATION_REDUCTION_YDESC, y)
      .set(CUDNN_ATTR_OPERATION_REDUCTION_DESC, reduction)
      .finalize();
}

void CudnnGraph::reshape(Tensor x, Tensor y) {
  operations_.emplace_back(CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR)
      .set(CUDNN_ATTR_OPERATION_RESHAPE_XDESC, x)
      .set(CUDNN_ATTR_OPERATION_RESHAPE_YDESC, y)
      .finalize();
}

CudnnPlan CudnnGraph::build(cudnnHandle_t handle) const {
  const std::vector<cudnnBackendDescriptor_t> operations = pointers(operations_);
  CudnnDescriptor graph(CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
  graph.set(CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR,
            static_cast<std::int64_t>(operations.size()), operations.data());
  graph.set(kGraphHandle, CUDNN_TYPE_HANDLE, 1, &handle);
  graph.finalize();

  const cudnnBackendHeurMode_t mode = CUDNN_HEUR_MODE_A;
  CudnnDescriptor heuristic(CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
  heuristic.set(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, graph);
  heuristic.set(CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, 1, &mode);
  heuristic.finalize();

  std::int64_t count = 0;
  check_cudnn(cudnnBackendGetAttribute(heuristic.get(), CUDNN_ATTR_ENGINEHEUR_RESULTS,
                                       CUDNN_TYPE_BACKEND_DESCRIPTOR, 0, &count, nullptr),
              "counting engines");
  std::deque<CudnnDescriptor> engines;
  for (std::int64_t i = 0; i < count; ++i) engines.emplace_back(CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
  std::vector<cudnnBackendDescriptor_t> filled = pointers(engines);
  if (count > 0) {
    check_cudnn(cudnnBackendGetAttribute(heuristic.get(), CUDNN_ATTR_ENGINEHEUR_RESULTS,
                                         CUDNN_TYPE_BACKEND_DESCRIPTOR, count, &count, filled.data()),
                "listing engines");
  }

  cudnnStatus_t status = CUDNN_STATUS_NOT_SUPPORTED;
  for (std::int64_t i = 0; i < count; ++i) {
    CudnnDescriptor plan(CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
    plan.set(kPlanHandle, CUDNN_TYPE_HANDLE, 1, &handle);
    plan.set(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, engines[static_cast<std::size_t>(i)]);
    status = cudnnBackendFinalize(plan.get());
    if (status != CUDNN_STATUS_SUCCESS) continue;
    std::int64_t workspace = 0;
    check_cudnn(cudnnBackendGetAttribute(plan.get(), CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE,
                                         CUDNN_TYPE_INT64, 1, nullptr, &workspace),
                "asking for a plan's workspace");
    return CudnnPlan(std::move(plan), workspace);
  }
  check_cudnn(status, "building a plan");
  fail(ErrorKind::kDevice, "cuDNN built no plan");
}

}  // namespace octet::cuda
