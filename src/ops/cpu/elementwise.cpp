#include "../float8_checks.h"
#include "cpu_ops.h"
#include "gelu.h"
#include "loops.h"
#include "octet/base/rng.h"

namespace octet {

void CpuOps::swiglu_forward(Stream&, Tensor gate_up, Tensor out, Tensor largest) {
  OCTET_ASSERT(gate_up.rows == out.rows && gate_up.cols == 2 * out.cols);
  check_largest(out, largest);
  cpu::with_type(out.dtype, [&](auto zero) {
    using T = decltype(zero);
    for (std::int64_t row = 0; row < out.rows; ++row) {
      const T* const gate = gate_up.as<T>() + row * gate_up.cols;
      const T* const up = gate + out.cols;
      T* const to = out.as<T>() + row * out.cols;
      for (std::int64_t j = 0; j < out.cols; ++j) {
        const float g = static_cast<float>(gate[j]);
        to[j] = static_cast<T>(g * cpu::sigmoid(g) * static_cast<float>(up[j]));
      }
      cpu::raise_largest(largest, to, out.cols);
    }
  });
}

void CpuOps::swiglu_backward(Stream&, Tensor gate_up, Tensor dout, Tensor largest) {
  OCTET_ASSERT(gate_up.rows == dout.rows && gate_up.cols == 2 * dout.cols);
  check_largest(gate_up, largest);
  cpu::with_type(dout.dtype, [&](auto zero) {
    using T = decltype(zero);
    for (std::int64_t row = 0; row < dout.rows; ++row) {
      T* const gate = gate_up.as<T>() + row * gate_up.cols;
      T* const up = gate + dout.cols;
      T* const gradient = dout.as<T>() + row * dout.cols;
      for (std::int64_t j = 0; j < dout.cols; ++j) {
        const float g = static_cast<float>(gate[j]), u = static_cast<float>(up[j]);
        const float d = static_cast<float>(gradient[j]);
        const float gating = cpu::sigmoid(g), silu = g * gating;
        gate[j] = static_cast<T>(d * u * (gating + silu * (1.0f - gating)));
        up[j] = static_cast<T>(d * silu);
        gradient[j] = static_cast<T>(silu * u);
      }
      cpu::raise_largest(largest, gate, gate_up.cols);
    }
  });
}

void CpuOps::gelu_forward(Stream&, Tensor in, Tensor out, Tensor largest) {
  OCTET_ASSERT(in.size() == out.size());
  check_largest(out, largest);
  cpu::with_type(in.dtype, [&](auto zero) {
    using T = decltype(zero);
    for (std::int64_t row = 0; row < in.rows; ++row) {
      const T* const from = in.as<T>() + row * in.cols;
      T* const to = out.as<T>() + row * in.cols;
      for (std::int64_t j = 0; j < in.cols; ++j) {
        const float x = static_cast<float>(from[j]);
        to[j] = static_cast<T>(x * cpu::gelu_gate(x));
      }
      cpu::raise_largest(largest, to, in.cols);
    }
  });
}

void CpuOps::gelu_backward(Stream&, Tensor in, Tensor dout, Tensor largest) {
  OCTET_ASSERT(in.size() == dout.size());
  check_largest(in, largest);
  cpu::with_type(in.dtype, [&](auto zero) {
    using T = decltype(zero);
    for (std::int64_t row = 0; row < in.rows; ++row) {
      T* const values = in.as<T>() + row * in.cols;
      T* const gradients = dout.as<T>() + row * in.cols;
      for (std::int64_t j = 0; j < in.cols; ++j) {
        const float x = static_cast<float>(values[j]);
        const float gate = cpu::gelu_gate(x);
        values[j] = static_cast<T>(static_cast<float>(gradients[j]) * cpu::gelu_derivative(x, gate));
        gradients[j] = static_cast<T>(x * gate);
      }
      cpu::raise_largest(largest, values, in.cols);
    }
  });
}

void CpuOps::bias_backward(Stream&, Tensor dy, Tensor dbias, bool accumulate) {
  OCTET_ASSERT(dbias.size() == dy.cols);
  cpu::with_type(dy.dtype, [&](auto zero) {
    using T = decltype(zero);
    cpu::sum_columns(dy.rows, dy.cols, dbias.as<float>(), accumulate,
                     [&](std::int64_t row, std::int64_t begin, std::int64_t count, double* sums) {
                       const T* const line = dy.as<T>() + row * dy.cols + begin;
                       for (std::int64_t j = 0; j < count; ++j) sums[j] += static_cast<float>(line[j]);
                     });
  });
}

void CpuOps::cast(Stream&, Tensor from, Tensor to) {
  OCTET_ASSERT(from.size() == to.size());
  cpu::with_type(from.dtype, [&](auto from_zero) {
    cpu::with_type(to.dtype, [&](auto to_zero) {
      const auto* const source = from.as<decltype(from_zero)>();
      auto* const target = to.as<decltype(to_zero)>();
      for (std::int64_t i = 0, count = from.size(); i < count; ++i) {
        target[i] = static_cast<decltype(to_zero)>(static_cast<float>(source[i]));
      }
    });
  });
}

void CpuOps::add(Stream&, Tensor from, Tensor to) {
  OCTET_ASSERT(from.size() == to.size());
  cpu::with_type(from.dtype, [&](auto from_zero) {
    cpu::with_type(to.dtype, [&](auto to_zero) {
      const auto* const source = from.as<decltype(from_zero)>();
      auto* const target = to.as<decltype(to_zero)>();
      for (std::int64_t i = 0, count = from.size(); i < count; ++i) {
        target[i] =
            static_cast<decltype(to_zero)>(static_cast<float>(target[i]) + static_cast<float>(source[i]));
      }
    });
  });
}

void CpuOps::fill_normal(Stream&, Tensor values, float deviation, std::uint64_t key, std::int64_t first_index,
                         std::int64_t stride) {
  float* to = values.as<float>();
  for (std::int64_t row = 0; row < values.rows; ++row, to += values.cols) {
    const std::int64_t first = first_index + row * stride;
    for (std::int64_t j = 0; j < values.cols; ++j) {
      to[j] = deviation * normal_at(key, static_cast<std::uint64_t>(first + j));
    }
  }
}

void CpuOps::fill(Stream&, Tensor values, float value) {
  cpu::with_type(values.dtype, [&](auto zero) {
    using T = decltype(zero);
    std::fill_n(values.as<T>(), values.size(), static_cast<T>(value));
  });
}

void CpuOps::copy_rows(Stream&, DType dtype, std::int64_t batch, std::int64_t rows, std::int64_t columns,
                       const SampleRows& from, const SampleRows& to, bool add) {
  cpu::with_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    for (std::int64_t row = 0; row < batch * rows; ++row) {
      const std::int64_t sample = row / rows, at = row % rows;
      const T* const source =
          static_cast<const T*>(from.data) + sample * from.sample_stride + at * from.row_stride;
      T* const target = static_cast<T*>(to.data) + sample * to.sample_stride + at * to.row_stride;
      for (std::int64_t i = 0; i < columns; ++i) {
        target[i] =
            add ? static_cast<T>(static_cast<float>(target[i]) + static_cast<float>(source[i])) : source[i];
      }
    }
  });
}

}  // namespace octet
