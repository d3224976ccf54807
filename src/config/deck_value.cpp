#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <optional>

#include "deck_keys.h"

namespace octet {
namespace {

template <typename Number>
std::optional<Number> number_in(std::string_view text) {
  Number value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

/// An integer, or one with a suffix: k, m, g for 10^3, 10^6, 10^9.
std::optional<std::int64_t> count_in(std::string_view text) {
  std::int64_t unit = 1;
  if (!text.empty()) {
    switch (text.back()) {
      case 'k':
      case 'K':
        unit = 1'000;
        break;
      case 'm':
      case 'M':
        unit = 1'000'000;
        break;
      case 'g':
      case 'G':
        unit = 1'000'000'000;
        break;
      default:
        break;
    }
  }
  if (unit != 1) text.remove_suffix(1);
  const auto value = number_in<std::int64_t>(text);
  std::int64_t product = 0;
  if (!value || __builtin_mul_overflow(*value, unit, &product)) return std::nullopt;
  return product;
}

bool read_as(const DeckKey&, const std::string& text, bool& value) {
  value = text == "true";
  return text == "true" || text == "false";
}

bool read_as(const DeckKey& key, const std::string& text, std::int64_t& value) {
  const auto count = count_in(text);
  value = count.value_or(0);
  return count && key.range.contains(static_cast<double>(*count));
}

bool read_as(const DeckKey& key, const std::string& text, double& value) {
  const auto number = number_in<double>(text);
  value = number.value_or(0.0);
  return number && std::isfinite(*number) && key.range.contains(*number);
}

bool read_as(const DeckKey& key, const std::string& text, std::string& value) {
  value = text;
  const auto& choices = key.choices;
  return choices.empty() || std::find(choices.begin(), choices.end(), text) != choices.end();
}

std::string text_of(bool value) {
  return value ? "true" : "false";
}
std::string text_of(const std::string& value) {
  return value;
}
template <typename Number>
std::string text_of(Number value) {
  return fmt::format("{}", value);
}

std::string range_in_words(const DeckRange& range) {
  const bool low = std::isfinite(range.low), high = std::isfinite(range.high);
  if (low && high) {
    return fmt::format(", {} {} value {} {}", range.low,
                       range.open_low ? "<" : "<=", range.open_high ? "<" : "<=", range.high);
  }
  return low ? fmt::format(" {} {}", range.open_low ? ">" : ">=", range.low) : std::string();
}

}  // namespace

std::string allowed_values(const DeckKey& key) {
  struct Words {
    const DeckKey& key;
    std::string operator()(bool& (*)(Deck&)) const { return "true or false"; }
    std::string operator()(std::int64_t& (*)(Deck&)) const { return "integer" + range_in_words(key.range); }
    std::string operator()(double& (*)(Deck&)) const { return "number" + range_in_words(key.range); }
    std::string operator()(std::string& (*)(Deck&)) const {
      return key.choices.empty() ? "text" : fmt::format("one of: {}", fmt::join(key.choices, ", "));
    }
  };
  return std::visit(Words{key}, key.member);
}

std::string value_text(const DeckKey& key, const Deck& deck) {
  // Members are reached through non-const references; nothing is written.
  return std::visit([&](auto member) { return text_of(member(const_cast<Deck&>(deck))); }, key.member);
}

std::string set_value(const DeckKey& key, const std::string& text, Deck& deck) {
  return std::visit(
      [&](auto member) -> std::string {
        auto value = member(deck);
        if (!read_as(key, text, value)) {
          return fmt::format("{} = {} is not allowed; expected {}", key.name, text, allowed_values(key));
        }
        member(deck) = value;
        return {};
      },
      key.member);
}

}  // namespace octet
