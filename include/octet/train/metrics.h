#pragma once

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>

#include "octet/train/engine.h"

namespace octet {

/// What a log line says, over the steps since the line before it.
struct LogLine {
  std::int64_t step = 0, steps = 0;
  StepResult last;  ///< the newest step
  double step_ms = 0.0, data_ms = 0.0,
         comm_ms = 0.0;            ///< means over the interval; comm_ms of the measured step
  double tokens_per_second = 0.0;  ///< a rank
  double tflops = 0.0;             ///< a rank
  double mfu = 0.0;                ///< 0 … 1; negative where the peak is unknown
  std::int64_t tokens = 0;         ///< target tokens since the run began
  std::int64_t memory_used = 0, memory_total = 0;
  std::int64_t skipped = 0;  ///< steps skipped since this start
  double eta_seconds = 0.0;
};

/// The heading and a line of the table that a run prints.
std::string log_heading();
std::string log_text(const LogLine& line);

/// 95 -> "1m35s".
std::string duration_text(double seconds);

/// metrics.jsonl of a run: one object a line, flushed.
class MetricsFile {
 public:
  /// Opens for appending; lines of steps after `resumed_step` are dropped first, since they are done again.
  /// Throws Error(kUsage).
  MetricsFile(const std::filesystem::path& path, std::int64_t resumed_step);
  void write(const LogLine& line);
  void write_evaluation(std::int64_t step, const Evaluation& evaluation);

 private:
  void append(const std::string& text);
  std::filesystem::path path_;
  std::ofstream file_;
};

/// Writes STATUS.json of a run by rename: state (running, done, stopped, failed), reason, step, resume.
void write_status(const std::filesystem::path& directory, const std::string& state, const std::string& reason,
                  std::int64_t step, bool resume);

}  // namespace octet
