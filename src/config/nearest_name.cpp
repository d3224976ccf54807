#include "octet/config/nearest_name.h"

#include <algorithm>

namespace octet {

int edit_distance(std::string_view a, std::string_view b) {
  const std::size_t rows = a.size() + 1, cols = b.size() + 1;
  std::vector<std::vector<int>> cost(rows, std::vector<int>(cols));
  for (std::size_t i = 0; i < rows; ++i) cost[i][0] = static_cast<int>(i);
  for (std::size_t j = 0; j < cols; ++j) cost[0][j] = static_cast<int>(j);
  for (std::size_t i = 1; i < rows; ++i) {
    for (std::size_t j = 1; j < cols; ++j) {
      const int replace = cost[i - 1][j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
      cost[i][j] = std::min({cost[i - 1][j] + 1, cost[i][j - 1] + 1, replace});
      const bool swapped = i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
      if (swapped) cost[i][j] = std::min(cost[i][j], cost[i - 2][j - 2] + 1);
    }
  }
  return cost[rows - 1][cols - 1];
}

std::string nearest_name(std::string_view name, const std::vector<std::string>& candidates) {
  std::string nearest;
  int fewest = std::max(2, static_cast<int>(name.size()) / 3) + 1;
  for (const std::string& candidate : candidates) {
    const int edits = edit_distance(name, candidate);
    if (edits < fewest) {
      fewest = edits;
      nearest = candidate;
    }
  }
  return nearest;
}

}  // namespace octet
