#pragma once

#include <mpi.h>

#include <exception>
#include <functional>
#include <string>
#include <vector>

namespace octet {

/// The MPI job. Local ranks come from MPI_Comm_split_type(SHARED) and from nothing else, since launchers'
/// variables differ and lie.
class World {
 public:
  /// All ranks: MPI is initialised here, unless it was before, and finalised on destruction.
  World();
  /// Some ranks of a job that is initialised already.
  explicit World(MPI_Comm ranks);
  ~World();
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  MPI_Comm ranks() const { return ranks_; }
  int rank() const { return rank_; }
  int size() const { return size_; }
  int local_rank() const { return local_rank_; }
  int local_size() const { return local_size_; }
  MPI_Comm node() const { return node_; }
  int nodes() const { return nodes_; }
  const std::string& host() const { return host_; }

  /// Runs `work`, which makes no MPI calls, on every rank. If it throws on any, all ranks throw the Error of
  /// the lowest such rank, so that one rank can print it once; the message names the rank unless all failed
  /// alike.
  void together(const std::function<void()>& work) const;

  /// One string of every rank, in rank order, on every rank.
  std::vector<std::string> gather(const std::string& text) const;

  /// Prints the error with this rank and its host, and ends every rank of the job within seconds, with the
  /// error's exit code. For failures inside a step, which other ranks cannot know of.
  [[noreturn]] void abort(const std::exception& error) const;

 private:
  void open(MPI_Comm ranks);

  bool finalises_ = false;
  MPI_Comm ranks_ = MPI_COMM_NULL, node_ = MPI_COMM_NULL;
  int rank_ = 0, size_ = 1, local_rank_ = 0, local_size_ = 1, nodes_ = 1;
  std::string host_;
};

}  // namespace octet
