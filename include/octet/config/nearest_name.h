#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace octet {

/// Insertions, deletions, replacements and swaps of neighbours that turn one word into the other (optimal
/// string alignment distance).
int edit_distance(std::string_view a, std::string_view b);

/// The candidate with the fewest edits from `name`, the first of equals; empty when all are too far (more
/// than two edits, or a third of the name where that is more).
std::string nearest_name(std::string_view name, const std::vector<std::string>& candidates);

}  // namespace octet
