#pragma once

#include <boost/program_options.hpp>
#include <string>
#include <vector>

namespace octet {

/// Parses the words after a subcommand; words that are no option become values of `positional`. Throws
/// Error(kUsage) that names the word and, for an unknown option, the nearest one.
boost::program_options::variables_map parse_options(
    const std::string& command, const std::vector<std::string>& arguments,
    const boost::program_options::options_description& options, const char* positional);

/// The list of options as users read it.
std::string text_of(const boost::program_options::options_description& options);

}  // namespace octet
