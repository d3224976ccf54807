#pragma once

#include "fast_exp2.cuh"
#include "kernel_tools.cuh"

// SwiGLU and GELU of one element, for results that are rounded to T.
namespace octet::cuda {

template <typename T>
__device__ inline float sigmoid(float x) {
  if constexpr (std::is_same_v<T, bf16>) {
    return __fdividef(1.0f, 1.0f + fast_exp2(-1.4426950408889634f * x));  // of log2(e)
  } else {
    return 1.0f / (1.0f + expf(-x));
  }
}

/// tanh(x) = 2·sigmoid(2x) - 1, good enough where the result is rounded to bfloat16.
template <typename T>
__device__ inline float hyperbolic_tangent(float x) {
  if constexpr (std::is_same_v<T, bf16>) {
    return 2.0f * sigmoid<T>(2.0f * x) - 1.0f;
  } else {
    return tanhf(x);
  }
}

constexpr float kGeluScale = 0.7978845608028654f;  // sqrt(2/pi)
constexpr float kGeluCubic = 0.044715f;

template <typename T>
__device__ inline float swiglu(float gate, float up) {
  return gate * sigmoid<T>(gate) * up;
}

template <typename T>
__device__ inline float gelu(float x) {
  return 0.5f * x * (1.0f + hyperbolic_tangent<T>(kGeluScale * (x + kGeluCubic * x * x * x)));
}

/// Of gelu(x), with t = tanh(scale·(x + cubic·x³)).
__device__ inline float gelu_derivative(float x, float t) {
  const float inner = kGeluScale * (1.0f + 3.0f * kGeluCubic * x * x);
  return 0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * inner;
}

struct SwigluPasses {
  float dgate, dup, out;
};

/// The gradients of gate and up, and the forward output.
template <typename T>
__device__ inline SwigluPasses swiglu_passes(float gate, float up, float dout) {
  const float s = sigmoid<T>(gate), silu = gate * s;
  return {dout * up * s * (1.0f + gate * (1.0f - s)), dout * silu, silu * up};
}

struct GeluPasses {
  float din, out;
};

/// The gradient of x, and the forward output.
template <typename T>
__device__ inline GeluPasses gelu_passes(float x, float dout) {
  const float t = hyperbolic_tangent<T>(kGeluScale * (x + kGeluCubic * x * x * x));
  return {dout * gelu_derivative(x, t), 0.5f * x * (1.0f + t)};
}

}  // namespace octet::cuda
