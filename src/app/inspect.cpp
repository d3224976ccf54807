#include "octet/data/inspect.h"

#include <cstdio>
#include <filesystem>

#include "octet/app/commands.h"
#include "octet/base/error.h"
#include "octet/checkpoint/checkpoint.h"
#include "options.h"

namespace octet {
namespace {

namespace fs = std::filesystem;
namespace po = boost::program_options;

po::options_description inspect_options() {
  po::options_description options("Options");
  auto add = options.add_options();
  add("document", po::value<std::int64_t>()->default_value(0),
      "number of the document to show the beginning of");
  add("sequence", po::value<std::int64_t>()->default_value(0), "count the samples of this many tokens");
  add("no-hash", "do not verify hashes, which reads every byte");
  add("path", po::value<std::vector<std::string>>(), "a token file or a checkpoint (the other word)");
  add("help", "this page");
  return options;
}

/// The checkpoint that a step directory is, or the newest of a run's folder or of its checkpoints folder.
CheckpointInfo find_checkpoint(const fs::path& directory) {
  if (fs::exists(directory / "manifest.json") || directory.filename().string().starts_with("step-"))
    return open_checkpoint(directory);
  const fs::path inside = directory / "checkpoints";
  const fs::path folder = fs::is_directory(inside) ? inside : directory;
  std::vector<std::string> skipped;
  const auto newest = newest_checkpoint(folder, &skipped);
  for (const std::string& reason : skipped)
    std::fputs(fmt::format("octet: warning: {}\n", reason).c_str(), stderr);
  if (!newest) fail(ErrorKind::kCheckpoint, "{}: holds no complete checkpoint", folder.string());
  return *newest;
}

std::string describe(const CheckpointInfo& info) {
  const CheckpointState& state = info.state;
  std::string text;
  const auto line = [&](const char* name, const auto& value) {
    text += fmt::format("{:<17} {}\n", name, value);
  };
  line("checkpoint", info.path.string());
  line("format", info.format);
  line("step", state.step);
  line("samples", state.samples);
  line("target tokens", state.tokens);
  line("updates", state.updates);
  line("layout", state.layout);
  line("written by", state.program);
  line("training tokens", state.train_hash);
  std::int64_t elements = 0, bytes = 0;
  for (const auto& [name, tensor] : info.tensors) elements += tensor.rows * tensor.cols;
  for (const auto& file : info.files) bytes += file.bytes;
  line("tensors", fmt::format("{}, {} elements", info.tensors.size(), elements));
  line("files", fmt::format("{}, {} bytes", info.files.size(), bytes));
  for (const auto& file : info.files)
    text += fmt::format("  {} {:>14} bytes  {}\n", file.xxh3_128, file.bytes, file.name);
  text += "deck:\n";
  for (const auto& [key, value] : state.deck) text += fmt::format("  {} = {}\n", key, value);
  return text;
}

void inspect_checkpoint(const fs::path& directory, bool verify) {
  const CheckpointInfo info = find_checkpoint(directory);
  std::fputs(describe(info).c_str(), stdout);
  if (!verify) return;
  const std::vector<std::string> problems = verify_checkpoint(info);
  if (!problems.empty())
    fail(ErrorKind::kCheckpoint, "{}: verification FAILED:\n  {}", info.path.string(),
         fmt::join(problems, "\n  "));
  std::fputs("verification      OK: every hash, and every tensor is covered once\n", stdout);
}

}  // namespace

std::string inspect_usage() {
  return fmt::format(
      "usage: octet inspect [options] TOKEN_FILE | CHECKPOINT\n\n"
      "Describes and verifies a token file, a checkpoint (step-...), or the newest checkpoint of a run's "
      "folder.\n\n{}",
      text_of(inspect_options()));
}

int run_inspect(const std::vector<std::string>& arguments) {
  const po::variables_map values = parse_options("inspect", arguments, inspect_options(), "path");
  if (values.count("help") > 0) {
    std::fputs(inspect_usage().c_str(), stdout);
    return 0;
  }
  const auto paths =
      values.count("path") > 0 ? values["path"].as<std::vector<std::string>>() : std::vector<std::string>{};
  if (paths.size() != 1)
    fail(ErrorKind::kUsage,
         "octet inspect takes one token file or checkpoint, not {}; see `octet help inspect`", paths.size());
  InspectOptions options;
  options.document = values["document"].as<std::int64_t>();
  options.sequence = values["sequence"].as<std::int64_t>();
  options.check_hash = values.count("no-hash") == 0;
  if (options.sequence < 0)
    fail(ErrorKind::kUsage, "octet inspect: --sequence {} is negative", options.sequence);
  if (fs::is_directory(paths.front()))
    inspect_checkpoint(paths.front(), options.check_hash);
  else
    std::fputs(inspect_token_file(paths.front(), options).c_str(), stdout);
  return 0;
}

}  // namespace octet
