#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include "octet/app/commands.h"
#include "octet/base/error.h"
#include "octet/config/version.h"

namespace {

int run(std::vector<std::string> words) {
  if (words.empty()) {
    octet::fail(octet::ErrorKind::kUsage, "no command given; `octet help` lists them");
  }
  if (words.front() == "--version") {
    std::fputs(octet::version_report().c_str(), stdout);
    return 0;
  }
  if (words.front() == "--help" || words.front() == "-h") words.front() = "help";
  const octet::Command& command = octet::find_command(words.front());
  words.erase(words.begin());
  return command.run(words);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run({argv + 1, argv + argc});
  } catch (const octet::Error& error) {
    std::fprintf(stderr, "octet: error: %s\n", error.what());
    return error.exit_code();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "octet: error: %s\n", error.what());
    return static_cast<int>(octet::ErrorKind::kDevice);
  }
}
