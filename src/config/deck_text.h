#pragma once

#include <string>
#include <vector>

namespace octet {

/// One `key = value` of a deck file or of `--set`.
struct DeckSetting {
  std::string key;  ///< section.key
  std::string value;
  bool quoted = false;  ///< written as "value"
  std::string origin;   ///< FILE:LINE, or --set
};

/// Splits the text of a deck file into settings. A line is `[section]`, `key = value` or empty, and may end
/// in a comment that starts with # at the line's start or after a space. Before the first section, keys are
/// written section.key. Lines that cannot be read are added to `problems` as FILE:LINE: message.
std::vector<DeckSetting> split_deck(const std::string& text, const std::string& file,
                                    std::vector<std::string>& problems);

/// A text value as a deck file takes it: quoted where it would otherwise not read back the same.
std::string quote_where_needed(const std::string& value);

}  // namespace octet
