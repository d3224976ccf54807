#include "octet/train/report.h"

#include "octet/config/version.h"
#include "octet/runtime/report_text.h"

namespace octet {

namespace {

constexpr double kGiB = 1024.0 * 1024.0 * 1024.0;

/// The ranks of every host with their places in the grid: one row a host, one cell a rank.
std::string grid_picture(const World& world, const Grid& grid, const std::vector<std::string>& places) {
  const GridPoint& sizes = grid.sizes();
  const auto mark = [](const char* axis, int at, int size) {
    return size > 1 ? fmt::format(" {}{}", axis, at) : std::string();
  };
  std::string text;
  std::string host;
  for (int rank = 0; rank < world.size(); ++rank) {
    const std::string& place = places[static_cast<std::size_t>(rank)];
    const std::string here = place.substr(0, place.find(' '));
    if (here != host || rank % 8 == 0) {
      text += fmt::format("{}    {:<16}", text.empty() ? "" : "\n", here == host ? "" : here);
      host = here;
    }
    const GridPoint at = place_of(rank, grid.sizes());
    text +=
        fmt::format(" [{}{}{}{}{}]", rank, mark("d", at.data, sizes.data), mark("t", at.tensor, sizes.tensor),
                    mark("c", at.context, sizes.context), mark("p", at.pipeline, sizes.pipeline));
  }
  return text;
}

std::string memory_table(const Engine& engine, const Device& device) {
  std::string text;
  std::int64_t total = 0;
  for (const auto& [name, bytes] : engine.memory()) {
    text += fmt::format("    {:<18} {:>9.3f} GiB\n", name, static_cast<double>(bytes) / kGiB);
    total += bytes;
  }
  return text + fmt::format("    {:<18} {:>9.3f} GiB of {:.1f} GiB", "planned in all",
                            static_cast<double>(total) / kGiB,
                            static_cast<double>(device.memory_total()) / kGiB);
}

std::string flops_line(const Deck& deck, const Engine& engine, const Device& device) {
  const double flops = flops_per_token(engine.shape(), deck.batch.sequence);
  std::string text =
      wrapped("  FLOPs      ",
              fmt::format("{:.4f} GFLOP/token = 6 · (parameters of matrix products) + 6 · layers · query "
                          "width · sequence (causal, once)",
                          flops / 1e9));
  if (device.peak_flops() > 0) {
    text += fmt::format("\n  MFU        against {:.0f} TFLOP/s dense bf16 a GPU", device.peak_flops() / 1e12);
    const double floor = flops * static_cast<double>(deck.batch.global * deck.batch.sequence) /
                         (device.peak_flops() * engine.grid().sizes().volume());
    text += fmt::format("\n  step time  {:.3f} s at that peak; expect about twice that", floor);
  }
  return text;
}

std::string data_line(const char* label, const TokenFile& file, std::int64_t sequence) {
  return wrapped(fmt::format("  {:<10} ", label),
                 fmt::format("{}: {} tokens, {} documents, {} samples of {}, tokenizer {}", file.path(),
                             file.info().tokens, file.info().documents, samples_in(file, sequence), sequence,
                             file.info().tokenizer));
}

}  // namespace

std::string startup_report(const World& world, const Deck& deck, const Engine& engine, const Device& device,
                           const std::vector<std::string>& places, const std::string& nodes,
                           const TokenFile& train, const TokenFile* validation) {
  const BatchCut cut = engine.cut();
  std::string text = fmt::format("octet {}\n", version());
  text += fmt::format("  world      {} ranks on {} node{}, {}\n", world.size(), world.nodes(),
                      world.nodes() == 1 ? "" : "s", device.name());
  text += fmt::format("  grid       {} (rank; data, tensor, context, pipeline)\n{}\n", engine.layout(),
                      grid_picture(world, engine.grid(), places));
  text += nodes + "\n";
  text += wrapped("  model      ",
                  fmt::format("{}: {} layers, hidden {}, {} heads / {} key heads of {}, mlp {}, vocabulary "
                              "{}{}; {:.3f} M parameters",
                              deck.model.family, deck.model.layers, deck.model.hidden, deck.model.heads,
                              deck.model.kv_heads, deck.model.head_size, deck.model.mlp,
                              deck.model.vocabulary, deck.model.tied ? " (tied)" : "",
                              static_cast<double>(engine.table().parameters()) / 1e6)) +
          "\n";
  const std::string fp8 =
      deck.precision.fp8 == "none"
          ? ""
          : fmt::format(", linear layers of blocks in fp8 ({} scales{})", deck.precision.fp8,
                        deck.precision.fp8_gather ? ", weights gathered in 8 bits" : "");
  text += wrapped("  precision  ",
                  fmt::format("{} compute{}; {} masters, {} moments; float32 gradient sums and softmax",
                              deck.precision.compute, fp8, deck.optimizer.master, deck.optimizer.moments)) +
          "\n";
  text += fmt::format("  batch      {} samples of {} tokens a step: micro-batch {} × {} × data {}\n",
                      cut.global, cut.sequence, cut.micro, cut.micro_batches(), cut.data_size);
  text += data_line("train", train, cut.sequence) + "\n";
  if (validation != nullptr) text += data_line("validation", *validation, cut.sequence) + "\n";
  text += deck.data.mask_documents
              ? "  documents  do not see one another: positions begin anew, no target crosses\n"
              : "  documents  attend to one another where a sample crosses them\n";
  if (!engine.stages().table.empty()) {
    text += fmt::format("  stages     schedule {}\n{}", engine.stages().schedule.name, engine.stages().table);
  }
  text += "  memory     a rank:\n" + memory_table(engine, device) + "\n";
  text += flops_line(deck, engine, device) + "\n";
  text += fmt::format("  run folder {}", deck.run.directory);
  return text;
}

}  // namespace octet
