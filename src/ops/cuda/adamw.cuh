#pragma once

namespace octet::cuda {

/// A number that much is divided by: three products instead of a division each, with the bits of one wherever
/// nothing is denormal (Markstein, IBM J. Res. Dev. 34, 1990).
struct Divisor {
  float value, inverse;

  __device__ Divisor(float of) : value(of), inverse(1.0f / of) {}
  __device__ float divide(float x) const {
    const float quotient = __fmul_rn(x, inverse);
    if (!(fabsf(quotient) < INFINITY)) return quotient;
    return __fmaf_rn(__fmaf_rn(-value, quotient, x), inverse, quotient);
  }
};

/// What AdamW goes by in a step.
struct AdamwStep {
  float gradient_scale, learning_rate;
  Divisor bias_correction1, bias_correction2;
  float beta1, beta2, epsilon, weight_decay;
};

/// AdamW on one element. Which products are fused with a sum is spelled out, so that all kernels compute the
/// same bits.
__device__ inline void update_element(const AdamwStep& s, float gradient, float& master, float& first,
                                      float& second) {
  const float g = __fmul_rn(s.gradient_scale, gradient);
  first = __fmaf_rn(s.beta1, first, __fmul_rn(1.0f - s.beta1, g));
  second = __fmaf_rn(__fmul_rn(1.0f - s.beta2, g), g, __fmul_rn(s.beta2, second));
  const float root = sqrtf(s.bias_correction2.divide(second));
  const float direction = s.bias_correction1.divide(first) / (root + s.epsilon);
  master = __fmaf_rn(-s.learning_rate, __fmaf_rn(s.weight_decay, master, direction), master);
}

}  // namespace octet::cuda
