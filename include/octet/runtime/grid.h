#pragma once

#include <mpi.h>

#include <string>

namespace octet {

/// Sizes of the parallel axes, or a rank's place along each.
struct GridPoint {
  int tensor = 1, context = 1, data = 1, pipeline = 1;
  int volume() const { return tensor * context * data * pipeline; }
};

/// Place of a rank: tensor is the fastest axis, so that the chattiest one stays inside a node, then context,
/// data, pipeline.
GridPoint place_of(int rank, const GridPoint& sizes);

/// The MPI communicators of this rank's axes, made in the same order on all ranks.
class Grid {
 public:
  /// `shard_size`: replicas that share one set of slices; 0: all.
  Grid(MPI_Comm ranks, const GridPoint& sizes, int shard_size = 0);
  ~Grid();
  Grid(const Grid&) = delete;
  Grid& operator=(const Grid&) = delete;

  const GridPoint& sizes() const { return sizes_; }
  const GridPoint& place() const { return place_; }
  MPI_Comm tensor() const { return tensor_; }
  MPI_Comm context() const { return context_; }
  /// Of the data and context axes together, which all hold the same parameters: the ranks that share one set
  /// of slices, and the ranks that hold the same slice in other sets.
  MPI_Comm shards() const { return shards_; }
  MPI_Comm copies() const { return copies_; }
  MPI_Comm pipeline() const { return pipeline_; }
  /// The replicas of the first and the last pipeline stage together, first stage first; MPI_COMM_NULL on
  /// other stages.
  MPI_Comm ends() const { return ends_; }
  /// "data 4 × tensor 2"; axes of size 1 are left out.
  std::string describe() const;

 private:
  GridPoint sizes_, place_;
  MPI_Comm tensor_ = MPI_COMM_NULL, context_ = MPI_COMM_NULL, shards_ = MPI_COMM_NULL,
           copies_ = MPI_COMM_NULL, pipeline_ = MPI_COMM_NULL, ends_ = MPI_COMM_NULL;
};

}  // namespace octet
