#pragma once

#include <string>
#include <vector>

namespace octet {

/// The subcommands. Each takes the words after its name, returns the exit code of the process, and throws
/// Error. Each usage is one paragraph: the command line, then what it does and its options.
int run_train(const std::vector<std::string>& arguments);
int run_pack(const std::vector<std::string>& arguments);
int run_inspect(const std::vector<std::string>& arguments);
int run_bench(const std::vector<std::string>& arguments);
int run_help(const std::vector<std::string>& arguments);

std::string train_usage();
std::string pack_usage();
std::string inspect_usage();
std::string bench_usage();
std::string help_usage();

/// One row of the list of subcommands.
struct Command {
  std::string name;
  int (*run)(const std::vector<std::string>& arguments);
  std::string (*usage)();
  std::string summary;
};

/// All subcommands, in the order in which help lists them.
const std::vector<Command>& commands();

/// The row of `name`. Throws Error(kUsage) with the nearest name where there is none.
const Command& find_command(const std::string& name);

}  // namespace octet
