// AdamW where moments or masters are narrower than float32, and their way to float32 and back.
// Bytes moved a parameter, reading and writing, gradient and bfloat16 parameter included:
//
//              float32 moments   bfloat16 moments   8-bit moments
//   float32          30                 22              18 + 1/16
//   split            28                 20              16 + 1/16
//
// (float32 with float32 moments is in optimizer.cu.) A thread has eight elements and moves 16 bytes at a
// time, 8 of codes; the 256 elements of a warp are one block of codes.
#include <algorithm>
#include <type_traits>

#include "../optimizer_state.h"
#include "adamw.cuh"
#include "drivers.h"
#include "kernel_tools.cuh"

namespace octet::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kPack = 8;
static_assert(32 * kPack == kMomentBlock, "a warp has one block of codes");

/// A thread's eight elements of a run of `size`, some of which may lie outside of it.
struct Lane {
  std::int64_t first, size;
  bool whole;  ///< all lie in the run, at addresses that take full accesses

  __device__ bool holds(int n) const { return first + n >= 0 && first + n < size; }
  __device__ std::int64_t block() const { return (std::int64_t{blockIdx.x} * kThreads + threadIdx.x) / 32; }
};

/// `lead`: elements of the first block of codes that lie before the run.
__device__ inline Lane lane_of(std::int64_t size, std::int64_t lead, bool full) {
  const std::int64_t first = (std::int64_t{blockIdx.x} * kThreads + threadIdx.x) * kPack - lead;
  return {first, size, full && first >= 0 && first + kPack <= size};
}

/// Adjacent elements that one access moves: 16 bytes, or eight codes.
template <typename T>
using Part = Pack<T, (sizeof(T) * kPack >= 16 ? 16 / static_cast<int>(sizeof(T)) : kPack)>;
template <typename T>
constexpr int kPartSize = static_cast<int>(sizeof(Part<T>) / sizeof(T));

/// A thread's eight elements in words as they were read, so that the reads of all arrays are under way before
/// the first is taken apart. Elements outside of the run are zero.
template <typename T>
class Elements {
 public:
  __device__ Elements(const T* from, const Lane& lane) {
    if (lane.whole) {
      using Bits = typename Part<T>::Bits;
#pragma unroll
      for (int part = 0; part < kPack / kPartSize<T>; ++part) {
        const Bits bits = *reinterpret_cast<const Bits*>(from + lane.first + part * kPartSize<T>);
        memcpy(words_ + part * (sizeof(Bits) / 4), &bits, sizeof bits);
      }
    } else {
#pragma unroll
      for (std::uint32_t& word : words_) word = 0;
#pragma unroll
      for (int n = 0; n < kPack; ++n) {
        if (!lane.holds(n)) continue;
        std::uint32_t bits = 0;
        memcpy(&bits, from + lane.first + n, sizeof(T));
        words_[n / kOfAWord] |= bits << n % kOfAWord * kBits;
      }
    }
  }
  __device__ T operator[](int n) const {
    const std::uint32_t bits = words_[n / kOfAWord] >> n % kOfAWord * kBits;
    T value;
    memcpy(&value, &bits, sizeof value);
    return value;
  }

 private:
  static constexpr int kBits = 8 * static_cast<int>(sizeof(T)), kOfAWord = 32 / kBits;
  std::uint32_t words_[kPack / kOfAWord];
};

template <typename T>
__device__ inline void store(T* to, const Lane& lane, const T (&from)[kPack]) {
  if (lane.whole) {
#pragma unroll
    for (int first = 0; first < kPack; first += kPartSize<T>) {
      Part<T> part;
#pragma unroll
      for (int n = 0; n < kPartSize<T>; ++n) part.value[n] = from[first + n];
      // Said outright, since assignments are taken apart where two branches store the same elements.
      using Bits = typename Part<T>::Bits;
      Bits bits;
      memcpy(&bits, &part, sizeof bits);
      __stwb(reinterpret_cast<Bits*>(to + lane.first + first), bits);
    }
  } else {
#pragma unroll
    for (int n = 0; n < kPack; ++n) {
      if (lane.holds(n)) to[lane.first + n] = from[n];
    }
  }
}

/// Largest magnitude of a warp's elements.
__device__ inline float largest_of(const float (&values)[kPack]) {
  float largest = 0.0f;
#pragma unroll
  for (int n = 0; n < kPack; ++n) largest = fmaxf(largest, fabsf(values[n]));
  return warp_max(largest);
}

__device__ inline float from_code(std::int8_t code, float scale) {
  return narrow::from_first_code(code, scale);
}
__device__ inline float from_code(std::uint8_t code, float scale) {
  return narrow::from_second_code(code, scale);
}
__device__ inline void set_code(std::int8_t& code, float value, float scale, float inverse,
                                std::uint32_t random) {
  code = narrow::to_first_code(value, scale, inverse, random);
}
__device__ inline void set_code(std::uint8_t& code, float value, float scale, float inverse,
                                std::uint32_t random) {
  code = narrow::to_second_code(value, scale, inverse, random);
}

/// T is float, std::uint16_t (the bits of a bfloat16), or the code of a first or second moment.
template <typename T>
constexpr bool kIsCode = std::is_same_v<T, std::int8_t> || std::is_same_v<T, std::uint8_t>;

template <typename T>
__device__ inline void widen(const Elements<T>& stored, const float* scales, std::int64_t blocks,
                             const Lane& lane, float (&to)[kPack]) {
  float scale = 0.0f;
  if constexpr (kIsCode<T>) {
    if (lane.block() < blocks) scale = scales[lane.block()];
  }
#pragma unroll
  for (int n = 0; n < kPack; ++n) {
    if constexpr (std::is_same_v<T, float>) {
      to[n] = stored[n];
    } else if constexpr (kIsCode<T>) {
      to[n] = from_code(stored[n], scale);
    } else {
      to[n] = narrow::from_bf16(stored[n]);
    }
  }
}

/// `random`: of each element, below 65536. All threads of a warp come here together.
template <typename T>
__device__ inline void store_moment(void* to, float* scales, std::int64_t blocks, const Lane& lane,
                                    const float (&from)[kPack], const std::uint32_t (&random)[kPack]) {
  if constexpr (std::is_same_v<T, float>) {
    store(static_cast<float*>(to), lane, from);
  } else {
    T stored[kPack];
    if constexpr (kIsCode<T>) {
      const float scale = narrow::scale_of(largest_of(from)), inverse = 1.0f / scale;
#pragma unroll
      for (int n = 0; n < kPack; ++n) set_code(stored[n], from[n], scale, inverse, random[n]);
      if (threadIdx.x % 32 == 0 && lane.block() < blocks) scales[lane.block()] = scale;
    } else {
#pragma unroll
      for (int n = 0; n < kPack; ++n) stored[n] = narrow::to_bf16_by_chance(from[n], random[n]);
    }
    store(static_cast<T*>(to), lane, stored);
  }
}

/// The random numbers of a thread's elements: one draw where they are eight aligned global elements, as in
/// all matrices of a multiple of 8 columns.
__device__ inline void draw(const ParameterRun& run, const Lane& lane, std::int64_t updates,
                            std::uint32_t (&words)[kPack]) {
  const bool contiguous = run.cols == run.stride;
  std::int64_t row = 0, col = run.begin + lane.first;
  if (!contiguous) {
    row = col / run.cols;
    col -= row * run.cols;
  }
  const std::int64_t global = run.origin + row * run.stride + col;
  if (global % kPack == 0 && (contiguous || col + kPack <= run.cols)) {
    const PhiloxWords drawn = narrow::rounding_words(run.key, global / kPack, updates);
#pragma unroll
    for (int n = 0; n < kPack; ++n) words[n] = narrow::rounding_word(drawn, n);
    return;
  }
#pragma unroll 1
  for (int n = 0; n < kPack; ++n) {
    const std::int64_t element = run.origin + row * run.stride + col;
    const PhiloxWords drawn = narrow::rounding_words(run.key, element / kPack, updates);
    const std::uint32_t word = narrow::rounding_word(drawn, static_cast<int>(element % kPack));
#pragma unroll
    for (int i = 0; i < kPack; ++i) words[i] = i == n ? word : words[i];  // words stay in registers
    ++col;
    if (!contiguous && col == run.cols) {
      col = 0;
      ++row;
    }
  }
}

struct Arrays {
  void *master, *first, *second, *parameter;
  const float* gradient;
  float *first_scale, *second_scale;
  std::int64_t size, lead, blocks;
  bool full;
  ParameterRun run;
  float beta1, beta2, epsilon, weight_decay;
};

/// Master: float or std::int16_t (split). Parameter: float or std::uint16_t.
template <typename Parameter, typename Master, typename First, typename Second>
__global__ void __launch_bounds__(kThreads) narrow_adamw_kernel(const Arrays p, const StepScalars* scalars) {
  constexpr bool kSplit = std::is_same_v<Master, std::int16_t>;
  const Lane lane = lane_of(p.size, p.lead, p.full);
  const Elements<float> gradient(p.gradient, lane);
  const Elements<Master> stored_master(static_cast<const Master*>(p.master), lane);
  const Elements<First> stored_first(static_cast<const First*>(p.first), lane);
  const Elements<Second> stored_second(static_cast<const Second*>(p.second), lane);
  float master[kPack], first[kPack], second[kPack];
  if constexpr (kSplit) {
    const Elements<Parameter> stored_parameter(static_cast<const Parameter*>(p.parameter), lane);
    if (scalars->skip != 0) return;
#pragma unroll
    for (int n = 0; n < kPack; ++n) master[n] = narrow::join({stored_parameter[n], stored_master[n]});
  } else {
    if (scalars->skip != 0) return;
#pragma unroll
    for (int n = 0; n < kPack; ++n) master[n] = stored_master[n];
  }
  widen(stored_first, p.first_scale, p.blocks, lane, first);
  widen(stored_second, p.second_scale, p.blocks, lane, second);
  const AdamwStep step{scalars->gradient_scale,
                       scalars->learning_rate,
                       scalars->bias_correction1,
                       scalars->bias_correction2,
                       p.beta1,
                       p.beta2,
                       p.epsilon,
                       p.weight_decay};
#pragma unroll
  for (int n = 0; n < kPack; ++n) {
    update_element(step, gradient[n], master[n], first[n], second[n]);
  }
  std::uint32_t words[kPack] = {}, low[kPack], high[kPack];
  if constexpr (!std::is_same_v<First, float>) draw(p.run, lane, scalars->updates, words);
#pragma unroll
  for (int n = 0; n < kPack; ++n) {
    low[n] = words[n] & 0xffffu;
    high[n] = words[n] >> 16;
  }
  store_moment<First>(p.first, p.first_scale, p.blocks, lane, first, low);
  store_moment<Second>(p.second, p.second_scale, p.blocks, lane, second, high);
  Parameter parameter[kPack];
  if constexpr (kSplit) {
    Master remainder[kPack];
#pragma unroll
    for (int n = 0; n < kPack; ++n) {
      const narrow::SplitMaster parts = narrow::split(master[n]);
      parameter[n] = parts.parameter;
      remainder[n] = parts.remainder;
    }
    store(static_cast<Master*>(p.master), lane, remainder);
    store(static_cast<Parameter*>(p.parameter), lane, parameter);
  } else {
    store(static_cast<float*>(p.master), lane, master);
    if (p.parameter == nullptr) return;
#pragma unroll
    for (int n = 0; n < kPack; ++n) {
      if constexpr (std::is_same_v<Parameter, float>) {
        parameter[n] = master[n];
      } else {
        parameter[n] = narrow::to_bf16(master[n]);
      }
    }
    store(static_cast<Parameter*>(p.parameter), lane, parameter);
  }
}

template <typename Parameter, typename Master>
void launch(cudaStream_t stream, const Adamw& a, const Arrays& p, const StepScalars* scalars) {
  const unsigned grid = grid_size(divide_up(p.lead + p.size, kThreads * kPack));
  if (a.first_moment.dtype == DType::kI8) {
    narrow_adamw_kernel<Parameter, Master, std::int8_t, std::uint8_t>
        <<<grid, kThreads, 0, stream>>>(p, scalars);
  } else if (a.first_moment.dtype == DType::kBF16) {
    narrow_adamw_kernel<Parameter, Master, std::uint16_t, std::uint16_t>
        <<<grid, kThreads, 0, stream>>>(p, scalars);
  } else if constexpr (std::is_same_v<Master, std::int16_t>) {
    narrow_adamw_kernel<Parameter, Master, float, float><<<grid, kThreads, 0, stream>>>(p, scalars);
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    widen_codes_kernel(const T* codes, const float* scales, std::int64_t size, std::int64_t lead,
                       float* values) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < size) values[i] = from_code(codes[i], scales[(lead + i) / kMomentBlock]);
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    narrow_codes_kernel(const float* values, T* codes, float* scales, std::int64_t size, std::int64_t lead,
                        std::int64_t blocks) {
  const Lane lane = lane_of(size, lead, false);
  const Elements<float> read(values, lane);
  float from[kPack];
#pragma unroll
  for (int n = 0; n < kPack; ++n) from[n] = read[n];
  std::uint32_t random[kPack];
#pragma unroll
  for (int n = 0; n < kPack; ++n) random[n] = narrow::kNearest;
  store_moment<T>(codes, scales, blocks, lane, from, random);
}

__global__ void __launch_bounds__(kThreads)
    join_kernel(const std::uint16_t* parameters, const std::int16_t* remainders, std::int64_t size,
                float* values) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < size) values[i] = narrow::join({parameters[i], remainders[i]});
}

__global__ void __launch_bounds__(kThreads)
    split_kernel(const float* values, std::int64_t size, std::uint16_t* parameters,
                 std::int16_t* remainders) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= size) return;
  const narrow::SplitMaster parts = narrow::split(values[i]);
  parameters[i] = parts.parameter;
  remainders[i] = parts.remainder;
}

std::int64_t blocks_of(std::int64_t lead, std::int64_t size) {
  return divide_up(lead + size, kMomentBlock);
}

/// Calls f with a null pointer to the type of codes: std::int8_t for first, std::uint8_t for second moments.
template <typename F>
void with_codes(const NarrowState& state, F&& f) {
  if (state.stored.dtype == DType::kI8) {
    f(state.stored.as<std::int8_t>());
  } else {
    f(state.stored.as<std::uint8_t>());
  }
}

}  // namespace

void narrow_adamw(cudaStream_t stream, const Adamw& a, const StepScalars* scalars) {
  const std::int64_t size = a.master.size();
  if (size == 0) return;
  Arrays p{};
  p.master = a.master.data;
  p.first = a.first_moment.data;
  p.second = a.second_moment.data;
  p.parameter = a.parameter.data;
  p.gradient = a.gradient.as<float>();
  p.first_scale = a.first_scale.as<float>();
  p.second_scale = a.second_scale.as<float>();
  p.size = size;
  p.lead = a.run.begin % kMomentBlock;
  p.blocks = blocks_of(p.lead, size);
  p.run = a.run;
  p.full = p.lead % kPack == 0 && aligned(16, p.master, p.first, p.second, p.parameter, p.gradient);
  if (a.first_moment.dtype == DType::kI8)
    p.full = p.lead % kPack == 0 && aligned(8, p.first, p.second) &&
             aligned(16, p.master, p.parameter, p.gradient);
  p.beta1 = a.beta1;
  p.beta2 = a.beta2;
  p.epsilon = a.epsilon;
  p.weight_decay = a.weight_decay;
  if (a.master.dtype == DType::kI16) {
    launch<std::uint16_t, std::int16_t>(stream, a, p, scalars);
  } else if (a.parameter.dtype == DType::kBF16) {
    launch<std::uint16_t, float>(stream, a, p, scalars);
  } else {
    launch<float, float>(stream, a, p, scalars);
  }
  OCTET_CUDA_LAUNCH("adamw");
}

void widen_state(cudaStream_t stream, const NarrowState& state, Tensor values) {
  const std::int64_t size = values.size();
  if (size == 0) return;
  const unsigned grid = grid_size(divide_up(size, kThreads));
  if (state.stored.dtype == DType::kI16) {
    join_kernel<<<grid, kThreads, 0, stream>>>(static_cast<const std::uint16_t*>(state.companion.data),
                                               state.stored.as<std::int16_t>(), size, values.as<float>());
  } else {
    with_codes(state, [&](auto* codes) {
      widen_codes_kernel<<<grid, kThreads, 0, stream>>>(codes, state.companion.as<float>(), size,
                                                        state.begin % kMomentBlock, values.as<float>());
    });
  }
  OCTET_CUDA_LAUNCH("widen_state");
}

void narrow_state(cudaStream_t stream, Tensor values, const NarrowState& state) {
  const std::int64_t size = values.size();
  if (size == 0) return;
  if (state.stored.dtype == DType::kI16) {
    split_kernel<<<grid_size(divide_up(size, kThreads)), kThreads, 0, stream>>>(
        values.as<float>(), size, static_cast<std::uint16_t*>(state.companion.data),
        state.stored.as<std::int16_t>());
  } else {
    const std::int64_t lead = state.begin % kMomentBlock;
    with_codes(state, [&](auto* codes) {
      narrow_codes_kernel<<<grid_size(divide_up(lead + size, kThreads * kPack)), kThreads, 0, stream>>>(
          values.as<float>(), codes, state.companion.as<float>(), size, lead, blocks_of(lead, size));
    });
  }
  OCTET_CUDA_LAUNCH("narrow_state");
}

}  // namespace octet::cuda
