#include "octet/train/metrics.h"

#include <cmath>
#include <nlohmann/json.hpp>
#include <sstream>

#include "octet/base/error.h"

namespace octet {

namespace {

using Json = nlohmann::ordered_json;

constexpr double kGiB = 1024.0 * 1024.0 * 1024.0;

/// JSON has no NaN: a loss without tokens is null.
Json number_or_null(double value) {
  return std::isfinite(value) ? Json(value) : Json(nullptr);
}

std::string loss_text(const StepResult& result) {
  return result.tokens > 0 ? fmt::format("{:.4f}", result.loss) : std::string("no tokens");
}

}  // namespace

std::string duration_text(double seconds) {
  const auto total = static_cast<std::int64_t>(std::max(0.0, std::round(seconds)));
  if (total < 60) return fmt::format("{}s", total);
  if (total < 3600) return fmt::format("{}m{:02}s", total / 60, total % 60);
  if (total < 86400) return fmt::format("{}h{:02}m", total / 3600, total % 3600 / 60);
  return fmt::format("{}d{:02}h", total / 86400, total % 86400 / 3600);
}

std::string log_heading() {
  return fmt::format("{:>13} {:>9} {:>9} {:>9} {:>9} {:>10} {:>7} {:>6} {:>13} {:>9} {:>8} {:>8} {:>7} {:>7}",
                     "step", "loss", "grad_norm", "lr", "tokens", "tok/s/gpu", "tflops", "mfu", "mem GiB",
                     "step_ms", "data_ms", "comm_ms", "skipped", "eta");
}

std::string log_text(const LogLine& line) {
  const std::string mfu = line.mfu >= 0 ? fmt::format("{:.1f}%", line.mfu * 100) : std::string("-");
  const std::string memory =
      fmt::format("{:.1f} {:.0f}%", static_cast<double>(line.memory_used) / kGiB,
                  100.0 * static_cast<double>(line.memory_used) /
                      static_cast<double>(std::max<std::int64_t>(line.memory_total, 1)));
  return fmt::format(
      "{:>13} {:>9} {:>9.4f} {:>9.3e} {:>9.3e} {:>10.0f} {:>7.1f} {:>6} {:>13} {:>9.1f} {:>8.1f} {:>8.1f} "
      "{:>7} {:>7}",
      fmt::format("{}/{}", line.step, line.steps), loss_text(line.last), line.last.gradient_norm,
      line.last.learning_rate, static_cast<double>(line.tokens), line.tokens_per_second, line.tflops, mfu,
      memory, line.step_ms, line.data_ms, line.comm_ms, line.skipped, duration_text(line.eta_seconds));
}

MetricsFile::MetricsFile(const std::filesystem::path& path, std::int64_t resumed_step) : path_(path) {
  std::string kept;
  if (std::ifstream old(path); old) {
    for (std::string line; std::getline(old, line);) {
      const Json object = Json::parse(line, nullptr, false);
      if (object.is_object() && object.value("step", std::int64_t{0}) <= resumed_step) kept += line + "\n";
    }
  }
  file_.open(path, std::ios::trunc);
  append(kept);
}

void MetricsFile::append(const std::string& text) {
  file_ << text << std::flush;
  if (!file_) fail(ErrorKind::kUsage, "cannot write {}", path_.string());
}

void MetricsFile::write(const LogLine& line) {
  const Json object = {{"step", line.step},
                       {"loss", number_or_null(line.last.loss)},
                       {"grad_norm", number_or_null(line.last.gradient_norm)},
                       {"lr", line.last.learning_rate},
                       {"tokens", line.tokens},
                       {"tok/s/gpu", line.tokens_per_second},
                       {"tflops", line.tflops},
                       {"mfu", line.mfu >= 0 ? Json(line.mfu) : Json(nullptr)},
                       {"mem_gib", static_cast<double>(line.memory_used) / kGiB},
                       {"mem_percent", 100.0 * static_cast<double>(line.memory_used) /
                                           static_cast<double>(std::max<std::int64_t>(line.memory_total, 1))},
                       {"step_ms", line.step_ms},
                       {"data_ms", line.data_ms},
                       {"comm_ms", line.comm_ms},
                       {"skipped", line.skipped},
                       {"eta", line.eta_seconds}};
  append(object.dump() + "\n");
}

void MetricsFile::write_evaluation(std::int64_t step, const Evaluation& evaluation) {
  const Json object = {{"step", step},
                       {"validation_loss", number_or_null(evaluation.loss)},
                       {"validation_tokens", evaluation.tokens}};
  append(object.dump() + "\n");
}

void write_status(const std::filesystem::path& directory, const std::string& state, const std::string& reason,
                  std::int64_t step, bool resume) {
  const Json object = {{"state", state}, {"reason", reason}, {"step", step}, {"resume", resume}};
  const std::filesystem::path path = directory / "STATUS.json", temporary = directory / "STATUS.json.tmp";
  std::ofstream(temporary) << object.dump(2) << "\n";
  std::error_code ignored;  // a status that cannot be written must not end a run
  std::filesystem::rename(temporary, path, ignored);
}

}  // namespace octet
