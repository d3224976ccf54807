#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace octet {

/// Widest line of what is printed about nodes and environment, in bytes.
constexpr std::size_t kReportColumns = 100;

/// `items` separated by blanks after `head`, in lines of at most kReportColumns; later lines are indented as
/// far as `head` is long.
std::string wrapped(const std::string& head, const std::vector<std::string>& items);

/// "rank 3" or "ranks 0-2,5".
std::string ranks_text(const std::vector<int>& ranks);

}  // namespace octet
