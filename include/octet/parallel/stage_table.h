#pragma once

#include <string>
#include <vector>

namespace octet {

/// The layers of one virtual stage.
struct StageLayers {
  int first = 0, count = 0;
  double work = 0;  ///< in layers, embedding and head included
};

/// Cuts the layers into stages × chunks runs, in the order of virtual stages, each layer in one run and no
/// run empty, such that the largest work is as small as can be. `embedding_work` and `head_work`, in units of
/// one layer, belong to the first and the last run. Of equal cuts, later stages have more layers, since 1F1B
/// keeps fewer micro-batches there. Throws Error(kUsage) with the nearest sizes where layers are too few.
std::vector<StageLayers> stage_table(int layers, int stages, int chunks, double embedding_work,
                                     double head_work);

/// One line a virtual stage, and the sum: for the start-up report.
std::string format_stage_table(const std::vector<StageLayers>& table, int stages);

}  // namespace octet
