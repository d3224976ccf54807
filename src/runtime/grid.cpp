#include "octet/runtime/grid.h"

#include <fmt/format.h>

#include <exception>

#include "octet/base/error.h"

namespace octet {

GridPoint place_of(int rank, const GridPoint& sizes) {
  GridPoint place;
  place.tensor = rank % sizes.tensor;
  rank /= sizes.tensor;
  place.context = rank % sizes.context;
  rank /= sizes.context;
  place.data = rank % sizes.data;
  place.pipeline = rank / sizes.data;
  return place;
}

Grid::Grid(MPI_Comm ranks, const GridPoint& sizes) : sizes_(sizes) {
  int rank = 0, size = 0;
  MPI_Comm_rank(ranks, &rank);
  MPI_Comm_size(ranks, &size);
  OCTET_ASSERT(sizes.volume() == size);
  place_ = place_of(rank, sizes);
  // A colour for every line of the grid along an axis: the rank at that line's origin.
  const int tensor_line = rank - place_.tensor;
  const int data_line = rank - place_.data * sizes.tensor * sizes.context;
  MPI_Comm_split(ranks, tensor_line, place_.tensor, &tensor_);
  MPI_Comm_split(ranks, data_line, place_.data, &data_);
  const int stage = sizes.tensor * sizes.context * sizes.data;  // ranks of one
  MPI_Comm_split(ranks, rank % stage, place_.pipeline, &pipeline_);
  const bool first = place_.pipeline == 0, last = place_.pipeline == sizes.pipeline - 1;
  const int end_line = first || last ? data_line % stage : MPI_UNDEFINED;
  MPI_Comm_split(ranks, end_line, place_.pipeline * sizes.data + place_.data, &ends_);
}

Grid::~Grid() {
  if (std::uncaught_exceptions() > 0) return;
  if (ends_ != MPI_COMM_NULL) MPI_Comm_free(&ends_);
  MPI_Comm_free(&pipeline_);
  MPI_Comm_free(&data_);
  MPI_Comm_free(&tensor_);
}

std::string Grid::describe() const {
  std::string text;
  const auto add = [&text](const char* axis, int size) {
    if (size > 1) text += fmt::format("{}{} {}", text.empty() ? "" : " × ", axis, size);
  };
  add("data", sizes_.data);
  add("tensor", sizes_.tensor);
  add("context", sizes_.context);
  add("pipeline", sizes_.pipeline);
  return text.empty() ? "1 rank" : text;
}

}  // namespace octet
