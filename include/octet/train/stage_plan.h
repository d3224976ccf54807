#pragma once

#include <string>
#include <vector>

#include "octet/config/deck.h"
#include "octet/model/chunk.h"
#include "octet/model/shape.h"
#include "octet/parallel/pipeline_schedule.h"
#include "octet/runtime/grid.h"

namespace octet {

/// What a rank of the pipeline works on, and in which order all of them do. Without a pipeline it is one
/// stage.
struct StagePlan {
  PipelineSchedule schedule;
  std::vector<Chunk> chunks;               ///< of this rank
  std::vector<std::vector<Place>> places;  ///< [chunk][micro-batch] of this rank
  StreamBuffers buffers;
  bool split = false;       ///< backward passes come in two parts
  std::vector<int> slices;  ///< of each bucket of the parameter table: ranks that share it; 0 where this rank
                            ///< does not hold it
  bool shares_embedding =
      false;  ///< a tied embedding lives on the first and the last stage, and this rank is of one of them
  std::string table;  ///< stages and layers, for the start-up report; empty without a pipeline
};

/// Cuts the model into the deck's pipeline stages and finds room for every micro-batch. Throws Error(kUsage)
/// where the schedule does not fit the number of micro-batches.
StagePlan plan_stages(const Deck& deck, const ModelShape& shape, const Grid& grid);

}  // namespace octet
