#include <algorithm>
#include <cmath>

#include "cpu_ops.h"
#include "loops.h"

namespace octet {

void CpuOps::add_square(Stream&, Tensor x, StepScalars* scalars) {
  const float* const values = x.as<float>();
  scalars->gradient_square += cpu::sum(x.size(), [&](std::int64_t i) {
    const double value = values[i];
    return value * value;
  });
}

void CpuOps::finish_step(Stream&, StepScalars* scalars, Tensor rates, float clip, float beta1, float beta2) {
  OCTET_ASSERT(rates.size() > 0);
  StepScalars& s = *scalars;
  const bool empty = !(s.tokens > 0.0);
  const double norm = empty ? 0.0 : std::sqrt(s.gradient_square) / s.tokens;
  const double clipping = clip > 0.0f && norm > clip ? clip / norm : 1.0;
  s.gradient_norm = static_cast<float>(norm);
  s.learning_rate = rates.as<float>()[std::min(s.updates, rates.size() - 1)];
  s.skip = empty || !std::isfinite(s.gradient_square) || !std::isfinite(s.loss);
  if (s.skip) return;
  s.gradient_scale = static_cast<float>(clipping / s.tokens);
  s.updates += 1;
  const double updates = static_cast<double>(s.updates);
  s.bias_correction1 = static_cast<float>(1.0 - std::pow(static_cast<double>(beta1), updates));
  s.bias_correction2 = static_cast<float>(1.0 - std::pow(static_cast<double>(beta2), updates));
}

void CpuOps::adamw(Stream&, const Adamw& args, const StepScalars* scalars) {
  const std::int64_t count = args.master.size();
  OCTET_ASSERT(args.first_moment.size() == count && args.second_moment.size() == count);
  OCTET_ASSERT(args.gradient.size() == count && (!args.parameter || args.parameter.size() == count));
  if (scalars->skip) return;
  const StepScalars s = *scalars;
  float* const master = args.master.as<float>();
  float* const first = args.first_moment.as<float>();
  float* const second = args.second_moment.as<float>();
  const float* const gradient = args.gradient.as<float>();
  cpu::with_type(args.parameter.dtype, [&](auto zero) {
    using T = decltype(zero);
    T* const parameter = args.parameter.as<T>();
    for (std::int64_t i = 0; i < count; ++i) {
      const float g = s.gradient_scale * gradient[i];
      first[i] = args.beta1 * first[i] + (1.0f - args.beta1) * g;
      second[i] = args.beta2 * second[i] + (1.0f - args.beta2) * g * g;
      const float root = std::sqrt(second[i] / s.bias_correction2);
      const float direction = first[i] / s.bias_correction1 / (root + args.epsilon);
      master[i] -= s.learning_rate * (direction + args.weight_decay * master[i]);
      if (parameter != nullptr) parameter[i] = static_cast<T>(master[i]);
    }
  });
}

}  // namespace octet
