// Operators on the single heads of a packed query-key-value projection: rotary embedding and QK norm.
#include <cmath>

#include "cpu_ops.h"
#include "loops.h"

namespace octet {
namespace {

template <typename T>
void rotate(T* head, int half, const float* cosines, const float* sines, float direction) {
  for (int i = 0; i < half; ++i) {
    const float a = static_cast<float>(head[i]), b = static_cast<float>(head[half + i]);
    const float c = cosines[i], s = direction * sines[i];
    head[i] = static_cast<T>(a * c - b * s);
    head[half + i] = static_cast<T>(b * c + a * s);
  }
}

template <typename T>
float normalise(const T* in, const T* weight, int size, float epsilon, T* out) {
  const double square = cpu::sum(size, [&](std::int64_t i) {
    const float x = static_cast<float>(in[i]);
    return x * x;
  });
  const float rstd = static_cast<float>(1.0 / std::sqrt(square / size + static_cast<double>(epsilon)));
  for (int i = 0; i < size; ++i) {
    out[i] = static_cast<T>(static_cast<float>(in[i]) * rstd * static_cast<float>(weight[i]));
  }
  return rstd;
}

/// gradient of the output -> gradient of the input, as in norm_backward, in place.
template <typename T>
void normalise_backward(const T* in, const T* weight, int size, float rstd, T* gradient) {
  const auto g = [&](std::int64_t i) {
    return static_cast<float>(gradient[i]) * static_cast<float>(weight[i]);
  };
  const auto normal = [&](std::int64_t i) { return static_cast<float>(in[i]) * rstd; };
  const float along =
      static_cast<float>(cpu::sum(size, [&](std::int64_t i) { return g(i) * normal(i); }) / size);
  for (int i = 0; i < size; ++i) gradient[i] = static_cast<T>(rstd * (g(i) - normal(i) * along));
}

template <typename T>
void head_weight_gradient(const HeadLayout& layout, int first_head, int heads, const Tensor& in,
                          const Tensor& rstd, const Tensor& dqkv, const Tensor& dweight, bool accumulate) {
  const int size = layout.head_size;
  const auto add_row = [&](std::int64_t row, std::int64_t begin, std::int64_t count, double* sums) {
    const std::int64_t token = row / heads, head = first_head + row % heads;
    const std::int64_t at = token * layout.packed() + head * size + begin;
    const T* const x = in.as<T>() + at;
    const T* const gradient = dqkv.as<T>() + at;
    const float scale = rstd.as<float>()[token * rstd.cols + head];
    for (std::int64_t i = 0; i < count; ++i) {
      sums[i] += static_cast<double>(static_cast<float>(gradient[i]) * (static_cast<float>(x[i]) * scale));
    }
  };
  cpu::sum_columns(in.rows * heads, size, dweight.as<float>(), accumulate, add_row);
}

}  // namespace

void CpuOps::rope(Stream&, const HeadLayout& layout, Tensor qkv, Tensor positions, Tensor cos_sin,
                  bool inverse) {
  OCTET_ASSERT(qkv.cols == layout.packed() && positions.size() == qkv.rows &&
               cos_sin.cols == layout.head_size);
  const int half = layout.head_size / 2;
  cpu::with_type(qkv.dtype, [&](auto zero) {
    using T = decltype(zero);
    for (std::int64_t token = 0; token < qkv.rows; ++token) {
      const std::int64_t position = positions.as<std::int32_t>()[token];
      OCTET_ASSERT(position >= 0 && position < cos_sin.rows);
      const float* const cosines = cos_sin.as<float>() + position * cos_sin.cols;
      T* const row = qkv.as<T>() + token * qkv.cols;
      for (int head = 0; head < layout.heads + layout.kv_heads; ++head) {
        rotate(row + head * layout.head_size, half, cosines, cosines + half, inverse ? -1.0f : 1.0f);
      }
    }
  });
}

void CpuOps::head_norm_forward(Stream&, const HeadLayout& layout, float epsilon, Tensor in, Tensor q_weight,
                               Tensor k_weight, Tensor out, Tensor rstd) {
  const int normed = layout.heads + layout.kv_heads, size = layout.head_size;
  OCTET_ASSERT(in.cols == layout.packed() && out.cols == in.cols && out.rows == in.rows);
  OCTET_ASSERT(q_weight.size() == size && k_weight.size() == size);
  OCTET_ASSERT(rstd.rows == in.rows && rstd.cols == normed);
  cpu::with_type(in.dtype, [&](auto zero) {
    using T = decltype(zero);
    for (std::int64_t token = 0; token < in.rows; ++token) {
      const T* const from = in.as<T>() + token * in.cols;
      T* const to = out.as<T>() + token * in.cols;
      for (int head = 0; head < normed; ++head) {
        const T* const weight = (head < layout.heads ? q_weight : k_weight).as<T>();
        rstd.as<float>()[token * normed + head] =
            normalise(from + head * size, weight, size, epsilon, to + head * size);
      }
      std::copy(from + normed * size, from + in.cols, to + normed * size);
    }
  });
}

void CpuOps::head_norm_backward(Stream&, const HeadLayout& layout, Tensor in, Tensor rstd, Tensor q_weight,
                                Tensor k_weight, Tensor dqkv, Tensor dq_weight, Tensor dk_weight,
                                bool accumulate) {
  const int normed = layout.heads + layout.kv_heads, size = layout.head_size;
  OCTET_ASSERT(in.cols == layout.packed() && dqkv.cols == in.cols && dqkv.rows == in.rows);
  OCTET_ASSERT(q_weight.size() == size && k_weight.size() == size);
  OCTET_ASSERT(dq_weight.size() == size && dk_weight.size() == size);
  OCTET_ASSERT(rstd.rows == in.rows && rstd.cols == normed);
  cpu::with_type(in.dtype, [&](auto zero) {
    using T = decltype(zero);
    head_weight_gradient<T>(layout, 0, layout.heads, in, rstd, dqkv, dq_weight, accumulate);
    head_weight_gradient<T>(layout, layout.heads, layout.kv_heads, in, rstd, dqkv, dk_weight, accumulate);
    for (std::int64_t token = 0; token < in.rows; ++token) {
      for (int head = 0; head < normed; ++head) {
        const std::int64_t at = token * in.cols + head * size;
        const T* const weight = (head < layout.heads ? q_weight : k_weight).as<T>();
        normalise_backward(in.as<T>() + at, weight, size, rstd.as<float>()[token * normed + head],
                           dqkv.as<T>() + at);
      }
    }
  });
}

}  // namespace octet
