#include <algorithm>
#include <cmath>

#include "cpu_ops.h"
#include "loops.h"
#include "narrow_state.h"

namespace octet {
namespace {

/// AdamW on float32 memory. Not inlined, so that all ways to keep state compute the same bits.
[[gnu::noinline]] void update(std::int64_t count, float* master, float* first, float* second,
                              const float* gradient, const Adamw& args, const StepScalars& s) {
  for (std::int64_t i = 0; i < count; ++i) {
    const float g = s.gradient_scale * gradient[i];
    first[i] = args.beta1 * first[i] + (1.0f - args.beta1) * g;
    second[i] = args.beta2 * second[i] + (1.0f - args.beta2) * g * g;
    const float root = std::sqrt(second[i] / s.bias_correction2);
    const float direction = first[i] / s.bias_correction1 / (root + args.epsilon);
    master[i] -= s.learning_rate * (direction + args.weight_decay * master[i]);
  }
}

/// The random numbers of elements [at, at + size) of a run.
void draw(const ParameterRun& run, std::int64_t at, std::int64_t size, std::int64_t updates,
          std::uint32_t* words) {
  PhiloxWords drawn{};
  std::int64_t eight = -1;
  for (std::int64_t i = 0; i < size; ++i) {
    const std::int64_t global = run.global(at + i);
    if (global / 8 != eight) {
      eight = global / 8;
      drawn = narrow::rounding_words(run.key, eight, updates);
    }
    words[i] = narrow::rounding_word(drawn, static_cast<int>(global % 8));
  }
}

void store_bf16(const float* values, Tensor moment, int shift, const std::uint32_t* words) {
  BF16* const to = moment.as<BF16>();
  for (std::int64_t i = 0; i < moment.size(); ++i)
    to[i].bits = narrow::to_bf16_by_chance(values[i], (words[i] >> shift) & 0xffffu);
}

}  // namespace

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
  const bool split = args.master.dtype == DType::kI16;
  OCTET_ASSERT(!split || args.parameter.dtype == DType::kBF16);
  const DType moments = args.first_moment.dtype;
  if (scalars->skip) return;
  // Pieces that stay in cache between the passes over them; one block of codes where there may be some.
  const std::int64_t piece = split || moments != DType::kF32 ? kMomentBlock : 4 * kMomentBlock;
  float memory[3][kMomentBlock];
  std::uint32_t words[kMomentBlock];
  for (std::int64_t at = 0, size = 0; at < count; at += size) {
    size = std::min(count - at, piece - (args.run.begin + at) % piece);
    const std::int64_t block = args.run.block(at);
    const Tensor stored_master = args.master.range(at, size),
                 stored_first = args.first_moment.range(at, size),
                 stored_second = args.second_moment.range(at, size);
    const Tensor parameter = args.parameter ? args.parameter.range(at, size) : Tensor{};
    const NarrowState first_codes{stored_first,
                                  moments == DType::kI8 ? args.first_scale.range(block, 1) : Tensor{},
                                  args.run.begin + at};
    const NarrowState second_codes{stored_second,
                                   moments == DType::kI8 ? args.second_scale.range(block, 1) : Tensor{},
                                   args.run.begin + at};
    // In place where the state is float32.
    const auto widened = [&](const NarrowState& state, float* room) {
      if (state.stored.dtype == DType::kF32) return state.stored.as<float>();
      cpu::widen(state, room);
      return room;
    };
    float* const master = widened({stored_master, parameter}, memory[0]);
    float* const first = widened(first_codes, memory[1]);
    float* const second = widened(second_codes, memory[2]);
    update(size, master, first, second, args.gradient.as<float>() + at, args, *scalars);
    if (moments != DType::kF32) draw(args.run, at, size, scalars->updates, words);
    if (moments == DType::kBF16) {
      store_bf16(first, stored_first, 0, words);
      store_bf16(second, stored_second, 16, words);
    } else if (moments == DType::kI8) {
      cpu::narrow_codes(first, first_codes, [&](std::int64_t i) { return words[i] & 0xffffu; });
      cpu::narrow_codes(second, second_codes, [&](std::int64_t i) { return words[i] >> 16; });
    }
    if (split) {
      cpu::narrow_master(master, {stored_master, parameter});
    } else if (parameter) {
      cpu::with_type(parameter.dtype, [&](auto zero) {
        using T = decltype(zero);
        T* const to = parameter.as<T>();
        for (std::int64_t i = 0; i < size; ++i) to[i] = static_cast<T>(master[i]);
      });
    }
  }
}

}  // namespace octet
