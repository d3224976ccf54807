#include <cmath>

#include "cpu_ops.h"
#include "loops.h"

namespace octet {
namespace {

/// Column of the target in this rank's logits, or -1 where it lies elsewhere or there is no target.
std::int64_t target_column(std::int32_t target, std::int64_t first_id, std::int64_t valid) {
  const std::int64_t column = target - first_id;
  return target >= 0 && column >= 0 && column < valid ? column : -1;
}

struct TokenSoftmax {
  float peak = 0.0f;    ///< largest logit of the whole vocabulary
  double sum = 0.0;     ///< of exp(logit - peak)
  double target = 0.0;  ///< logit of the target
};

/// One token's statistics from the parts of all ranks.
TokenSoftmax combine(const float* partials, std::int64_t token, std::int64_t tokens, std::int64_t ranks) {
  const auto part = [&](std::int64_t rank) { return partials + (rank * tokens + token) * 3; };
  TokenSoftmax result;
  result.peak = cpu::largest(ranks, [&](std::int64_t rank) { return part(rank)[0]; });
  for (std::int64_t rank = 0; rank < ranks; ++rank) {
    const double share = part(rank)[1];
    if (share != 0.0) result.sum += share * std::exp(static_cast<double>(part(rank)[0]) - result.peak);
    result.target += static_cast<double>(part(rank)[2]);
  }
  return result;
}

template <typename T>
void write_gradient(T* row, std::int64_t cols, std::int64_t valid, std::int64_t target,
                    const TokenSoftmax& softmax) {
  const float inverse = static_cast<float>(1.0 / softmax.sum);
  const auto probability = [&](T logit) {
    return cpu::exp(static_cast<float>(logit) - softmax.peak) * inverse;
  };
  const T at_target = target >= 0 ? static_cast<T>(probability(row[target]) - 1.0f) : T{};
  for (std::int64_t j = 0; j < valid; ++j) row[j] = static_cast<T>(probability(row[j]));
  if (target >= 0) row[target] = at_target;
  std::fill(row + valid, row + cols, T{});
}

}  // namespace

void CpuOps::cross_entropy_partial(Stream&, Tensor logits, std::int64_t first_id, std::int64_t valid,
                                   Tensor targets, Tensor partial) {
  OCTET_ASSERT(targets.size() == logits.rows && partial.rows == logits.rows && partial.cols == 3);
  OCTET_ASSERT(valid >= 0 && valid <= logits.cols);
  cpu::with_type(logits.dtype, [&](auto zero) {
    using T = decltype(zero);
    for (std::int64_t token = 0; token < logits.rows; ++token) {
      const T* const row = logits.as<T>() + token * logits.cols;
      const auto logit = [&](std::int64_t j) { return static_cast<float>(row[j]); };
      const float peak = cpu::largest(valid, logit);
      const std::int64_t target = target_column(targets.as<std::int32_t>()[token], first_id, valid);
      float* const to = partial.as<float>() + token * 3;
      to[0] = peak;
      to[1] = static_cast<float>(cpu::sum(valid, [&](std::int64_t j) { return cpu::exp(logit(j) - peak); }));
      to[2] = target >= 0 ? logit(target) : 0.0f;
    }
  });
}

void CpuOps::cross_entropy_finish(Stream&, Tensor logits, std::int64_t first_id, std::int64_t valid,
                                  Tensor targets, Tensor partials, double weight, bool gradient,
                                  StepScalars* scalars) {
  const std::int64_t tokens = logits.rows;
  OCTET_ASSERT(targets.size() == tokens && partials.cols == 3 && valid >= 0 && valid <= logits.cols);
  if (tokens == 0) return;
  OCTET_ASSERT(partials.rows % tokens == 0);
  const std::int64_t ranks = partials.rows / tokens;
  double loss = 0.0, count = 0.0;
  cpu::with_type(logits.dtype, [&](auto zero) {
    using T = decltype(zero);
    for (std::int64_t token = 0; token < tokens; ++token) {
      const std::int32_t target = targets.as<std::int32_t>()[token];
      T* const row = logits.as<T>() + token * logits.cols;
      if (target < 0) {
        if (gradient) std::fill_n(row, logits.cols, T{});
        continue;
      }
      const TokenSoftmax softmax = combine(partials.as<float>(), token, tokens, ranks);
      loss += std::log(softmax.sum) + softmax.peak - softmax.target;
      count += 1.0;
      if (gradient) {
        write_gradient(row, logits.cols, valid, target_column(target, first_id, valid), softmax);
      }
    }
  });
  if (weight == 0.0) return;
  scalars->loss += weight * loss;
  scalars->tokens += weight * count;
}

void CpuOps::cross_entropy(Stream& stream, Tensor logits, std::int64_t valid, Tensor targets, Tensor partial,
                           bool gradient, StepScalars* scalars) {
  cross_entropy_partial(stream, logits, 0, valid, targets, partial);
  cross_entropy_finish(stream, logits, 0, valid, targets, partial, 1.0, gradient, scalars);
}

}  // namespace octet
