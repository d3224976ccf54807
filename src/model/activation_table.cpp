#include "octet/model/activation_table.h"

namespace octet {

int ActivationTable::add(std::string name, DType dtype, std::int64_t rows, std::int64_t cols, Lifetime lifetime) {
  rows_.push_back({std::move(name), dtype, rows, cols, lifetime});
  return static_cast<int>(rows_.size()) - 1;
}

void ActivationTable::reserve(int layers, Arena& saved, Arena& scratch) {
  saved_ = &saved;
  scratch_ = &scratch;
  for (const ActivationRow& row : rows_) {
    std::vector<int> handles;
    if (row.lifetime == Lifetime::kScratch) {
      handles.push_back(scratch.reserve(row.dtype, row.rows, row.cols));
    } else {
      for (int layer = 0; layer < layers; ++layer) handles.push_back(saved.reserve(row.dtype, row.rows, row.cols));
    }
    handles_.push_back(std::move(handles));
  }
}

Tensor ActivationTable::tensor(int row, int layer) const {
  const auto& handles = handles_.at(static_cast<std::size_t>(row));
  if (rows_[static_cast<std::size_t>(row)].lifetime == Lifetime::kScratch) return scratch_->tensor(handles[0]);
  return saved_->tensor(handles.at(static_cast<std::size_t>(layer)));
}

}  // namespace octet
