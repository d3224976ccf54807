// Cross-entropy over a vocabulary that may be split over ranks.
// Bytes moved (v logits a row, compute dtype of s bytes): first half t·valid·s; second half, or both at once,
// 2·t·v·s with gradient. Both at once read again what a multiprocessor does not hold of a row: on an H100
// nothing of up to 155,648 logits in bfloat16.
#include <algorithm>
#include <cmath>

#include "async_copy.cuh"
#include "drivers.h"
#include "fast_exp2.cuh"
#include "kernel_tools.cuh"

namespace octet::cuda {
namespace {

constexpr int kResident = 1024;  // threads of a multiprocessor: a block of as many, or two of half
constexpr int kUnroll = 2;       // packs of a row that a thread takes at once: its part of a chunk
constexpr int kChunks = 8;       // chunks of a row that shared memory holds at most
constexpr int kMostOwn = 5;      // packs of a row that registers of a thread hold besides
constexpr int kLossThreads = 256;
constexpr int kSumThreads = 1024;

/// What is done with a row: its sums, its gradient by given sums, or one after the other.
enum class Part { kFirst, kSecond, kBoth };

struct Split {
  std::int64_t first_id;
  int cols, valid;
};

// Column of the target among this rank's logits, or -1.
__device__ inline int target_column(std::int32_t target, const Split& split) {
  const std::int64_t column = target - split.first_id;
  return target >= 0 && column >= 0 && column < split.valid ? static_cast<int>(column) : -1;
}

// exp(x - largest) = exp_from<T>(x, origin<T>(largest)), in two instructions where T is bfloat16. Products
// that a compiler might fuse with what comes after them, in one kernel and not in another, are __fmul_rn:
// both ways to the loss then give the same bits.
constexpr float kLog2E = 1.44269504f;

template <typename T>
__device__ inline float origin(float largest) {
  return std::is_same_v<T, bf16> ? __fmul_rn(largest, kLog2E) : largest;
}
template <typename T>
__device__ inline float exp_from(float x, float origin) {
  if constexpr (std::is_same_v<T, bf16>) {
    return fast_exp2(fmaf(x, kLog2E, -origin));
  } else {
    return expf(x - origin);
  }
}

// Largest value so far, and sum of exp(value - largest).
struct Softmax {
  float largest = -INFINITY;
  float sum = 0.0f;
};

// The sum with regard to another largest value.
template <typename T>
__device__ inline float moved_sum(const Softmax& softmax, float largest) {
  // Without values yet there is nothing to move, and inf - inf must not be formed.
  if (softmax.sum == 0.0f) return 0.0f;
  const float difference = origin<T>(softmax.largest) - origin<T>(largest);
  return __fmul_rn(softmax.sum, std::is_same_v<T, bf16> ? fast_exp2(difference) : expf(difference));
}

// Adds kPacks packs of N values.
template <typename T, int kPacks, int N>
__device__ inline void add(Softmax& softmax, const float (&x)[kPacks][N]) {
  float largest = softmax.largest;
#pragma unroll
  for (int u = 0; u < kPacks; ++u) {
    float of_pack = x[u][0];
#pragma unroll
    for (int n = 1; n < N; ++n) of_pack = fmaxf(of_pack, x[u][n]);
    largest = fmaxf(largest, of_pack);
  }
  const float from = origin<T>(largest);
  float sum = moved_sum<T>(softmax, largest);
#pragma unroll
  for (int u = 0; u < kPacks; ++u) {
    float of_pack = 0.0f;
#pragma unroll
    for (int n = 0; n < N; ++n) of_pack += exp_from<T>(x[u][n], from);
    sum += of_pack;
  }
  softmax = {largest, sum};
}

// Adds pack i of a row, of which `valid` columns count.
template <typename T, int N>
__device__ inline void add(Softmax& softmax, const Pack<T, N>& pack, int i, int valid) {
  float x[1][N];
  pack.widen(x[0]);
  if (i >= valid / N) {
#pragma unroll
    for (int n = 0; n < N; ++n) x[0][n] = i * N + n < valid ? x[0][n] : -INFINITY;
  }
  add<T>(softmax, x);
}

// Over a whole block, the same in all its threads; `largest_of` and `sum_of` are shared, with a place for
// each of the kWarps warps, and may be used again behind the next barrier.
template <typename T, int kWarps>
__device__ inline Softmax of_block(Softmax mine, float* largest_of, float* sum_of) {
  const auto of_warp = [](const Softmax& lane) {
    const float largest = warp_max(lane.largest);
    return Softmax{largest, warp_sum(moved_sum<T>(lane, largest))};
  };
  mine = of_warp(mine);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (lane == 0) {
    largest_of[warp] = mine.largest;
    sum_of[warp] = mine.sum;
  }
  __syncthreads();
  return of_warp(lane < kWarps ? Softmax{largest_of[lane], sum_of[lane]} : Softmax{});
}

// exp(x - largest) / sum.
template <typename T>
class Probability {
 public:
  __device__ explicit Probability(const Softmax& softmax)
      : origin_(origin<T>(softmax.largest) + (kNarrow ? log2f(softmax.sum) : 0.0f)),
        factor_(kNarrow ? 1.0f : 1.0f / softmax.sum) {}
  __device__ float operator()(float x) const {
    const float exponential = exp_from<T>(x, origin_);
    return kNarrow ? exponential : __fmul_rn(exponential, factor_);
  }

 private:
  static constexpr bool kNarrow = std::is_same_v<T, bf16>;  // the division is a part of the exponent
  float origin_, factor_;
};

struct TokenSoftmax {
  float largest = -INFINITY;
  float sum = 0.0f;
  float target = 0.0f;
};

// All ranks' parts of one token.
__device__ inline TokenSoftmax combine(const float* partials, std::int64_t token, std::int64_t tokens,
                                       int ranks) {
  TokenSoftmax all;
  for (int rank = 0; rank < ranks; ++rank)
    all.largest = fmaxf(all.largest, partials[(rank * tokens + token) * 3]);
    // Not unrolled: nvcc 13.0 (V13.0.88) gives copies of this loop the sum's address for the largest logit.
#pragma unroll 1
  for (int rank = 0; rank < ranks; ++rank) {
    const float* part = partials + (rank * tokens + token) * 3;
    const float largest = part[0], sum = part[1], target = part[2];
    if (sum != 0.0f) all.sum += sum * expf(largest - all.largest);
    all.target += target;
  }
  return all;
}

template <typename T>
struct Rows {
  T* logits;
  const std::int32_t* targets;
  float* partials;  // written by the first half, read by the second
  std::int64_t rows;
  int ranks;
  Split split;
  int held;  // packs at the beginning of a row that go through shared memory
};

// A persistent grid; a block has a row at a time, of which each thread holds packs of its own in shared
// memory and in registers. As soon as it is done with those of a chunk it has the next row's copied to their
// place, so that reading never stops; and both at once take the next row's sums, a chunk behind, between
// the gradients of this one, so that writing hardly does.
template <typename T, int N, int kThreads, Part kPart>
__global__ void __launch_bounds__(kThreads, kResident / kThreads) rows_kernel(const Rows<T> p) {
  constexpr int kOwn = N > 1 && kThreads == kResident ? kMostOwn : 0;
  constexpr int kRest = 4;
  extern __shared__ uint4 shared[];
  // Of each warp. Rows take turns, so that one barrier a row is enough.
  __shared__ float largest_of[2][kThreads / 32], sum_of[2][kThreads / 32];
  T* const held = reinterpret_cast<T*>(shared);
  Pack<T, N> own[kOwn + 1];  // the last is not used
  const Split& split = p.split;
  const int thread = threadIdx.x;
  const int packs = split.cols / N, counting = (split.valid + N - 1) / N;
  // Of a row; each is a group of copies. Halves wait for one that is as many groups back as a row has.
  const int chunks = (p.held + kThreads * kUnroll - 1) / (kThreads * kUnroll);
  const int groups = kPart == Part::kBoth ? chunks : kChunks;
  const int rest = min(counting, p.held + kThreads * kOwn);  // packs held in either way
  const auto pack_of = [&](int chunk, int u) { return (chunk * kUnroll + u) * kThreads + thread; };
  const auto own_pack = [&](int u) { return p.held + u * kThreads + thread; };
  const auto id_of = [&](std::int64_t row) { return row < p.rows ? p.targets[row] : -1; };

  const auto fetch = [&](const T* from, bool wanted, int chunk) {
    if constexpr (N > 1) {
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int i = pack_of(chunk, u);
        if (wanted && i < p.held) copy_async(held + i * N, from + i * N);
      }
    }
    end_copy_group();
  };
  const auto fetch_own = [&](const T* from, bool wanted) {
#pragma unroll
    for (int u = 0; u < kOwn; ++u) {
      const int i = own_pack(u);
      if (wanted && i < rest) own[u] = Pack<T, N>::load(from + i * N);
    }
  };
  const auto add_chunk = [&](Softmax& softmax, int chunk) {
    if (pack_of(chunk, kUnroll - 1) < min(p.held, split.valid / N)) {
      float x[kUnroll][N];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) Pack<T, N>::load(held + pack_of(chunk, u) * N).widen(x[u]);
      add<T>(softmax, x);
    } else {
#pragma unroll 1
      for (int u = 0; u < kUnroll; ++u) {
        const int i = pack_of(chunk, u);
        if (i < p.held) add(softmax, Pack<T, N>::load(held + i * N), i, split.valid);
      }
    }
  };
  const auto add_own = [&](Softmax& softmax) {
#pragma unroll
    for (int u = 0; u < kOwn; ++u) {
      if (own_pack(u) < rest) add(softmax, own[u], own_pack(u), split.valid);
    }
  };
  // Packs that are held nowhere are read, and handed to `use` with their numbers.
  const auto over_rest = [&](const T* values, auto&& use) {
    for (int first = rest + thread; first < counting; first += kThreads * kRest) {
      Pack<T, N> x[kRest];
#pragma unroll
      for (int u = 0; u < kRest; ++u) {
        const std::int64_t i = min(first + u * kThreads, counting - 1);
        x[u] = Pack<T, N>::load(values + i * N);
      }
#pragma unroll
      for (int u = 0; u < kRest; ++u) {
        const int i = first + u * kThreads;
        if (i < counting) use(i, x[u]);
      }
    }
  };
  const auto add_rest = [&](Softmax& softmax, const T* values) {
    over_rest(values, [&](int i, const Pack<T, N>& x) { add(softmax, x, i, split.valid); });
  };

  int turn = 0;
  bool wanted = false;
  int target = -1;
  float at_target = 0.0f;
  Softmax softmax;  // of this thread's part of the row
  const auto finish_sums = [&](std::int64_t row) {
    softmax = of_block<T, kThreads / 32>(softmax, largest_of[turn], sum_of[turn]);
    turn ^= 1;
    if (thread == 0) {
      float* const partial = p.partials + row * 3;
      partial[0] = softmax.largest;
      partial[1] = softmax.sum;
      partial[2] = at_target;
    }
  };

  std::int32_t next_id = p.targets[blockIdx.x];
  // The first turn has no row yet, and fetches one.
  for (std::int64_t row = std::int64_t{blockIdx.x} - gridDim.x; row < p.rows; row += gridDim.x) {
    const std::int64_t next = row + gridDim.x;
    T *const values = p.logits + row * split.cols, *const next_values = p.logits + next * split.cols;
    const bool next_wanted = next < p.rows && (kPart == Part::kFirst || next_id >= 0);
    const int next_target = target_column(next_id, split);
    next_id = id_of(next + gridDim.x);
    float next_at_target = 0.0f;
    if (kPart != Part::kSecond && thread == 0 && next_wanted && next_target >= 0)
      next_at_target = to_float(next_values[next_target]);
    if constexpr (kPart == Part::kFirst) {
#pragma unroll 1
      for (int chunk = 0; chunk < groups; ++chunk) {
        if (chunk == chunks - 1) {  // in the order of both at once, for the same bits
          if (wanted) add_own(softmax);
          fetch_own(next_values, next_wanted);
        }
        wait_for_copies<kChunks - 1>();
        if (wanted) add_chunk(softmax, chunk);
        fetch(next_values, next_wanted, chunk);
      }
      if (wanted) {
        add_rest(softmax, values);
        finish_sums(row);
        softmax = {};
      }
    } else {
      if (kPart == Part::kBoth && wanted) finish_sums(row);
      if (kPart == Part::kSecond && wanted) {
        const TokenSoftmax all = combine(p.partials, row, p.rows, p.ranks);
        softmax = {all.largest, all.sum};
      }
      const Probability<T> probability(softmax);
      const int shown = wanted ? split.valid : 0, target_pack = target < 0 ? -1 : target / N;
      const auto replace = [&](int i, const Pack<T, N>& logits) {
        float x[N];
        logits.widen(x);
#pragma unroll
        for (int n = 0; n < N; ++n) x[n] = probability(x[n]);
        if (i == target_pack || i >= shown / N) {
#pragma unroll
          for (int n = 0; n < N; ++n) {
            if (i * N + n == target) x[n] -= 1.0f;
            if (i * N + n >= shown) x[n] = 0.0f;
          }
        }
        Pack<T, N>::rounded(x).store(values + std::int64_t{i} * N);
      };
      softmax = {};

      if (row >= 0) {
#pragma unroll
        for (int u = 0; u < kOwn; ++u) {
          if (own_pack(u) < rest) replace(own_pack(u), own[u]);
        }
      }
      fetch_own(next_values, next_wanted);
#pragma unroll 1
      for (int chunk = 0; chunk < groups; ++chunk) {
        if constexpr (kPart == Part::kSecond) wait_for_copies<kChunks - 1>();
        if (row >= 0) {
#pragma unroll
          for (int u = 0; u < kUnroll; ++u) {
            const int i = pack_of(chunk, u);
            if (i < p.held) replace(i, Pack<T, N>::load(held + i * N));
          }
        }
        fetch(next_values, next_wanted, chunk);
        if (kPart == Part::kBoth && chunk > 0) {
          wait_for_copies<1>();
          if (next_wanted) add_chunk(softmax, chunk - 1);
        }
      }
      if (row >= 0) {
        over_rest(values, replace);
        // Padding has no gradient.
        for (int i = counting + thread; i < packs; i += kThreads)
          Pack<T, N>{}.store(values + std::int64_t{i} * N);
      }
      if (kPart == Part::kBoth && next_wanted) {
        add_own(softmax);  // while the last copies arrive
        wait_for_copies<0>();
        if (chunks > 0) add_chunk(softmax, chunks - 1);
        add_rest(softmax, next_values);
      }
    }
    wanted = next_wanted;
    target = next_target;
    at_target = next_at_target;
  }
}

struct LossSum {
  double loss, count;
};

__global__ void __launch_bounds__(kLossThreads)
    loss_kernel(const std::int32_t* targets, const float* partials, std::int64_t tokens, int ranks,
                LossSum* sums) {
  const std::int64_t token = std::int64_t{blockIdx.x} * kLossThreads + threadIdx.x;
  double loss = 0.0, count = 0.0;
  if (token < tokens && targets[token] >= 0) {
    const TokenSoftmax softmax = combine(partials, token, tokens, ranks);
    loss = log(static_cast<double>(softmax.sum)) + softmax.largest - softmax.target;
    count = 1.0;
  }
  loss = block_sum(loss);
  count = block_sum(count);
  if (threadIdx.x == 0) sums[blockIdx.x] = {loss, count};
}

__global__ void __launch_bounds__(kSumThreads)
    loss_sum_kernel(const LossSum* sums, int blocks, double weight, StepScalars* scalars) {
  double loss = 0.0, count = 0.0;
  for (int i = threadIdx.x; i < blocks; i += kSumThreads) {
    loss += sums[i].loss;
    count += sums[i].count;
  }
  loss = block_sum(loss);
  count = block_sum(count);
  if (threadIdx.x == 0) {
    scalars->loss += weight * loss;
    scalars->tokens += weight * count;
  }
}

template <typename T, int N, int kThreads, Part kPart>
void launch_rows(cudaStream_t stream, Rows<T> p, int held, const Scratch& scratch) {
  p.held = held;
  const int shared = held * 16;
  const std::int64_t resident = std::int64_t{scratch.multiprocessors()} * (kResident / kThreads);
  OCTET_CUDA(cudaFuncSetAttribute(rows_kernel<T, N, kThreads, kPart>,
                                  cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
  OCTET_CUDA(cudaFuncSetAttribute(rows_kernel<T, N, kThreads, kPart>,
                                  cudaFuncAttributePreferredSharedMemoryCarveout,
                                  cudaSharedmemCarveoutMaxShared));
  rows_kernel<T, N, kThreads, kPart>
      <<<grid_size(std::min(p.rows, resident)), kThreads, static_cast<std::size_t>(shared), stream>>>(p);
  OCTET_CUDA_LAUNCH("cross_entropy");
}

template <Part kPart>
void run_rows(cudaStream_t stream, Tensor logits, std::int64_t first_id, std::int64_t valid, Tensor targets,
              Tensor partials, const Scratch& scratch) {
  if (logits.rows == 0 || (kPart != Part::kFirst && logits.cols == 0)) return;
  const bool full = takes_full_packs(logits.dtype, logits.cols, logits.data);
  with_width(logits.dtype, full, [&](auto element, auto width) {
    using T = decltype(element);
    constexpr int N = decltype(width)::value, kHalf = kResident / 2;
    Rows<T> p{};
    p.logits = static_cast<T*>(logits.data);
    p.targets = targets.as<std::int32_t>();
    p.partials = partials.as<float>();
    p.rows = logits.rows;
    p.ranks = static_cast<int>(partials.rows / logits.rows);
    p.split = {first_id, static_cast<int>(logits.cols), static_cast<int>(valid)};
    if constexpr (N == 1) {
      launch_rows<T, N, kHalf, kPart>(stream, p, 0, scratch);
    } else {
      // Places of a thread in shared memory, 1 KiB of which is the system's and the kernel's own.
      const int places =
          std::clamp((scratch.block_shared_bytes() - 1024) / (16 * kResident), 0, kChunks * kUnroll);
      const int counting = static_cast<int>(divide_up(valid, N));
      if (counting <= places * kHalf) {
        launch_rows<T, N, kHalf, kPart>(stream, p, counting, scratch);
      } else {
        launch_rows<T, N, kResident, kPart>(stream, p, std::min(counting, places * kResident), scratch);
      }
    }
  });
}

void add_losses(cudaStream_t stream, Tensor targets, Tensor partials, double weight, StepScalars* scalars,
                Scratch& scratch) {
  const std::int64_t tokens = targets.size();
  if (tokens == 0 || weight == 0.0) return;
  const int ranks = static_cast<int>(partials.rows / tokens);
  const unsigned blocks = grid_size(divide_up(tokens, kLossThreads));
  auto* sums = static_cast<LossSum*>(scratch.reserve(std::int64_t{blocks} * sizeof(LossSum)));
  loss_kernel<<<blocks, kLossThreads, 0, stream>>>(targets.as<std::int32_t>(), partials.as<float>(), tokens,
                                                   ranks, sums);
  OCTET_CUDA_LAUNCH("cross_entropy");
  loss_sum_kernel<<<1, kSumThreads, 0, stream>>>(sums, static_cast<int>(blocks), weight, scalars);
  OCTET_CUDA_LAUNCH("cross_entropy");
}

}  // namespace

void cross_entropy_partial(cudaStream_t stream, Tensor logits, std::int64_t first_id, std::int64_t valid,
                           Tensor targets, Tensor partial, const Scratch& scratch) {
  run_rows<Part::kFirst>(stream, logits, first_id, valid, targets, partial, scratch);
}

void cross_entropy_finish(cudaStream_t stream, Tensor logits, std::int64_t first_id, std::int64_t valid,
                          Tensor targets, Tensor partials, double weight, bool gradient, StepScalars* scalars,
                          Scratch& scratch) {
  add_losses(stream, targets, partials, weight, scalars, scratch);
  if (gradient) run_rows<Part::kSecond>(stream, logits, first_id, valid, targets, partials, scratch);
}

void cross_entropy(cudaStream_t stream, Tensor logits, std::int64_t valid, Tensor targets, Tensor partial,
                   bool gradient, StepScalars* scalars, Scratch& scratch) {
  if (gradient) {
    run_rows<Part::kBoth>(stream, logits, 0, valid, targets, partial, scratch);
  } else {
    run_rows<Part::kFirst>(stream, logits, 0, valid, targets, partial, scratch);
  }
  add_losses(stream, targets, partial, 1.0, scalars, scratch);
}

}  // namespace octet::cuda
