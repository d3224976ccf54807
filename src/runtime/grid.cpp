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

Grid::Grid(MPI_Comm ranks, const GridPoint& sizes, int shard_size) : sizes_(sizes) {
  int rank = 0, size = 0;
  MPI_Comm_rank(ranks, &rank);
  MPI_Comm_size(ranks, &size);
  OCTET_ASSERT(sizes.volume() == size);
  place_ = place_of(rank, sizes);
  // A colour for every line of the grid along an axis: what its ranks have in common.
  const int stage = sizes.volume() / sizes.pipeline;  // ranks of one pipeline stage
  const int replica = place_.data * sizes.context + place_.context;
  MPI_Comm_split(ranks, rank - place_.tensor, place_.tensor, &tensor_);
  MPI_Comm_split(ranks, rank - place_.context * sizes.tensor, place_.context, &context_);
  const int replicas = sizes.data * sizes.context, slices = shard_size > 0 ? shard_size : replicas;
  const int line = (place_.pipeline * sizes.tensor + place_.tensor) * replicas;
  MPI_Comm_split(ranks, line + replica / slices, replica, &shards_);
  MPI_Comm_split(ranks, line + replica % slices, replica, &copies_);
  MPI_Comm_split(ranks, rank % stage, place_.pipeline, &pipeline_);
  const bool end = place_.pipeline == 0 || place_.pipeline == sizes.pipeline - 1;
  MPI_Comm_split(ranks, end ? place_.tensor : MPI_UNDEFINED, place_.pipeline * stage + replica, &ends_);
}

Grid::~Grid() {
  if (std::uncaught_exceptions() > 0) return;
  if (ends_ != MPI_COMM_NULL) MPI_Comm_free(&ends_);
  MPI_Comm_free(&pipeline_);
  MPI_Comm_free(&copies_);
  MPI_Comm_free(&shards_);
  MPI_Comm_free(&context_);
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
