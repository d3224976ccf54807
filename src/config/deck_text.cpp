#include "deck_text.h"

#include <fmt/format.h>

#include <optional>
#include <sstream>
#include <string_view>

namespace octet {
namespace {

constexpr std::string_view kSpace = " \t\r";

std::string_view trim(std::string_view text) {
  const auto first = text.find_first_not_of(kSpace);
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(kSpace) - first + 1);
}

/// The text before the first # that starts the text or follows a space.
std::string_view without_comment(std::string_view text) {
  for (std::size_t at = text.find('#'); at != std::string_view::npos; at = text.find('#', at + 1)) {
    if (at == 0 || kSpace.find(text[at - 1]) != std::string_view::npos) return text.substr(0, at);
  }
  return text;
}

/// The content of a leading "…" in which \" and \\ stand for themselves, or nothing where the closing quote
/// is missing or something other than a comment follows it.
std::optional<std::string> unquote(std::string_view text) {
  std::string content;
  for (std::size_t at = 1; at < text.size(); ++at) {
    if (text[at] == '"') {
      if (!trim(without_comment(text.substr(at + 1))).empty()) return std::nullopt;
      return content;
    }
    if (text[at] == '\\' && at + 1 < text.size()) ++at;
    content += text[at];
  }
  return std::nullopt;
}

}  // namespace

std::vector<DeckSetting> split_deck(const std::string& text, const std::string& file,
                                    std::vector<std::string>& problems) {
  std::vector<DeckSetting> settings;
  std::istringstream lines(text);
  std::string raw, section;
  for (int number = 1; std::getline(lines, raw); ++number) {
    const std::string origin = fmt::format("{}:{}", file, number);
    const std::string_view line = trim(without_comment(raw));
    if (line.empty()) continue;
    if (line.front() == '[') {
      if (line.back() != ']') {
        problems.push_back(fmt::format("{}: cannot read `{}`; a section is written [name]", origin, line));
      } else {
        section = trim(line.substr(1, line.size() - 2));
      }
      continue;
    }
    // The value is taken from the raw line, since a quoted one may hold a #.
    const auto equals = raw.find('=');
    const std::string_view name = trim(std::string_view(raw).substr(0, equals));
    if (line.find('=') == std::string_view::npos || name.empty() ||
        name.find_first_of(" \t") != std::string_view::npos) {
      problems.push_back(fmt::format("{}: cannot read `{}`; a setting is written key = value", origin, line));
      continue;
    }
    DeckSetting setting{section.empty() ? std::string(name) : fmt::format("{}.{}", section, name), "", false,
                        origin};
    const std::string_view value = trim(std::string_view(raw).substr(equals + 1));
    if (!value.empty() && value.front() == '"') {
      const auto content = unquote(value);
      if (!content) {
        problems.push_back(fmt::format("{}: {} has a text without its closing quote", origin, setting.key));
        continue;
      }
      setting.value = *content;
      setting.quoted = true;
    } else {
      setting.value = trim(without_comment(std::string_view(raw).substr(equals + 1)));
    }
    settings.push_back(std::move(setting));
  }
  return settings;
}

std::string quote_where_needed(const std::string& value) {
  const bool plain =
      trim(value) == value && without_comment(value) == value && (value.empty() || value.front() != '"');
  if (plain) return value;
  std::string quoted = "\"";
  for (const char c : value) {
    if (c == '"' || c == '\\') quoted += '\\';
    quoted += c;
  }
  return quoted + '"';
}

}  // namespace octet
