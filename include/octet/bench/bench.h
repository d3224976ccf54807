#pragma once

#include <string>
#include <vector>

#include "octet/bench/session.h"

namespace octet {

/// What `octet bench` is asked for; a limit of 0 stands for the default of the device.
struct BenchRequest {
  std::vector<std::string> parts;  ///< names of bench_parts(); none: all
  std::vector<std::string> files, assignments;
  std::string json;  ///< empty: bench.json in the run folder
  BenchLimits limits;
};

/// Runs parts one after the other, prints their tables, and writes all results as one JSON file. Collective;
/// returns the exit code: 0, or 5 where a result was wrong on any rank.
int run_parts(BenchSession& session, const std::vector<std::string>& parts, const std::string& json);

/// Reads the deck, opens the device and runs the parts asked for. Collective. Errors that all ranks know of
/// are thrown on all; one that only this rank knows of is printed and ends the job.
int run_bench(const World& world, const BenchRequest& request);

}  // namespace octet
