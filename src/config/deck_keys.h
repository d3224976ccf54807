#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "octet/config/deck.h"

namespace octet {

/// Where a key's value lives in a deck; the alternative that is held is the key's type.
using DeckMember =
    std::variant<bool& (*)(Deck&), std::int64_t& (*)(Deck&), double& (*)(Deck&), std::string& (*)(Deck&)>;

/// Numbers a key may take.
struct DeckRange {
  double low = -std::numeric_limits<double>::infinity();
  double high = std::numeric_limits<double>::infinity();
  bool open_low = false, open_high = false;  ///< whether the end itself is excluded

  bool contains(double value) const {
    return (open_low ? value > low : value >= low) && (open_high ? value < high : value <= high);
  }
};

/// One row of the table of keys.
struct DeckKey {
  std::string name;  ///< section.key
  DeckMember member;
  DeckRange range;                   ///< of numbers
  std::vector<std::string> choices;  ///< of texts; empty: any text
  std::string help;

  std::string section() const { return name.substr(0, name.find('.')); }
  std::string short_name() const { return name.substr(name.find('.') + 1); }
  bool is_text() const { return std::holds_alternative<std::string& (*)(Deck&)>(member); }
};

/// Every key, sections together, in the order of the deck.
const std::vector<DeckKey>& deck_keys();

/// The row of `name` (section.key), or nullptr.
const DeckKey* find_deck_key(std::string_view name);

/// The values a key takes, in words: "integer >= 1", "number, 0 < value <= 1", "true or false", "one of: a,
/// b".
std::string allowed_values(const DeckKey& key);

/// The key's value in `deck`, as a deck would write it: doubles in the fewest digits that read back the same.
std::string value_text(const DeckKey& key, const Deck& deck);

/// Reads `text` as the key's type and stores it. Returns what is wrong, or nothing when it was stored.
std::string set_value(const DeckKey& key, const std::string& text, Deck& deck);

/// The name that someone who wrote `name` most likely meant, or nothing: names of other trainers first, then
/// the fewest edits, in any section.
std::string nearest_deck_key(std::string_view name);

}  // namespace octet
