#pragma once

#include <cstdint>

#include "octet/ops/ops.h"

/// What attention kernels of GPUs ask of heads and rows.
namespace octet {

/// Key heads [first, first + count) that query heads attend with, `group` query heads each in their order;
/// group 0: not evenly.
struct KeyHeads {
  int first, count, group;
};

inline KeyHeads key_heads_of(const HeadLayout& layout) {
  const auto key_of = [&](int query) { return (query + layout.head_offset) / layout.group; };
  const int first = key_of(0), count = key_of(layout.heads - 1) - first + 1;
  if (layout.heads % count != 0) return {first, count, 0};
  const int group = layout.heads / count;
  for (int query = 0; query < layout.heads; ++query) {
    if (key_of(query) - first != query / group) return {first, count, 0};
  }
  return {first, count, group};
}

/// Whether these bfloat16 rows all begin at multiples of 16 bytes.
inline bool rows_begin_at_16_bytes(const SampleRows& rows, std::int64_t batch) {
  return reinterpret_cast<std::uintptr_t>(rows.data) % 16 == 0 && rows.row_stride % 8 == 0 &&
         (batch == 1 || rows.sample_stride % 8 == 0);
}

}  // namespace octet
