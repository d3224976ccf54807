#include "matmul_plans.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <optional>
#include <type_traits>

#include "../../runtime/cuda/cuda_check.h"
#include "launch_timing.h"
#include "octet/base/error.h"
#include "octet/ops/plan_cache.h"

namespace octet::cuda {
namespace {

constexpr int kProposals = 8, kTimedProposals = 24;
static_assert(sizeof(cublasLtMatmulAlgo_t) == 64 && std::is_trivially_copyable_v<cublasLtMatmulAlgo_t>);

void check_cublas(cublasStatus_t status, const char* what) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  fail(ErrorKind::kDevice, "cuBLASLt: {} in {}", cublasLtGetStatusString(status), what);
}

cudaDataType_t cuda_type(DType type) {
  switch (type) {
    case DType::kBF16:
      return CUDA_R_16BF;
    case DType::kE4M3:
      return CUDA_R_8F_E4M3;
    case DType::kE5M2:
      return CUDA_R_8F_E5M2;
    default:
      OCTET_ASSERT(type == DType::kF32);
      return CUDA_R_32F;
  }
}

cublasLtMatmulMatrixScale_t scale_mode(ScaleCut cut) {
  switch (cut) {
    case ScaleCut::kRow128:
      return CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F;
    case ScaleCut::kSquare128:
      return CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F;
    case ScaleCut::kTensor:
      break;
  }
  return CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F;
}

const char* text_of(ScaleCut cut) {
  switch (cut) {
    case ScaleCut::kRow128:
      return " scaled by 1x128";
    case ScaleCut::kSquare128:
      return " scaled by 128x128";
    case ScaleCut::kTensor:
      break;
  }
  return "";
}

const char* text_of(cublasLtEpilogue_t epilogue) {
  switch (epilogue) {
    case CUBLASLT_EPILOGUE_BIAS:
      return ", with bias";
    case CUBLASLT_EPILOGUE_GELU_AUX:
      return ", with GELU";
    case CUBLASLT_EPILOGUE_GELU_AUX_BIAS:
      return ", with bias and GELU";
    case CUBLASLT_EPILOGUE_DGELU:
      return ", with GELU's gradient";
    default:
      return "";
  }
}

// The largest power of two, up to 256, that divides the address.
int alignment_of(const void* pointer) {
  const auto address = reinterpret_cast<std::uintptr_t>(pointer) | 256u;
  return static_cast<int>(address & (~address + 1));
}

template <typename Value>
void set(cublasLtMatmulDesc_t operation, cublasLtMatmulDescAttributes_t attribute, const Value& value) {
  check_cublas(cublasLtMatmulDescSetAttribute(operation, attribute, &value, sizeof value),
               "cublasLtMatmulDescSetAttribute");
}

template <typename Value>
void set(cublasLtMatmulPreference_t preference, cublasLtMatmulPreferenceAttributes_t attribute,
         const Value& value) {
  check_cublas(cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof value),
               "cublasLtMatmulPreferenceSetAttribute");
}

// A row-major matrix as the column-major one that lies the same way in memory: rows and columns change
// places.
cublasLtMatrixLayout_t make_layout(const Tensor& tensor) {
  cublasLtMatrixLayout_t layout = nullptr;
  check_cublas(
      cublasLtMatrixLayoutCreate(&layout, cuda_type(tensor.dtype), static_cast<std::uint64_t>(tensor.cols),
                                 static_cast<std::uint64_t>(tensor.rows), tensor.cols),
      "cublasLtMatrixLayoutCreate");
  return layout;
}

// What a product asks for beyond itself, as one of the library's epilogues; the default one where none of
// them is that, or addresses and sizes are not what it takes. How exact its GELU is is not said, so that only
// bfloat16 results have that.
cublasLtEpilogue_t epilogue_of(const Matmul& args) {
  const bool adds_bias = args.bias && args.bias.dtype == args.y.dtype && alignment_of(args.bias.data) >= 16;
  if (args.epilogue == Epilogue::kNone) return adds_bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
  const bool gelu = args.epilogue == Epilogue::kGelu || args.epilogue == Epilogue::kGeluGradient;
  const bool takes_inner = args.y.cols % 8 == 0 && alignment_of(args.inner.data) >= 16;
  if (!gelu || args.y.dtype != DType::kBF16 || !takes_inner) return CUBLASLT_EPILOGUE_DEFAULT;
  if (args.epilogue == Epilogue::kGeluGradient) return CUBLASLT_EPILOGUE_DGELU;
  if (!args.bias) return CUBLASLT_EPILOGUE_GELU_AUX;
  return adds_bias ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
}

// Whether kernels apart from the product may be faster. A bias is cheap in any product.
bool in_question(cublasLtEpilogue_t epilogue) {
  return epilogue != CUBLASLT_EPILOGUE_DEFAULT && epilogue != CUBLASLT_EPILOGUE_BIAS;
}

// The cache's plan of a product for which they are.
std::vector<std::byte> apart() {
  return {std::byte{0}};
}

bool is_plain(const Matmul& args) {
  return !args.bias && args.epilogue == Epilogue::kNone;
}

// a is the library's second operand and b its first.
void set_scales(cublasLtMatmulDesc_t operation, const Matmul& args) {
  const void *a = args.a_scales.values.data, *b = args.b_scales.values.data;
  set(operation, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, b);
  set(operation, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, a);
}

void describe_float8(cublasLtMatmulDesc_t operation, const Matmul& args) {
  set(operation, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, static_cast<std::int32_t>(scale_mode(args.b_scales.cut)));
  set(operation, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, static_cast<std::int32_t>(scale_mode(args.a_scales.cut)));
  set_scales(operation, args);
  // Activations forward: sums of fewer bits, somewhat faster. Gradients: full sums.
  const bool fast =
      args.a.dtype == DType::kE4M3 && args.y.dtype == DType::kBF16 && args.a_scales.cut == ScaleCut::kTensor;
  set(operation, CUBLASLT_MATMUL_DESC_FAST_ACCUM, static_cast<std::int8_t>(fast ? 1 : 0));
}

}  // namespace

MatmulPlans::MatmulPlans(Scratch& scratch, const std::string& device, int architecture,
                         const CudaOpsOptions& options)
    : scratch_(&scratch),
      workspace_((architecture >= 90 ? 64 : 32) << 20),
      cache_(options.matmul_plans),
      context_(fmt::format("{}, sm_{}, cublasLt {}", device, architecture, cublasLtGetVersion())) {
  cublasLtHandle_t handle = nullptr;
  check_cublas(cublasLtCreate(&handle), "cublasLtCreate");
  handle_.reset(handle);
  if (options.own_products != OwnKernels::kNever && architecture == 90) {
    own_ = std::make_unique<hopper::Products>();
    always_own_ = options.own_products == OwnKernels::kAlways;
  }
}

MatmulPlans::Key MatmulPlans::key_of(const Matmul& args, cublasLtEpilogue_t epilogue) {
  Key key{};
  key.m = args.y.rows;
  key.n = args.y.cols;
  key.k = args.transpose_a ? args.a.rows : args.a.cols;
  key.transpose_a = args.transpose_a;
  key.transpose_b = args.transpose_b;
  key.accumulate = args.accumulate || args.addend;
  key.epilogue = epilogue;
  key.a = args.a.dtype;
  key.b = args.b.dtype;
  key.a_cut = args.a_scales.cut;
  key.b_cut = args.b_scales.cut;
  key.result = args.y.dtype;
  key.alignment_a = alignment_of(args.a.data);
  key.alignment_b = alignment_of(args.b.data);
  key.alignment_y = alignment_of(args.y.data);
  if (args.addend) key.alignment_y = std::min(key.alignment_y, alignment_of(args.addend.data));
  key.alignment_inner = args.inner ? alignment_of(args.inner.data) : 0;
  return key;
}

void MatmulPlans::set_pointers(const Key& key, const Plan& plan, const Matmul& args) const {
  const cublasLtMatmulDesc_t operation = plan.operation.get();
  if (is_float8(key.a)) set_scales(operation, args);
  if (args.bias) set(operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, static_cast<const void*>(args.bias.data));
  if (args.inner) {
    set(operation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, static_cast<void*>(args.inner.data));
  }
}

// cuBLAS is column-major: yᵀ = bᵀ·aᵀ, so the operands change places and each stored matrix is its own
// transpose.
MatmulPlans::Plan MatmulPlans::make_plan(const Key& key, const Matmul& args) const {
  Plan plan;
  plan.first_use = args;
  cublasLtMatmulDesc_t operation = nullptr;
  check_cublas(cublasLtMatmulDescCreate(&operation, CUBLAS_COMPUTE_32F, CUDA_R_32F),
               "cublasLtMatmulDescCreate");
  plan.operation.reset(operation);
  set(operation, CUBLASLT_MATMUL_DESC_TRANSA, key.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N);
  set(operation, CUBLASLT_MATMUL_DESC_TRANSB, key.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N);
  if (is_float8(key.a)) describe_float8(operation, args);
  plan.a.reset(make_layout(args.a));
  plan.b.reset(make_layout(args.b));
  plan.y.reset(make_layout(args.y));

  set(operation, CUBLASLT_MATMUL_DESC_EPILOGUE, key.epilogue);
  if (args.bias) set(operation, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, cuda_type(args.bias.dtype));
  if (args.inner) set(operation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, args.inner.cols);
  set_pointers(key, plan, args);

  const std::vector<cublasLtMatmulAlgo_t> results = proposals(key, plan, kProposals, workspace_);
  plan.fused = !results.empty();
  if (!plan.fused && key.epilogue != CUBLASLT_EPILOGUE_DEFAULT) return plan;
  if (!plan.fused) {
    fail(ErrorKind::kDevice, "cuBLASLt has no algorithm for a product of {} [{}, {}] and {} [{}, {}] into {}",
         name_of(key.a), key.m, key.k, name_of(key.b), key.k, key.n, name_of(key.result));
  }
  // cppcheck-suppress containerOutOfBounds ; fail() does not return
  plan.algorithm = results.front();
  recall(key, plan);
  return plan;
}

std::vector<cublasLtMatmulAlgo_t> MatmulPlans::proposals(const Key& key, const Plan& plan, int most,
                                                         std::int64_t workspace) const {
  cublasLtMatmulPreference_t created = nullptr;
  check_cublas(cublasLtMatmulPreferenceCreate(&created), "cublasLtMatmulPreferenceCreate");
  const Handle<cublasLtMatmulPreference_t, cublasLtMatmulPreferenceDestroy> preference(created);
  set(created, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<std::size_t>(workspace));
  // Parts of a split product may be added in the result only where that is float32.
  const std::uint32_t reductions =
      key.result == DType::kF32 ? CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE | CUBLASLT_REDUCTION_SCHEME_INPLACE
                                : CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
  set(created, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, reductions);
  set(created, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, static_cast<std::uint32_t>(key.alignment_b));
  set(created, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, static_cast<std::uint32_t>(key.alignment_a));
  set(created, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, static_cast<std::uint32_t>(key.alignment_y));
  set(created, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, static_cast<std::uint32_t>(key.alignment_y));

  std::vector<cublasLtMatmulHeuristicResult_t> results(static_cast<std::size_t>(most));
  int count = 0;
  const cublasStatus_t status =
      cublasLtMatmulAlgoGetHeuristic(handle_.get(), plan.operation.get(), plan.b.get(), plan.a.get(),
                                     plan.y.get(), plan.y.get(), created, most, results.data(), &count);
  // Which of these says that types, scales and epilogue do not go together differs from release to release.
  if (status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_INVALID_VALUE) return {};
  check_cublas(status, "cublasLtMatmulAlgoGetHeuristic");
  std::vector<cublasLtMatmulAlgo_t> algorithms;
  for (int i = 0; i < count; ++i) {
    const cublasLtMatmulHeuristicResult_t& result = results[static_cast<std::size_t>(i)];
    if (result.state == CUBLAS_STATUS_SUCCESS) algorithms.push_back(result.algo);
  }
  return algorithms;
}

std::string MatmulPlans::text_of(const Key& key) const {
  const std::string inner = key.alignment_inner > 0 ? fmt::format(" {}", key.alignment_inner) : "";
  return fmt::format("{}: {} [{}, {}]{}{} x {} [{}, {}]{}{} to {}{}{}, aligned {} {} {}{}, workspace {} MiB",
                     context_, name_of(key.a), key.m, key.k, key.transpose_a ? "T" : "",
                     cuda::text_of(key.a_cut), name_of(key.b), key.k, key.n, key.transpose_b ? "T" : "",
                     cuda::text_of(key.b_cut), name_of(key.result), key.accumulate ? ", added" : "",
                     cuda::text_of(key.epilogue), key.alignment_a, key.alignment_b, key.alignment_y, inner,
                     workspace_ >> 20);
}

void MatmulPlans::recall(const Key& key, Plan& plan) const {
  if (cache_ == nullptr) return;
  const std::string name = text_of(key);
  const TimedPlan* found = cache_->find(name);
  if (found == nullptr) return;
  if (in_question(key.epilogue) && found->plan == apart()) {
    plan.fused = false;
    plan.remembered = true;
    return;
  }
  cublasLtMatmulAlgo_t algorithm;
  cublasLtMatmulHeuristicResult_t check{};
  if (found->plan.size() == sizeof algorithm) {
    std::memcpy(&algorithm, found->plan.data(), sizeof algorithm);
    const cublasStatus_t status =
        cublasLtMatmulAlgoCheck(handle_.get(), plan.operation.get(), plan.b.get(), plan.a.get(), plan.y.get(),
                                plan.y.get(), &algorithm, &check);
    if (status == CUBLAS_STATUS_SUCCESS && check.workspaceSize <= static_cast<std::size_t>(workspace_)) {
      plan.algorithm = algorithm;
      plan.remembered = true;
      return;
    }
  }
  cache_->reject(name);
}

void MatmulPlans::time_products(cudaStream_t stream) {
  if (cache_ == nullptr) return;
  std::vector<Matmul> compared;
  for (const auto& [key, plan] : plans_) {
    if (in_question(key.epilogue) && plan.fused && !plan.remembered) compared.push_back(plan.first_use);
  }
  // Makes plans of the products that they are to be compared with, which come first in the order of keys.
  for (const Matmul& args : compared) run_apart(stream, args);
  for (auto& [key, plan] : plans_) {
    if (plan.fused && !plan.remembered) choose_fastest(stream, key, plan);
  }
  plans_.clear();
}

void MatmulPlans::choose_fastest(cudaStream_t stream, const Key& key, Plan& plan) {
  std::vector<cublasLtMatmulAlgo_t> algorithms = proposals(key, plan, kTimedProposals, workspace_);
  // The library lists few algorithms that need no workspace where it may have much.
  for (const cublasLtMatmulAlgo_t& other : proposals(key, plan, kTimedProposals / 2, 0)) {
    const auto same = [&](const cublasLtMatmulAlgo_t& one) {
      return std::memcmp(&one, &other, sizeof one) == 0;
    };
    if (std::none_of(algorithms.begin(), algorithms.end(), same)) algorithms.push_back(other);
  }
  set_pointers(key, plan, plan.first_use);
  const auto run = [&](std::size_t number) {
    if (number == algorithms.size()) {
      run_apart(stream, plan.first_use);
      return true;
    }
    plan.algorithm = algorithms[number];
    return launch(stream, plan, plan.first_use) == CUBLAS_STATUS_SUCCESS;
  };
  const std::size_t ways = algorithms.size() + (in_question(key.epilogue) ? 1 : 0);
  const std::optional<FastestLaunch> fastest = find_fastest(stream, ways, run);
  if (!fastest) return;
  if (fastest->number == algorithms.size()) {
    cache_->add(text_of(key), {apart(), fastest->microseconds});
    return;
  }
  plan.algorithm = algorithms[fastest->number];
  const auto* bytes = reinterpret_cast<const std::byte*>(&plan.algorithm);
  cache_->add(text_of(key), {{bytes, bytes + sizeof(cublasLtMatmulAlgo_t)}, fastest->microseconds});
}

cublasStatus_t MatmulPlans::launch(cudaStream_t stream, const Plan& plan, const Matmul& args) {
  const float alpha = 1.0f, beta = args.accumulate || args.addend ? 1.0f : 0.0f;
  const void* const added = args.addend ? args.addend.data : args.y.data;
  return cublasLtMatmul(handle_.get(), plan.operation.get(), &alpha, args.b.data, plan.b.get(), args.a.data,
                        plan.a.get(), &beta, added, plan.y.get(), args.y.data, plan.y.get(), &plan.algorithm,
                        scratch_->reserve(workspace_), static_cast<std::size_t>(workspace_), stream);
}

// Measured on an H200 under lasting load (docs/performance-log.md): of plain products the own kernel is the
// faster one where hardly any of its time is lost at edges; an activation that needs no pass of its own is
// worth more than that.
bool MatmulPlans::prefers_own(const Matmul& args) const {
  if (!own_ || !own_->takes(args)) return false;
  return always_own_ || own_->efficiency(args) >= (args.epilogue == Epilogue::kNone ? 0.98 : 0.85);
}

void MatmulPlans::run_library(cudaStream_t stream, const Matmul& args) {
  const cublasLtEpilogue_t epilogue = epilogue_of(args);
  if (epilogue == CUBLASLT_EPILOGUE_DEFAULT && !is_plain(args)) return run_apart(stream, args);
  const Key key = key_of(args, epilogue);
  auto found = plans_.find(key);
  if (found == plans_.end()) found = plans_.emplace(key, make_plan(key, args)).first;
  Plan& plan = found->second;
  if (!plan.fused) return run_apart(stream, args);
  set_pointers(key, plan, args);
  const cublasStatus_t status = launch(stream, plan, args);
  // An epilogue that was proposed may still be refused.
  if (status == CUBLAS_STATUS_NOT_SUPPORTED && epilogue != CUBLASLT_EPILOGUE_DEFAULT) {
    plan.fused = false;
    return run_apart(stream, args);
  }
  check_cublas(status, "cublasLtMatmul");
}

}  // namespace octet::cuda
