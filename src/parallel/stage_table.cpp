#include "octet/parallel/stage_table.h"

#include <algorithm>

#include "octet/base/error.h"

namespace octet {

namespace {

[[noreturn]] void refuse_too_few(int layers, int stages, int chunks) {
  const int virtual_stages = stages * chunks;
  std::string ways = fmt::format("model.layers = {} or more", virtual_stages);
  if (stages > 1 && layers >= chunks) {
    ways += fmt::format(", parallel.pipeline = {} or less", layers / chunks);
  }
  if (chunks > 1 && layers >= stages) ways += fmt::format(", parallel.chunks = {} or less", layers / stages);
  fail(ErrorKind::kUsage,
       "model.layers = {} on parallel.pipeline {} × parallel.chunks {} = {} virtual stages leaves some "
       "without "
       "a layer; allowed: {}",
       layers, stages, chunks, virtual_stages, ways);
}

}  // namespace

std::vector<StageLayers> stage_table(int layers, int stages, int chunks, double embedding_work,
                                     double head_work) {
  OCTET_ASSERT(stages >= 1 && chunks >= 1 && embedding_work >= 0 && head_work >= 0);
  const int virtual_stages = stages * chunks;
  if (layers < virtual_stages) refuse_too_few(layers, stages, chunks);
  std::vector<StageLayers> table(static_cast<std::size_t>(virtual_stages), {0, 1, 1.0});
  table.front().work += embedding_work;
  table.back().work += head_work;
  // All layers cost the same, so giving each to the stage with the least work keeps the largest work least.
  for (int layer = virtual_stages; layer < layers; ++layer) {
    const auto least = std::min_element(table.rbegin(), table.rend(),
                                        [](const auto& a, const auto& b) { return a.work < b.work; });
    ++least->count;
    least->work += 1;
  }
  int first = 0;
  for (StageLayers& stage : table) {
    stage.first = first;
    first += stage.count;
  }
  OCTET_ASSERT(first == layers);
  return table;
}

std::string format_stage_table(const std::vector<StageLayers>& table, int stages) {
  std::string text = "  stage  rank  chunk     layers  count   work\n";
  int layers = 0;
  double work = 0, largest = 0;
  for (std::size_t i = 0; i < table.size(); ++i) {
    const StageLayers& stage = table[i];
    const int number = static_cast<int>(i), end = stage.first + stage.count - 1;
    const std::string range =
        stage.count == 1 ? fmt::format("{}", end) : fmt::format("{}-{}", stage.first, end);
    std::string also;
    if (i == 0) also += "  + embedding";
    if (i + 1 == table.size()) also += "  + head";
    text += fmt::format("  {:5}  {:4}  {:5}  {:>9}  {:5}  {:5.2f}{}\n", number, number % stages,
                        number / stages, range, stage.count, stage.work, also);
    layers += stage.count;
    work += stage.work;
    largest = std::max(largest, stage.work);
  }
  return text + fmt::format("  {} layers on {} virtual stages; largest work {:.2f} layers, mean {:.2f}\n",
                            layers, table.size(), largest, work / static_cast<double>(table.size()));
}

}  // namespace octet
