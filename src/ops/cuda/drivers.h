#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "octet/base/tensor.h"
#include "octet/ops/ops.h"
#include "scratch.h"

// Launches of octet's own kernels, one group a .cu file. Arguments are as in octet/ops/ops.h and already
// checked. Scratch needs that grow with the workload have a function; all others stay far below what matrix
// products take.
namespace octet::cuda {

// norm.cu
void norm_forward(cudaStream_t stream, const NormForward& args);
void norm_backward(cudaStream_t stream, const NormBackward& args, Scratch& scratch);

// coded_norm.cu: with y_codes
void coded_norm_backward(cudaStream_t stream, const NormBackward& args, Scratch& scratch);

// head_norm.cu
void head_norm_forward(cudaStream_t stream, const HeadLayout& layout, float epsilon, Tensor in,
                       Tensor q_weight, Tensor k_weight, Tensor out, Tensor rstd);
void head_norm_backward(cudaStream_t stream, const HeadLayout& layout, Tensor in, Tensor rstd,
                        Tensor q_weight, Tensor k_weight, Tensor dqkv, Tensor dq_weight, Tensor dk_weight,
                        bool accumulate, Scratch& scratch);

// rope.cu
void rope(cudaStream_t stream, const HeadLayout& layout, Tensor qkv, Tensor positions, Tensor cos_sin,
          bool inverse);

// activation.cu
void swiglu_forward(cudaStream_t stream, Tensor gate_up, Tensor out, Tensor largest);
void swiglu_backward(cudaStream_t stream, Tensor gate_up, Tensor dout, Tensor largest);
void gelu_forward(cudaStream_t stream, Tensor in, Tensor out, Tensor largest);
void gelu_backward(cudaStream_t stream, Tensor in, Tensor dout, Tensor largest);
/// In place: dy becomes dy · gelu'(in).
void gelu_gradient(cudaStream_t stream, Tensor in, Tensor dy);

// coded_activation.cu
void coded_activation(cudaStream_t stream, const CodedActivation& args);
void coded_activation_backward(cudaStream_t stream, const CodedActivationBackward& args, Scratch& scratch);
std::int64_t coded_activation_backward_scratch(std::int64_t tokens, std::int64_t cols);

// embedding.cu
void embedding_forward(cudaStream_t stream, Tensor ids, Tensor table, std::int64_t first_id, Tensor positions,
                       Tensor position_table, Tensor out);
void embedding_backward(cudaStream_t stream, Tensor ids, Tensor order, Tensor dout, std::int64_t first_id,
                        Tensor dtable, Scratch& scratch);
std::int64_t embedding_backward_scratch(std::int64_t tokens, std::int64_t cols);

// bias.cu
/// y[t, j] += bias[j].
void add_bias(cudaStream_t stream, Tensor bias, Tensor y);
void bias_backward(cudaStream_t stream, Tensor dy, Tensor dbias, bool accumulate, Scratch& scratch);
/// sums[j] (+)= sum over rows of partials[r, j], in the order of the rows. partials: float32 [rows, cols],
/// rows `stride` elements apart. `second`, where given, gets the sums of as many rows behind those, and
/// `third`, which takes a second, of those behind them.
void sum_partials(cudaStream_t stream, const float* partials, std::int64_t rows, std::int64_t cols,
                  std::int64_t stride, float* sums, bool accumulate, float* second = nullptr,
                  float* third = nullptr);

// cross_entropy.cu
void cross_entropy_partial(cudaStream_t stream, Tensor logits, std::int64_t first_id, std::int64_t valid,
                           Tensor targets, Tensor partial, const Scratch& scratch);
void cross_entropy_finish(cudaStream_t stream, Tensor logits, std::int64_t first_id, std::int64_t valid,
                          Tensor targets, Tensor partials, double weight, bool gradient, StepScalars* scalars,
                          Scratch& scratch);
void cross_entropy(cudaStream_t stream, Tensor logits, std::int64_t valid, Tensor targets, Tensor partial,
                   bool gradient, StepScalars* scalars, Scratch& scratch);

// optimizer.cu
void add_square(cudaStream_t stream, Tensor x, StepScalars* scalars, Scratch& scratch);
void finish_step(cudaStream_t stream, StepScalars* scalars, Tensor rates, float clip, float beta1,
                 float beta2);
void adamw(cudaStream_t stream, const Adamw& args, const StepScalars* scalars);

// narrow_adamw.cu: moments or masters that are not float32
void narrow_adamw(cudaStream_t stream, const Adamw& args, const StepScalars* scalars);
void widen_state(cudaStream_t stream, const NarrowState& state, Tensor values);
void narrow_state(cudaStream_t stream, Tensor values, const NarrowState& state);

// quantize.cu
void largest_magnitude(cudaStream_t stream, Tensor x, Tensor largest, int multiprocessors);
void quantize(cudaStream_t stream, const Quantize& args);
void transpose_codes(cudaStream_t stream, Tensor from, Tensor to);
void remember_largest(cudaStream_t stream, Tensor seen, Tensor history, Tensor largest,
                      const StepScalars* scalars);

// elementwise.cu
void cast(cudaStream_t stream, Tensor from, Tensor to);
void add(cudaStream_t stream, Tensor from, Tensor to);
void copy_rows(cudaStream_t stream, DType dtype, std::int64_t batch, std::int64_t rows, std::int64_t columns,
               const SampleRows& from, const SampleRows& to, bool add);
void fill(cudaStream_t stream, Tensor values, float value);
void fill_normal(cudaStream_t stream, Tensor values, float deviation, std::uint64_t key,
                 std::int64_t first_index, std::int64_t stride);

// plain_attention.cu: float32, and what cuDNN does not take
void plain_attention_forward(cudaStream_t stream, const AttentionShape& shape,
                             const AttentionOperands& operands, SampleRows out, Tensor statistics);
void plain_attention_backward(cudaStream_t stream, const AttentionShape& shape,
                              const AttentionOperands& operands, SampleRows out, Tensor statistics,
                              SampleRows dout, SampleRows dquery, SampleRows dkey, SampleRows dvalue,
                              Scratch& scratch);
std::int64_t plain_attention_scratch(const AttentionShape& shape);

// tile_attention.cu: the gradient in bfloat16 on matrix units; documents apart cost what they hold
bool tile_attention_takes(const AttentionShape& shape, const AttentionOperands& operands, SampleRows out,
                          SampleRows dout, SampleRows dquery, SampleRows dkey, SampleRows dvalue);
/// Scratch as plain_attention_scratch().
void tile_attention_backward(cudaStream_t stream, const AttentionShape& shape,
                             const AttentionOperands& operands, SampleRows out, Tensor statistics,
                             SampleRows dout, SampleRows dquery, SampleRows dkey, SampleRows dvalue,
                             Scratch& scratch);

// document_limits.cu
/// limits[sample·stride + key] = keys - sequence + the number of query rows whose document starts at `key` or
/// before: the query row that belongs to key row j sees `key` while j is below it.
void document_key_limits(cudaStream_t stream, const AttentionShape& shape, Tensor document_starts,
                         std::int32_t* limits, std::int64_t stride);

}  // namespace octet::cuda
