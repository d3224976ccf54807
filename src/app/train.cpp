#include <cstdio>

#include "octet/app/commands.h"
#include "octet/base/error.h"
#include "octet/runtime/world.h"
#include "octet/train/run.h"

namespace octet {

namespace {

struct Arguments {
  std::vector<std::string> files, assignments;
};

Arguments parse(const std::vector<std::string>& words) {
  Arguments result;
  for (std::size_t i = 0; i < words.size(); ++i) {
    const std::string& word = words[i];
    if (word == "--set") {
      if (i + 1 == words.size()) fail(ErrorKind::kUsage, "--set needs section.key=value");
      result.assignments.push_back(words[++i]);
    } else if (word.starts_with("--set=")) {
      result.assignments.push_back(word.substr(6));
    } else if (word.starts_with("-")) {
      fail(ErrorKind::kUsage, "unknown option {} of octet train; allowed: --set section.key=value", word);
    } else {
      result.files.push_back(word);
    }
  }
  if (result.files.empty() && result.assignments.empty()) {
    fail(ErrorKind::kUsage, "octet train needs at least one deck file\n{}", train_usage());
  }
  return result;
}

}  // namespace

std::string train_usage() {
  return "octet train DECK... [--set section.key=value]...\n"
         "  Trains as the deck files say; later files and --set win. Started by mpirun or srun, one rank a "
         "GPU (or CPU ranks).\n"
         "  `octet help deck` lists all keys.\n";
}

int run_train(const std::vector<std::string>& arguments) {
  const World world;
  try {
    Arguments parsed;
    world.together([&] { parsed = parse(arguments); });
    return run_training(world, parsed.files, parsed.assignments);
  } catch (const Error& error) {
    // All ranks have the same error; one of them speaks.
    if (world.rank() == 0) std::fprintf(stderr, "octet: error: %s\n", error.what());
    return error.exit_code();
  }
}

}  // namespace octet
