#pragma once

#include "octet/parallel/pipeline_schedule.h"

namespace octet {

/// Puts messages between the computations of a schedule that has none, so that the lists of all ranks follow
/// one total order; see PipelineSchedule.
PipelineSchedule with_messages(const PipelineSchedule& computations);

}  // namespace octet
