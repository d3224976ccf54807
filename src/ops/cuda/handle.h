#pragma once

#include <memory>
#include <type_traits>

namespace octet::cuda {

/// Ownership of a library's opaque pointer: destroyed by `kDestroy`, whose status is ignored.
template <auto kDestroy>
struct Destroy {
  template <typename T>
  void operator()(T* pointer) const {
    static_cast<void>(kDestroy(pointer));
  }
};

template <typename Pointer, auto kDestroy>
using Handle = std::unique_ptr<std::remove_pointer_t<Pointer>, Destroy<kDestroy>>;

}  // namespace octet::cuda
