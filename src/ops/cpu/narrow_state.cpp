#include "narrow_state.h"

#include "cpu_ops.h"

namespace octet {
namespace cpu {

void widen(const NarrowState& state, float* values) {
  const std::int64_t count = state.stored.size();
  const ParameterRun run{.begin = state.begin};
  switch (state.stored.dtype) {
    case DType::kBF16:
      for (std::int64_t i = 0; i < count; ++i) values[i] = static_cast<float>(state.stored.as<BF16>()[i]);
      return;
    case DType::kI8:
      for (std::int64_t i = 0; i < count; ++i)
        values[i] = narrow::from_first_code(state.stored.as<std::int8_t>()[i],
                                            state.companion.as<float>()[run.block(i)]);
      return;
    case DType::kU8:
      for (std::int64_t i = 0; i < count; ++i)
        values[i] = narrow::from_second_code(state.stored.as<std::uint8_t>()[i],
                                             state.companion.as<float>()[run.block(i)]);
      return;
    default:
      for (std::int64_t i = 0; i < count; ++i)
        values[i] = narrow::join({state.companion.as<BF16>()[i].bits, state.stored.as<std::int16_t>()[i]});
  }
}

void narrow_master(const float* values, const NarrowState& state) {
  auto* const remainder = state.stored.as<std::int16_t>();
  auto* const parameter = state.companion.as<BF16>();
  for (std::int64_t i = 0; i < state.stored.size(); ++i) {
    const narrow::SplitMaster parts = narrow::split(values[i]);
    parameter[i].bits = parts.parameter;
    remainder[i] = parts.remainder;
  }
}

}  // namespace cpu

void CpuOps::widen_state(Stream&, const NarrowState& state, Tensor values) {
  OCTET_ASSERT(values.size() == state.stored.size());
  cpu::widen(state, values.as<float>());
}

void CpuOps::narrow_state(Stream&, Tensor values, const NarrowState& state) {
  const std::int64_t count = values.size();
  OCTET_ASSERT(count == state.stored.size());
  if (state.stored.dtype == DType::kI16) return cpu::narrow_master(values.as<float>(), state);
  const ParameterRun run{.begin = state.begin};
  for (std::int64_t at = 0, size = 0; at < count; at += size) {
    size = std::min(count - at, kMomentBlock - (state.begin + at) % kMomentBlock);
    cpu::narrow_codes(values.as<float>() + at,
                      {state.stored.range(at, size), state.companion.range(run.block(at), 1)},
                      [](std::int64_t) { return narrow::kNearest; });
  }
}

}  // namespace octet
