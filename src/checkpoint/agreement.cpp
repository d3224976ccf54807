#include "agreement.h"

#include <cstdint>
#include <exception>
#include <numeric>

#include "octet/base/error.h"

namespace octet::checkpoint {

int rank_in(MPI_Comm ranks) {
  int rank = 0;
  MPI_Comm_rank(ranks, &rank);
  return rank;
}

int rank_count(MPI_Comm ranks) {
  int size = 0;
  MPI_Comm_size(ranks, &size);
  return size;
}

void run_together(MPI_Comm ranks, const std::function<void()>& work) {
  const int rank = rank_in(ranks), size = rank_count(ranks);
  std::string message;
  int first_failed = size;
  try {
    work();
  } catch (const std::exception& error) {
    message = error.what();
    first_failed = rank;
  }
  MPI_Allreduce(MPI_IN_PLACE, &first_failed, 1, MPI_INT, MPI_MIN, ranks);
  if (first_failed == size) return;
  message = broadcast_text(message, first_failed, ranks);
  if (size == 1) fail(ErrorKind::kCheckpoint, "{}", message);
  fail(ErrorKind::kCheckpoint, "{} (rank {} of {})", message, first_failed, size);
}

std::vector<std::string> gather_texts(const std::string& own, MPI_Comm ranks) {
  const int rank = rank_in(ranks), size = rank_count(ranks);
  const int length = static_cast<int>(own.size());
  std::vector<int> lengths(size), starts(size);
  MPI_Gather(&length, 1, MPI_INT, lengths.data(), 1, MPI_INT, 0, ranks);
  std::exclusive_scan(lengths.begin(), lengths.end(), starts.begin(), 0);
  std::string all(rank == 0 ? static_cast<std::size_t>(starts.back() + lengths.back()) : 0, '\0');
  MPI_Gatherv(own.data(), length, MPI_CHAR, all.data(), lengths.data(), starts.data(), MPI_CHAR, 0, ranks);
  std::vector<std::string> texts;
  if (rank != 0) return texts;
  for (int i = 0; i < size; ++i) texts.push_back(all.substr(starts[i], lengths[i]));
  return texts;
}

std::string broadcast_text(const std::string& text, int root, MPI_Comm ranks) {
  std::string result = text;
  std::int64_t length = static_cast<std::int64_t>(text.size());
  MPI_Bcast(&length, 1, MPI_INT64_T, root, ranks);
  result.resize(static_cast<std::size_t>(length));
  MPI_Bcast(result.data(), static_cast<int>(length), MPI_CHAR, root, ranks);
  return result;
}

}  // namespace octet::checkpoint
