#include "options.h"

#include <sstream>

#include "octet/base/error.h"
#include "octet/config/nearest_name.h"

namespace octet {

namespace po = boost::program_options;

po::variables_map parse_options(const std::string& command, const std::vector<std::string>& arguments,
                                const po::options_description& options, const char* positional) {
  po::positional_options_description words;
  words.add(positional, -1);
  // Shortened names are not guessed: a script that works today must not change when an option is added.
  const int style = po::command_line_style::unix_style & ~po::command_line_style::allow_guessing;
  po::variables_map values;
  try {
    po::store(po::command_line_parser(arguments).options(options).positional(words).style(style).run(),
              values);
    po::notify(values);
  } catch (const po::unknown_option& error) {
    std::vector<std::string> names;
    for (const auto& option : options.options()) names.push_back("--" + option->long_name());
    const std::string nearest = nearest_name(error.get_option_name(), names);
    fail(ErrorKind::kUsage, "octet {}: unknown option {}; {}", command, error.get_option_name(),
         nearest.empty() ? "`octet help " + command + "` lists them" : "did you mean " + nearest + "?");
  } catch (const po::error& error) {
    fail(ErrorKind::kUsage, "octet {}: {}; see `octet help {}`", command, error.what(), command);
  }
  return values;
}

std::string text_of(const po::options_description& options) {
  std::ostringstream text;
  text << options;
  return text.str();
}

}  // namespace octet
