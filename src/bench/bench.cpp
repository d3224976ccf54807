#include "octet/bench/bench.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>

#include "octet/base/error.h"
#include "octet/config/resolve.h"
#include "octet/config/version.h"
#include "octet/runtime/device_choice.h"
#include "octet/runtime/report_text.h"

namespace octet {

namespace {

void say(const World& world, const std::string& text) {
  if (world.rank() != 0) return;
  std::fputs(text.c_str(), stdout);
  std::fflush(stdout);
}

std::string text_of(const BenchPart& part, const PartResult& result) {
  std::string text = fmt::format("\n{}: {}\n", part.name, result.title);
  if (!result.table.rows().empty()) text += result.table.text();
  for (const std::string& note : result.notes) text += wrapped("  # ", note) + "\n";
  for (const std::string& warning : result.warnings) text += wrapped("  WARNING ", warning) + "\n";
  return text;
}

/// The fields of a request that are not 0, in place of the device's defaults.
BenchLimits limits_for(DeviceKind kind, const BenchLimits& wished) {
  BenchLimits limits = default_limits(kind);
  if (wished.max_bytes > 0) limits.max_bytes = wished.max_bytes;
  if (wished.io_bytes > 0) limits.io_bytes = wished.io_bytes;
  if (wished.seconds > 0) limits.seconds = wished.seconds;
  return limits;
}

/// The file that results go to, with its folder made. Throws Error(kUsage).
std::filesystem::path result_file(const Deck& deck, const std::string& wished) {
  const std::filesystem::path path = wished.empty() ? std::filesystem::path(deck.run.directory) / "bench.json"
                                                    : std::filesystem::path(wished);
  std::error_code error;
  if (path.has_parent_path()) std::filesystem::create_directories(path.parent_path(), error);
  std::ofstream probe(path, std::ios::app);
  if (error || !probe) fail(ErrorKind::kUsage, "{} cannot be written", path.string());
  return path;
}

}  // namespace

int run_parts(BenchSession& session, const std::vector<std::string>& parts, const std::string& json) {
  const World& world = session.world;
  const auto wanted = [&](const BenchPart& part) {
    return parts.empty() || std::find(parts.begin(), parts.end(), part.name) != parts.end();
  };
  nlohmann::json deck = nlohmann::json::object();
  for (const auto& [key, value] : deck_values(session.deck)) deck[key] = value;
  nlohmann::json all = {{"format", "octet-bench"}, {"version", 1},
                        {"program", version()},    {"device", session.device.name()},
                        {"ranks", world.size()},   {"nodes", world.nodes()},
                        {"deck", std::move(deck)}, {"parts", nlohmann::json::object()}};
  bool correct = true;
  std::size_t warnings = 0;
  for (const BenchPart& part : bench_parts()) {
    if (!wanted(part)) continue;
    const PartResult result = part.run(session);
    correct = correct && result.table.correct();
    warnings += result.warnings.size();
    say(world, text_of(part, result));
    nlohmann::json object = result.table.json();
    object["title"] = result.title;
    object["notes"] = result.notes;
    object["warnings"] = result.warnings;
    object["correct"] = result.table.correct();
    all["parts"][part.name] = std::move(object);
  }
  all["correct"] = correct;
  world.together([&] {
    if (world.rank() != 0) return;
    std::ofstream file(json, std::ios::trunc);
    if (!(file << all.dump(1) << "\n") || !file.flush())
      fail(ErrorKind::kUsage, "{} cannot be written", json);
  });
  say(world, fmt::format("\n{}; {} warning{}; results in {}\n",
                         correct ? "all results are correct" : "WRONG results, see above", warnings,
                         warnings == 1 ? "" : "s", json));
  return correct ? 0 : static_cast<int>(ErrorKind::kDevice);
}

int run_bench(const World& world, const BenchRequest& request) {
  Deck deck;
  std::string json;
  world.together([&] {
    deck = read_deck(request.files, request.assignments);
    if (deck.data.train.empty()) deck.data.train = "(tokens made by the bench)";
    resolve_deck(deck, world.size());
    if (world.rank() == 0) result_file(deck, request.json);
    json = request.json.empty() ? (std::filesystem::path(deck.run.directory) / "bench.json").string()
                                : request.json;
  });
  const DeviceChoice choice = open_device(world, deck.run);
  Device& device = *choice.device;
  world.together([&] { check_fp8(deck.precision.fp8, device.name(), device.compute_capability()); });
  try {
    const std::unique_ptr<Stream> stream = device.make_stream();
    BenchSession session{world,
                         deck,
                         device,
                         choice.shared,
                         {[&] {
                            return device.kind() == DeviceKind::kCpu
                                       ? make_cpu_ops(cpu_threads(world))
                                       : make_cuda_ops(device,
                                                       {.deterministic_attention = deck.run.deterministic,
                                                        .own_products = own_kernels_of(deck.run.matmul),
                                                        .own_attention = own_kernels_of(deck.run.attention)});
                          },
                          [&](MPI_Comm ranks, const std::string& name) {
                            return make_communicator(ranks, device, choice.shared, name);
                          }},
                         limits_for(device.kind(), request.limits),
                         *stream};
    say(world, fmt::format("octet bench {}: {} rank{} on {} node{}, {}\n", version(), world.size(),
                           world.size() == 1 ? "" : "s", world.nodes(), world.nodes() == 1 ? "" : "s",
                           device.name()));
    return run_parts(session, request.parts, json);
  } catch (const Error& error) {
    // What decks and files are at fault for, all ranks agreed on; a failing device the others cannot know of.
    if (error.kind() != ErrorKind::kDevice) throw;
    world.abort(error);
  } catch (const std::exception& error) {
    world.abort(error);
  }
}

}  // namespace octet
