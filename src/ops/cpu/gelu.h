#pragma once

#include "loops.h"

namespace octet::cpu {

// gelu(x) = x · sigmoid(slope(x)): the tanh form, by 1 + tanh(z) = 2·sigmoid(2z).
inline constexpr float kGeluSlope = 1.59576912f;  // 2·sqrt(2/pi)
inline constexpr float kGeluCubic = 0.044715f;

/// gelu(x) / x.
inline float gelu_gate(float x) {
  return sigmoid(kGeluSlope * (x + kGeluCubic * x * x * x));
}

/// gelu'(x), with gate = gelu_gate(x).
inline float gelu_derivative(float x, float gate) {
  const float slope = kGeluSlope * (1.0f + 3.0f * kGeluCubic * x * x);
  return gate + x * slope * gate * (1.0f - gate);
}

}  // namespace octet::cpu
