#include <fmt/format.h>

#include <cstdio>

#include "octet/app/commands.h"
#include "octet/base/error.h"
#include "octet/config/deck.h"
#include "octet/config/nearest_name.h"
#include "octet/config/version.h"

namespace octet {
namespace {

std::string overview() {
  std::string text = fmt::format(
      "octet {}: trains decoder-only language models on CPUs and GPUs; mpirun or srun starts one process a "
      "GPU.\n\n",
      version());
  for (const Command& command : commands()) {
    text += fmt::format("  octet {:<10} {}\n", command.name, command.summary);
  }
  return text +
         "\n`octet help COMMAND` says more, `octet help deck` lists every key of a deck, `octet --version` "
         "the\n"
         "libraries in use. Exit codes: 0 done; 2 bad usage or deck; 3 bad data; 4 bad checkpoint; 5 a rank "
         "or\n"
         "device failed; 6 training diverged; 85 stopped on request after a checkpoint, run again.\n";
}

}  // namespace

const std::vector<Command>& commands() {
  static const std::vector<Command> all = {
      {"train", run_train, train_usage,
       "trains the model that decks describe, and goes on from its checkpoints"},
      {"pack", run_pack, pack_usage, "turns text into a token file"},
      {"inspect", run_inspect, inspect_usage, "describes token files and checkpoints, and verifies them"},
      {"bench", run_bench, bench_usage,
       "measures communication, operators, disks and a training step on this machine"},
      {"help", run_help, help_usage, "explains a command, or the keys of a deck"},
  };
  return all;
}

const Command& find_command(const std::string& name) {
  std::vector<std::string> names;
  for (const Command& command : commands()) {
    if (command.name == name) return command;
    names.push_back(command.name);
  }
  const std::string nearest = nearest_name(name, names);
  if (nearest.empty()) fail(ErrorKind::kUsage, "unknown command {}; `octet help` lists them", name);
  fail(ErrorKind::kUsage, "unknown command {}; did you mean {}?", name, nearest);
}

std::string help_usage() {
  return "usage: octet help [COMMAND | deck]\n\nExplains a command, or lists every key of a deck.\n";
}

int run_help(const std::vector<std::string>& arguments) {
  if (arguments.size() > 1) fail(ErrorKind::kUsage, "octet help takes one word, not {}", arguments.size());
  const std::string page = arguments.empty()             ? overview()
                           : arguments.front() == "deck" ? describe_deck()
                                                         : find_command(arguments.front()).usage();
  std::fputs(page.c_str(), stdout);
  return 0;
}

}  // namespace octet
