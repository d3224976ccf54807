#pragma once

#include <cblas.h>

#include <cstdint>

namespace octet::cpu {

/// A row-major float32 matrix whose rows lie `stride` elements apart, read as its transpose where
/// `transposed`.
struct Operand {
  const float* data = nullptr;
  std::int64_t stride = 0;
  bool transposed = false;
};

/// c [m, n] = alpha · a [m, k] · b [k, n] + beta · c. With beta 0, c may hold anything, even NaN.
inline void gemm(std::int64_t m, std::int64_t n, std::int64_t k, float alpha, Operand a, Operand b,
                 float beta, float* c, std::int64_t c_stride) {
  const auto order = [](const Operand& x) { return x.transposed ? CblasTrans : CblasNoTrans; };
  cblas_sgemm(CblasRowMajor, order(a), order(b), static_cast<blasint>(m), static_cast<blasint>(n),
              static_cast<blasint>(k), alpha, a.data, static_cast<blasint>(a.stride), b.data,
              static_cast<blasint>(b.stride), beta, c, static_cast<blasint>(c_stride));
}

}  // namespace octet::cpu
