#pragma once

namespace octet::cuda {

/// What AdamW goes by in a step.
struct AdamwStep {
  float gradient_scale, learning_rate, bias_correction1, bias_correction2;
  float beta1, beta2, epsilon, weight_decay;
};

/// AdamW on one element. Which products are fused with a sum is spelled out, so that all kernels compute the
/// same bits.
__device__ inline void update_element(const AdamwStep& s, float gradient, float& master, float& first,
                                      float& second) {
  const float g = __fmul_rn(s.gradient_scale, gradient);
  first = __fmaf_rn(s.beta1, first, __fmul_rn(1.0f - s.beta1, g));
  second = __fmaf_rn(__fmul_rn(1.0f - s.beta2, g), g, __fmul_rn(s.beta2, second));
  const float root = sqrtf(second / s.bias_correction2);
  const float direction = first / s.bias_correction1 / (root + s.epsilon);
  master = __fmaf_rn(-s.learning_rate, __fmaf_rn(s.weight_decay, master, direction), master);
}

}  // namespace octet::cuda
