#include "cpu_ops.h"
#include "loops.h"

namespace octet {

void CpuOps::embedding_forward(Stream&, Tensor ids, Tensor table, std::int64_t first_id, Tensor positions,
                               Tensor position_table, Tensor out) {
  OCTET_ASSERT(ids.size() == out.rows && table.cols == out.cols);
  OCTET_ASSERT(!position_table || (positions.size() == out.rows && position_table.cols == out.cols));
  cpu::with_type(out.dtype, [&](auto zero) {
    using T = decltype(zero);
    const std::int64_t cols = out.cols;
    for (std::int64_t token = 0; token < out.rows; ++token) {
      const std::int64_t row = ids.as<std::int32_t>()[token] - first_id;
      T* const to = out.as<T>() + token * cols;
      if (row >= 0 && row < table.rows) {
        std::copy_n(table.as<T>() + row * cols, cols, to);
      } else {
        std::fill_n(to, cols, T{});
      }
      if (!position_table) continue;
      const std::int64_t position = positions.as<std::int32_t>()[token];
      OCTET_ASSERT(position >= 0 && position < position_table.rows);
      const T* const from = position_table.as<T>() + position * cols;
      for (std::int64_t j = 0; j < cols; ++j) {
        to[j] = static_cast<T>(static_cast<float>(to[j]) + static_cast<float>(from[j]));
      }
    }
  });
}

void CpuOps::embedding_backward(Stream&, Tensor ids, Tensor order, Tensor dout, std::int64_t first_id,
                                Tensor dtable) {
  OCTET_ASSERT(ids.size() == dout.rows && order.size() == dout.rows && dtable.cols == dout.cols);
  cpu::with_type(dout.dtype, [&](auto zero) {
    using T = decltype(zero);
    const std::int64_t cols = dout.cols;
    for (std::int64_t i = 0; i < dout.rows; ++i) {
      const std::int64_t token = order.as<std::int32_t>()[i];
      const std::int64_t row = ids.as<std::int32_t>()[token] - first_id;
      if (row < 0 || row >= dtable.rows) continue;
      const T* const from = dout.as<T>() + token * cols;
      float* const to = dtable.as<float>() + row * cols;
      for (std::int64_t j = 0; j < cols; ++j) to[j] += static_cast<float>(from[j]);
    }
  });
}

}  // namespace octet
