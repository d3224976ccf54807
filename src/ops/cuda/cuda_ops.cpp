#include "cuda_ops.h"

#include <algorithm>

#include "../../runtime/cuda/cuda_check.h"
#include "../../runtime/cuda/cuda_stream.h"
#include "../float8_checks.h"
#include "../matmul_checks.h"
#include "drivers.h"

namespace octet {
namespace {

int attribute(int ordinal, cudaDeviceAttr name) {
  int value = 0;
  OCTET_CUDA(cudaDeviceGetAttribute(&value, name, ordinal));
  return value;
}

int architecture_of(int ordinal) {
  return 10 * attribute(ordinal, cudaDevAttrComputeCapabilityMajor) +
         attribute(ordinal, cudaDevAttrComputeCapabilityMinor);
}

// The ordinal, made current: cuBLASLt and cuDNN handles belong to the device that is current at their
// creation.
int make_current(const Device& device) {
  const int ordinal = ordinal_of(device);
  OCTET_CUDA(cudaSetDevice(ordinal));
  return ordinal;
}

bool same_shape(const Tensor& a, const Tensor& b) {
  return a.rows == b.rows && a.cols == b.cols;
}

bool alike(const Tensor& a, const Tensor& b) {
  return same_shape(a, b) && a.dtype == b.dtype;
}

void check_attention(const AttentionShape& shape, const AttentionOperands& operands,
                     const Tensor& statistics) {
  const HeadLayout& layout = shape.layout;
  OCTET_ASSERT(layout.heads > 0 && layout.kv_heads > 0 && layout.group > 0 && layout.head_offset >= 0);
  OCTET_ASSERT((layout.heads - 1 + layout.head_offset) / layout.group < layout.kv_heads);
  OCTET_ASSERT(shape.key_rows() >= shape.sequence);
  OCTET_ASSERT(statistics.dtype == DType::kF32 &&
               statistics.size() == shape.batch * layout.heads * shape.sequence);
  const Tensor& starts = operands.document_starts;
  OCTET_ASSERT(!starts || (starts.dtype == DType::kI32 && starts.size() == shape.batch * shape.sequence));
}

}  // namespace

CudaOps::CudaOps(Device& device, const CudaOpsOptions& options)
    : ordinal_(make_current(device)),
      scratch_(device, attribute(ordinal_, cudaDevAttrMultiProcessorCount),
               attribute(ordinal_, cudaDevAttrMaxSharedMemoryPerBlockOptin)),
      matmul_(scratch_, device.name(), architecture_of(ordinal_), options),
      attention_(scratch_, options.deterministic_attention),
      own_attention_(options.own_attention) {}

cudaStream_t CudaOps::enter(Stream& stream) const {
  OCTET_CUDA(cudaSetDevice(ordinal_));
  return native(stream);
}

bool CudaOps::needs_cudnn(const AttentionShape& shape, bool documents) const {
  return documents || own_attention_ == OwnKernels::kNever || !attention_forward_.takes(shape) ||
         !attention_gradients_.takes(shape);
}

void CudaOps::prepare(const Workload& workload) {
  OCTET_CUDA(cudaSetDevice(ordinal_));
  std::int64_t bytes =
      std::max({matmul_.workspace_bytes(), cuda::embedding_backward_scratch(workload.tokens, workload.widest),
                cuda::coded_activation_backward_scratch(workload.tokens, workload.widest),
                cuda::MatmulPlans::column_sums_scratch(workload.tokens, workload.widest)});
  const AttentionShape& shape = workload.attention;
  if (shape.batch > 0 && shape.sequence > 0 && shape.layout.heads > 0) {
    bytes = std::max(bytes, cuda::plain_attention_scratch(shape));
    if (workload.compute == DType::kBF16) {
      if (needs_cudnn(shape, workload.documents_apart))
        bytes = std::max(bytes, attention_.workspace_bytes(shape, workload.documents_apart));
      if (own_attention_ != OwnKernels::kNever)
        bytes = std::max(bytes, attention_gradients_.most_scratch_bytes(shape));
    }
  }
  scratch_.reserve(bytes);
}

void CudaOps::matmul(Stream& stream, const Matmul& a) {
  check_matmul(a);
  matmul_.run(enter(stream), a);
}

void CudaOps::largest_magnitude(Stream& stream, Tensor x, Tensor largest) {
  OCTET_ASSERT(largest.dtype == DType::kF32 && largest.size() == 1);
  cuda::largest_magnitude(enter(stream), x, largest, scratch_.multiprocessors());
}

void CudaOps::quantize(Stream& stream, const Quantize& args) {
  check_float8(args);
  cuda::quantize(enter(stream), args);
}

void CudaOps::transpose_codes(Stream& stream, Tensor from, Tensor to) {
  check_transpose(from, to);
  cuda::transpose_codes(enter(stream), from, to);
}

void CudaOps::remember_largest(Stream& stream, Tensor seen, Tensor history, Tensor largest,
                               const StepScalars* scalars) {
  check_history(seen, history, largest);
  cuda::remember_largest(enter(stream), seen, history, largest, scalars);
}

void CudaOps::time_products(Stream& stream) {
  matmul_.time_products(enter(stream));
}

void CudaOps::norm_forward(Stream& stream, const NormForward& a) {
  OCTET_ASSERT(alike(a.residual, a.y) && a.weight.size() == a.y.cols && a.weight.dtype == a.y.dtype);
  OCTET_ASSERT(!a.delta || (alike(a.delta, a.y) && alike(a.sum, a.y)));
  OCTET_ASSERT(a.rstd.size() == a.y.rows);
  OCTET_ASSERT(a.kind == NormKind::kRms ||
               (a.bias.size() == a.y.cols && a.bias.dtype == a.y.dtype && a.mean.size() == a.y.rows));
  check_largest(a.y, a.largest);
  check_codes(a);
  cuda::norm_forward(enter(stream), a);
}

void CudaOps::norm_backward(Stream& stream, const NormBackward& a) {
  OCTET_ASSERT(alike(a.x, a.dy) && alike(a.x, a.dx) && (!a.y || alike(a.x, a.y)));
  OCTET_ASSERT(a.weight.size() == a.x.cols && a.weight.dtype == a.x.dtype && a.dweight.size() == a.x.cols);
  OCTET_ASSERT(a.rstd.size() == a.x.rows);
  OCTET_ASSERT(a.kind == NormKind::kRms || (a.bias.size() == a.x.cols && a.bias.dtype == a.x.dtype &&
                                            a.mean.size() == a.x.rows && a.dbias.size() == a.x.cols));
  OCTET_ASSERT(!a.dx_sums || (a.dx_sums.size() == a.x.cols && a.dx_sums.dtype == DType::kF32));
  check_largest(a.dx, a.largest);
  check_codes(a);
  if (a.y_codes) {
    cuda::coded_norm_backward(enter(stream), a, scratch_);
  } else {
    cuda::norm_backward(enter(stream), a, scratch_);
  }
}

void CudaOps::rope(Stream& stream, const HeadLayout& layout, Tensor qkv, Tensor positions, Tensor cos_sin,
                   bool inverse) {
  OCTET_ASSERT(qkv.cols == layout.packed() && positions.size() == qkv.rows);
  OCTET_ASSERT(cos_sin.cols == layout.head_size && layout.head_size % 2 == 0);
  cuda::rope(enter(stream), layout, qkv, positions, cos_sin, inverse);
}

void CudaOps::head_norm_forward(Stream& stream, const HeadLayout& layout, float epsilon, Tensor in,
                                Tensor q_weight, Tensor k_weight, Tensor out, Tensor rstd) {
  OCTET_ASSERT(in.cols == layout.packed() && alike(in, out));
  OCTET_ASSERT(q_weight.size() == layout.head_size && k_weight.size() == layout.head_size);
  OCTET_ASSERT(q_weight.dtype == in.dtype && k_weight.dtype == in.dtype);
  OCTET_ASSERT(rstd.size() == in.rows * (layout.heads + layout.kv_heads));
  cuda::head_norm_forward(enter(stream), layout, epsilon, in, q_weight, k_weight, out, rstd);
}

void CudaOps::head_norm_backward(Stream& stream, const HeadLayout& layout, Tensor in, Tensor rstd,
                                 Tensor q_weight, Tensor k_weight, Tensor dqkv, Tensor dq_weight,
                                 Tensor dk_weight, bool accumulate) {
  OCTET_ASSERT(in.cols == layout.packed() && alike(in, dqkv));
  OCTET_ASSERT(q_weight.size() == layout.head_size && k_weight.size() == layout.head_size);
  OCTET_ASSERT(q_weight.dtype == in.dtype && k_weight.dtype == in.dtype);
  OCTET_ASSERT(dq_weight.size() == layout.head_size && dk_weight.size() == layout.head_size);
  OCTET_ASSERT(rstd.size() == in.rows * (layout.heads + layout.kv_heads));
  cuda::head_norm_backward(enter(stream), layout, in, rstd, q_weight, k_weight, dqkv, dq_weight, dk_weight,
                           accumulate, scratch_);
}

void CudaOps::attention_forward(Stream& stream, const AttentionShape& shape,
                                const AttentionOperands& operands, SampleRows out, Tensor statistics) {
  check_attention(shape, operands, statistics);
  if (statistics.size() == 0) return;
  const cudaStream_t to = enter(stream);
  if (own_attention_ != OwnKernels::kNever && attention_forward_.takes(shape, operands, out)) {
    attention_forward_.run(to, shape, operands, out, statistics);
    return;
  }
  if (operands.dtype != DType::kBF16 || !attention_.forward(to, shape, operands, out, statistics)) {
    cuda::plain_attention_forward(to, shape, operands, out, statistics);
  }
}

void CudaOps::attention_backward(Stream& stream, const AttentionShape& shape,
                                 const AttentionOperands& operands, SampleRows out, Tensor statistics,
                                 SampleRows dout, SampleRows dquery, SampleRows dkey, SampleRows dvalue) {
  check_attention(shape, operands, statistics);
  if (statistics.size() == 0) return;
  const cudaStream_t to = enter(stream);
  if (own_attention_ != OwnKernels::kNever &&
      attention_gradients_.takes(shape, operands, out, dout, dquery, dkey, dvalue)) {
    attention_gradients_.run(to, shape, operands, out, statistics, dout, dquery, dkey, dvalue,
                             scratch_.reserve(attention_gradients_.scratch_bytes(shape)));
    return;
  }
  if (operands.dtype == DType::kBF16 &&
      attention_.backward(to, shape, operands, out, statistics, dout, dquery, dkey, dvalue)) {
    return;
  }
  if (cuda::tile_attention_takes(shape, operands, out, dout, dquery, dkey, dvalue)) {
    cuda::tile_attention_backward(to, shape, operands, out, statistics, dout, dquery, dkey, dvalue, scratch_);
  } else {
    cuda::plain_attention_backward(to, shape, operands, out, statistics, dout, dquery, dkey, dvalue,
                                   scratch_);
  }
}

void CudaOps::swiglu_forward(Stream& stream, Tensor gate_up, Tensor out, Tensor largest) {
  OCTET_ASSERT(gate_up.rows == out.rows && gate_up.cols == 2 * out.cols && gate_up.dtype == out.dtype);
  check_largest(out, largest);
  cuda::swiglu_forward(enter(stream), gate_up, out, largest);
}

void CudaOps::swiglu_backward(Stream& stream, Tensor gate_up, Tensor dout, Tensor largest) {
  OCTET_ASSERT(gate_up.rows == dout.rows && gate_up.cols == 2 * dout.cols && gate_up.dtype == dout.dtype);
  check_largest(gate_up, largest);
  cuda::swiglu_backward(enter(stream), gate_up, dout, largest);
}

void CudaOps::gelu_forward(Stream& stream, Tensor in, Tensor out, Tensor largest) {
  OCTET_ASSERT(alike(in, out));
  check_largest(out, largest);
  cuda::gelu_forward(enter(stream), in, out, largest);
}

void CudaOps::gelu_backward(Stream& stream, Tensor in, Tensor dout, Tensor largest) {
  OCTET_ASSERT(alike(in, dout));
  check_largest(in, largest);
  cuda::gelu_backward(enter(stream), in, dout, largest);
}

void CudaOps::coded_activation(Stream& stream, const CodedActivation& a) {
  check_coded(a);
  cuda::coded_activation(enter(stream), a);
}

void CudaOps::coded_activation_backward(Stream& stream, const CodedActivationBackward& a) {
  check_coded(a);
  cuda::coded_activation_backward(enter(stream), a, scratch_);
}

void CudaOps::embedding_forward(Stream& stream, Tensor ids, Tensor table, std::int64_t first_id,
                                Tensor positions, Tensor position_table, Tensor out) {
  OCTET_ASSERT(ids.size() == out.rows && table.cols == out.cols && table.dtype == out.dtype);
  OCTET_ASSERT(!position_table || (positions.size() == out.rows && position_table.cols == out.cols &&
                                   position_table.dtype == out.dtype));
  cuda::embedding_forward(enter(stream), ids, table, first_id, positions, position_table, out);
}

void CudaOps::embedding_backward(Stream& stream, Tensor ids, Tensor order, Tensor dout, std::int64_t first_id,
                                 Tensor dtable) {
  OCTET_ASSERT(ids.size() == dout.rows && order.size() == dout.rows && dtable.cols == dout.cols);
  cuda::embedding_backward(enter(stream), ids, order, dout, first_id, dtable, scratch_);
}

void CudaOps::bias_backward(Stream& stream, Tensor dy, Tensor dbias, bool accumulate) {
  OCTET_ASSERT(dbias.size() == dy.cols);
  cuda::bias_backward(enter(stream), dy, dbias, accumulate, scratch_);
}

void CudaOps::cross_entropy_partial(Stream& stream, Tensor logits, std::int64_t first_id, std::int64_t valid,
                                    Tensor targets, Tensor partial) {
  OCTET_ASSERT(targets.size() == logits.rows && partial.rows == logits.rows && partial.cols == 3);
  OCTET_ASSERT(valid >= 0 && valid <= logits.cols);
  cuda::cross_entropy_partial(enter(stream), logits, first_id, valid, targets, partial, scratch_);
}

void CudaOps::cross_entropy_finish(Stream& stream, Tensor logits, std::int64_t first_id, std::int64_t valid,
                                   Tensor targets, Tensor partials, double weight, bool gradient,
                                   StepScalars* scalars) {
  OCTET_ASSERT(targets.size() == logits.rows && partials.cols == 3 && valid >= 0 && valid <= logits.cols);
  OCTET_ASSERT(logits.rows == 0 || partials.rows % logits.rows == 0);
  cuda::cross_entropy_finish(enter(stream), logits, first_id, valid, targets, partials, weight, gradient,
                             scalars, scratch_);
}

void CudaOps::cross_entropy(Stream& stream, Tensor logits, std::int64_t valid, Tensor targets, Tensor partial,
                            bool gradient, StepScalars* scalars) {
  OCTET_ASSERT(targets.size() == logits.rows && partial.rows == logits.rows && partial.cols == 3);
  OCTET_ASSERT(valid >= 0 && valid <= logits.cols);
  cuda::cross_entropy(enter(stream), logits, valid, targets, partial, gradient, scalars, scratch_);
}

void CudaOps::add_square(Stream& stream, Tensor x, StepScalars* scalars) {
  cuda::add_square(enter(stream), x, scalars, scratch_);
}

void CudaOps::finish_step(Stream& stream, StepScalars* scalars, Tensor rates, float clip, float beta1,
                          float beta2) {
  cuda::finish_step(enter(stream), scalars, rates, clip, beta1, beta2);
}

void CudaOps::adamw(Stream& stream, const Adamw& a, const StepScalars* scalars) {
  const std::int64_t size = a.master.size();
  OCTET_ASSERT(a.first_moment.size() == size && a.second_moment.size() == size);
  OCTET_ASSERT(a.gradient.size() == size && (!a.parameter || a.parameter.size() == size));
  const bool plain = a.master.dtype == DType::kF32 && a.first_moment.dtype == DType::kF32;
  (plain ? cuda::adamw : cuda::narrow_adamw)(enter(stream), a, scalars);
}

void CudaOps::widen_state(Stream& stream, const NarrowState& state, Tensor values) {
  OCTET_ASSERT(values.size() == state.stored.size());
  cuda::widen_state(enter(stream), state, values);
}

void CudaOps::narrow_state(Stream& stream, Tensor values, const NarrowState& state) {
  OCTET_ASSERT(values.size() == state.stored.size());
  cuda::narrow_state(enter(stream), values, state);
}

void CudaOps::cast(Stream& stream, Tensor from, Tensor to) {
  OCTET_ASSERT(from.size() == to.size());
  cuda::cast(enter(stream), from, to);
}

void CudaOps::add(Stream& stream, Tensor from, Tensor to) {
  OCTET_ASSERT(from.size() == to.size());
  cuda::add(enter(stream), from, to);
}

void CudaOps::copy_rows(Stream& stream, DType dtype, std::int64_t batch, std::int64_t rows,
                        std::int64_t columns, const SampleRows& from, const SampleRows& to, bool add) {
  cuda::copy_rows(enter(stream), dtype, batch, rows, columns, from, to, add);
}

void CudaOps::fill_normal(Stream& stream, Tensor values, float deviation, std::uint64_t key,
                          std::int64_t first_index, std::int64_t stride) {
  cuda::fill_normal(enter(stream), values, deviation, key, first_index, stride);
}

void CudaOps::fill(Stream& stream, Tensor values, float value) {
  cuda::fill(enter(stream), values, value);
}

std::unique_ptr<Ops> make_cuda_ops(Device& device, const CudaOpsOptions& options) {
  return std::make_unique<CudaOps>(device, options);
}

}  // namespace octet
