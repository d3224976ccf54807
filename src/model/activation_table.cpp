#include "octet/model/activation_table.h"

#include <optional>

namespace octet {

int ActivationTable::add(std::string name, DType dtype, std::int64_t rows, std::int64_t cols,
                         Lifetime lifetime) {
  rows_.push_back({std::move(name), dtype, rows, cols, lifetime});
  return static_cast<int>(rows_.size()) - 1;
}

void ActivationTable::reserve(const std::vector<bool>& recomputed, Arena& saved, Arena& scratch) {
  for (const ActivationRow& row : rows_) {
    std::vector<Place> places;
    std::optional<Place> shared;
    for (const bool again : recomputed) {
      const bool own =
          row.lifetime == Lifetime::kSaved || (row.lifetime == Lifetime::kRecomputable && !again);
      if (own) {
        places.push_back({&saved, saved.reserve(row.dtype, row.rows, row.cols)});
      } else {
        if (!shared) shared = Place{&scratch, scratch.reserve(row.dtype, row.rows, row.cols)};
        places.push_back(*shared);
      }
    }
    places_.push_back(std::move(places));
  }
}

Tensor ActivationTable::tensor(int row, int layer) const {
  const Place& place = places_.at(static_cast<std::size_t>(row)).at(static_cast<std::size_t>(layer));
  return place.arena->tensor(place.handle);
}

}  // namespace octet
