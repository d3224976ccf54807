#include "octet/runtime/report_text.h"

#include <fmt/format.h>

#include <iterator>
#include <sstream>

#include "octet/runtime/topology.h"

namespace octet {

std::string wrapped(const std::string& head, const std::vector<std::string>& items) {
  std::string text = head;
  std::size_t column = head.size();
  for (std::size_t i = 0; i < items.size(); ++i) {
    if (column > head.size() && column + 1 + items[i].size() > kReportColumns) {
      text += "\n" + std::string(head.size(), ' ');
      column = head.size();
    } else if (i > 0) {
      text += " ";
      ++column;
    }
    text += items[i];
    column += items[i].size();
  }
  return text;
}

std::string wrapped(const std::string& head, const std::string& text) {
  std::istringstream words(text);
  return wrapped(head, std::vector<std::string>(std::istream_iterator<std::string>(words), {}));
}

std::string ranks_text(const std::vector<int>& ranks) {
  return fmt::format("rank{} {}", ranks.size() == 1 ? "" : "s", cpu_list_text(ranks));
}

}  // namespace octet
