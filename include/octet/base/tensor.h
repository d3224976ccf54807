#pragma once

#include <cstddef>
#include <cstdint>

#include "octet/base/dtype.h"
#include "octet/base/error.h"

namespace octet {

/// A non-owning view of a contiguous row-major matrix in host or device memory. A vector of n elements is a
/// matrix of shape [1, n]. An empty view (no data) stands for an operand that is left out.
struct Tensor {
  void* data = nullptr;
  DType dtype = DType::kF32;
  std::int64_t rows = 0;
  std::int64_t cols = 0;

  explicit operator bool() const { return data != nullptr; }
  std::int64_t size() const { return rows * cols; }
  std::int64_t bytes() const { return size() * size_of(dtype); }

  /// The elements as T, which must be the tensor's own type.
  template <typename T>
  T* as() const {
    OCTET_ASSERT(data == nullptr || dtype == DTypeOf<T>::value);
    return static_cast<T*>(data);
  }

  /// Rows [begin, begin + count).
  Tensor row_range(std::int64_t begin, std::int64_t count) const {
    OCTET_ASSERT(begin >= 0 && count >= 0 && begin + count <= rows);
    return {static_cast<std::byte*>(data) + begin * cols * size_of(dtype), dtype, count, cols};
  }
  /// Elements [begin, begin + count) of the flattened matrix, as a vector.
  Tensor range(std::int64_t begin, std::int64_t count) const {
    OCTET_ASSERT(begin >= 0 && count >= 0 && begin + count <= size());
    return {static_cast<std::byte*>(data) + begin * size_of(dtype), dtype, 1, count};
  }
  /// The same elements in another shape of equal size.
  Tensor reshape(std::int64_t new_rows, std::int64_t new_cols) const {
    OCTET_ASSERT(new_rows * new_cols == size());
    return {data, dtype, new_rows, new_cols};
  }
};

}  // namespace octet
