#pragma once

#include <string>

namespace octet {

/// Version with `git describe`, such as "0.1.0 (3f2c1ab)".
std::string version();
/// Version, compiler, and the libraries this program was built and runs with, a line each.
std::string version_report();

}  // namespace octet
