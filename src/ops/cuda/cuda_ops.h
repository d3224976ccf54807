#pragma once

#include <cuda_runtime_api.h>

#include <memory>

#include "../hopper/attention_forward.h"
#include "../hopper/attention_gradient.h"
#include "cudnn_attention.h"
#include "matmul_plans.h"
#include "octet/ops/ops.h"
#include "scratch.h"

namespace octet {

/// Operators on one CUDA device: cuBLASLt and own kernels for products, cuDNN and own kernels for bfloat16
/// attention, own kernels for the rest. All methods but `adamw`, `add`, `cast`, `fill` and `fill_normal`
/// share scratch memory and so belong on one stream.
class CudaOps final : public Ops {
 public:
  CudaOps(Device& device, const CudaOpsOptions& options);

  void prepare(const Workload& workload) override;
  std::int64_t workspace_bytes() const override { return scratch_.bytes(); }

  void matmul(Stream& stream, const Matmul& args) override;
  void largest_magnitude(Stream& stream, Tensor x, Tensor largest) override;
  void quantize(Stream& stream, const Quantize& args) override;
  void transpose_codes(Stream& stream, Tensor from, Tensor to) override;
  void remember_largest(Stream& stream, Tensor seen, Tensor history, Tensor largest,
                        const StepScalars* scalars) override;
  void time_products(Stream& stream) override;

  void norm_forward(Stream& stream, const NormForward& args) override;
  void norm_backward(Stream& stream, const NormBackward& args) override;

  void rope(Stream& stream, const HeadLayout& layout, Tensor qkv, Tensor positions, Tensor cos_sin,
            bool inverse) override;
  void head_norm_forward(Stream& stream, const HeadLayout& layout, float epsilon, Tensor in, Tensor q_weight,
                         Tensor k_weight, Tensor out, Tensor rstd) override;
  void head_norm_backward(Stream& stream, const HeadLayout& layout, Tensor in, Tensor rstd, Tensor q_weight,
                          Tensor k_weight, Tensor dqkv, Tensor dq_weight, Tensor dk_weight,
                          bool accumulate) override;

  void attention_forward(Stream& stream, const AttentionShape& shape, const AttentionOperands& operands,
                         SampleRows out, Tensor statistics) override;
  void attention_backward(Stream& stream, const AttentionShape& shape, const AttentionOperands& operands,
                          SampleRows out, Tensor statistics, SampleRows dout, SampleRows dquery,
                          SampleRows dkey, SampleRows dvalue) override;

  void swiglu_forward(Stream& stream, Tensor gate_up, Tensor out, Tensor largest) override;
  void swiglu_backward(Stream& stream, Tensor gate_up, Tensor dout, Tensor largest) override;
  void gelu_forward(Stream& stream, Tensor in, Tensor out, Tensor largest) override;
  void gelu_backward(Stream& stream, Tensor in, Tensor dout, Tensor largest) override;
  void coded_activation(Stream& stream, const CodedActivation& args) override;
  void coded_activation_backward(Stream& stream, const CodedActivationBackward& args) override;

  void embedding_forward(Stream& stream, Tensor ids, Tensor table, std::int64_t first_id, Tensor positions,
                         Tensor position_table, Tensor out) override;
  void embedding_backward(Stream& stream, Tensor ids, Tensor order, Tensor dout, std::int64_t first_id,
                          Tensor dtable) override;

  void bias_backward(Stream& stream, Tensor dy, Tensor dbias, bool accumulate) override;

  void cross_entropy_partial(Stream& stream, Tensor logits, std::int64_t first_id, std::int64_t valid,
                             Tensor targets, Tensor partial) override;
  void cross_entropy_finish(Stream& stream, Tensor logits, std::int64_t first_id, std::int64_t valid,
                            Tensor targets, Tensor partials, double weight, bool gradient,
                            StepScalars* scalars) override;
  void cross_entropy(Stream& stream, Tensor logits, std::int64_t valid, Tensor targets, Tensor partial,
                     bool gradient, StepScalars* scalars) override;

  void add_square(Stream& stream, Tensor x, StepScalars* scalars) override;
  void finish_step(Stream& stream, StepScalars* scalars, Tensor rates, float clip, float beta1,
                   float beta2) override;
  void adamw(Stream& stream, const Adamw& args, const StepScalars* scalars) override;
  void widen_state(Stream& stream, const NarrowState& state, Tensor values) override;
  void narrow_state(Stream& stream, Tensor values, const NarrowState& state) override;

  void cast(Stream& stream, Tensor from, Tensor to) override;
  void add(Stream& stream, Tensor from, Tensor to) override;
  void copy_rows(Stream& stream, DType dtype, std::int64_t batch, std::int64_t rows, std::int64_t columns,
                 const SampleRows& from, const SampleRows& to, bool add) override;
  void fill_normal(Stream& stream, Tensor values, float deviation, std::uint64_t key,
                   std::int64_t first_index, std::int64_t stride) override;
  void fill(Stream& stream, Tensor values, float value) override;

 private:
  /// Makes the device current for this thread.
  cudaStream_t enter(Stream& stream) const;
  /// Whether bfloat16 attention of some shape with these queries and no more keys may be cuDNN's.
  bool needs_cudnn(const AttentionShape& shape, bool documents) const;

  int ordinal_;
  cuda::Scratch scratch_;
  cuda::MatmulPlans matmul_;
  cuda::CudnnAttention attention_;
  OwnKernels own_attention_;
  hopper::AttentionForward attention_forward_;
  hopper::AttentionGradients attention_gradients_;
};

}  // namespace octet
