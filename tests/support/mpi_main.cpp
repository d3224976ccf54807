#include <gtest/gtest.h>
#include <mpi.h>

#include <cstdio>

#include "support/gpu_skips.h"

namespace octet {
namespace {

/// Prints failures with their rank. A fatal one ends all ranks, since the others may wait for this one for
/// ever.
class RankFailures : public testing::EmptyTestEventListener {
 public:
  RankFailures(int rank, int ranks) : rank_(rank), ranks_(ranks) {}

 private:
  void OnTestStart(const testing::TestInfo& test) override { test_ = &test; }
  void OnTestPartResult(const testing::TestPartResult& result) override {
    if (!result.failed()) return;
    std::fprintf(stderr, "rank %d of %d, %s.%s: %s:%d: %s\n", rank_, ranks_,
                 test_ != nullptr ? test_->test_suite_name() : "?", test_ != nullptr ? test_->name() : "?",
                 result.file_name() != nullptr ? result.file_name() : "?", result.line_number(),
                 result.message());
    std::fflush(nullptr);
    if (result.fatally_failed() && ranks_ > 1) MPI_Abort(MPI_COMM_WORLD, 1);
  }

  int rank_, ranks_;
  const testing::TestInfo* test_ = nullptr;
};

}  // namespace
}  // namespace octet

int main(int argc, char** argv) {
  int provided = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &provided);
  int rank = 0, ranks = 1;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  testing::InitGoogleTest(&argc, argv);
  testing::TestEventListeners& listeners = testing::UnitTest::GetInstance()->listeners();
  if (rank != 0) delete listeners.Release(listeners.default_result_printer());
  listeners.Append(new octet::RankFailures(rank, ranks));

  const int mine = octet::exit_code(RUN_ALL_TESTS());
  int worst = 0;
  MPI_Allreduce(&mine, &worst, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
  if (rank == 0 && worst != mine) std::fprintf(stderr, "a test failed on another rank\n");
  MPI_Finalize();
  return worst;
}
