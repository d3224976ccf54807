#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace octet {

/// Widest line of the start-up report and of what octet bench notes, in bytes.
constexpr std::size_t kReportColumns = 100;

/// `items` separated by blanks after `head`, in lines of at most kReportColumns; later lines are indented as
/// far as `head` is long.
std::string wrapped(const std::string& head, const std::vector<std::string>& items);
/// The same of the words of a text.
std::string wrapped(const std::string& head, const std::string& text);

/// "rank 3" or "ranks 0-2,5".
std::string ranks_text(const std::vector<int>& ranks);

}  // namespace octet
