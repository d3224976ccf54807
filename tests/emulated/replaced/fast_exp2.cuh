// Takes the place of src/ops/cuda/fast_exp2.cuh, which is assembly, under emulation.
#pragma once

namespace octet::cuda {

inline float fast_exp2(float x) {
  return std::exp2(x);
}

}  // namespace octet::cuda
