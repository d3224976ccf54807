#pragma once

#include <mpi.h>

#include <functional>
#include <string>
#include <vector>

namespace octet::checkpoint {

/// Runs `work` on every rank, then agrees: if it threw anywhere, all ranks throw Error(kCheckpoint) with the
/// message of the first rank that failed. Collective; `work` must not communicate.
void run_together(MPI_Comm ranks, const std::function<void()>& work);

/// The texts of all ranks in rank order, on rank 0; nothing elsewhere. Collective.
std::vector<std::string> gather_texts(const std::string& own, MPI_Comm ranks);

/// The text of rank `root`. Collective.
std::string broadcast_text(const std::string& text, int root, MPI_Comm ranks);

int rank_in(MPI_Comm ranks);
int rank_count(MPI_Comm ranks);

}  // namespace octet::checkpoint
