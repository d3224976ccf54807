#include "octet/config/deck.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <boost/program_options.hpp>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>
#include <set>
#include <sstream>

#include "deck_keys.h"
#include "deck_text.h"
#include "octet/base/error.h"
#include "octet/config/nearest_name.h"

namespace octet {
namespace {

namespace po = boost::program_options;

/// The table of keys as Boost.Program_options takes it: a value is checked and stored in `deck` when
/// notified.
po::options_description description_of(Deck& deck) {
  po::options_description description;
  for (const DeckKey& key : deck_keys()) {
    const auto store = [&key, &deck](const std::string& text) {
      const std::string problem = set_value(key, text, deck);
      if (!problem.empty()) throw po::error(problem);
    };
    description.add_options()(key.name.c_str(), po::value<std::string>()->notifier(store), key.help.c_str());
  }
  return description;
}

/// Stores one setting in the deck that `description` was made for. Throws po::error.
void apply(const po::options_description& description, const std::string& key, const std::string& value) {
  po::parsed_options parsed(&description);
  parsed.options.emplace_back(key, std::vector<std::string>{value});
  po::variables_map values;
  po::store(parsed, values);
  po::notify(values);
}

std::set<std::string> sections() {
  std::set<std::string> names;
  for (const DeckKey& key : deck_keys()) names.insert(key.section());
  return names;
}

std::string unknown_key(const std::string& key) {
  const std::string nearest = nearest_deck_key(key);
  if (!nearest.empty()) return fmt::format("unknown key {}; did you mean {}?", key, nearest);
  const std::string section = key.substr(0, key.find('.'));
  if (key.find('.') == std::string::npos || sections().count(section) == 0) {
    return fmt::format("unknown key {}; keys are section.key with the sections {}", key,
                       fmt::join(sections(), ", "));
  }
  std::vector<std::string> names;
  for (const DeckKey& row : deck_keys()) {
    if (row.section() == section) names.push_back(row.short_name());
  }
  return fmt::format("unknown key {}; section [{}] has {}", key, section, fmt::join(names, ", "));
}

/// Stores settings one after the other and notes their origins; what cannot be stored is added to `problems`.
void apply_all(const std::vector<DeckSetting>& settings, Deck& deck, std::vector<std::string>& problems) {
  const po::options_description description = description_of(deck);
  for (const DeckSetting& setting : settings) {
    try {
      const DeckKey* key = find_deck_key(setting.key);
      if (key && setting.quoted && !key->is_text()) {
        throw po::error(fmt::format("{} = \"{}\" is text; expected {}, without quotes", setting.key,
                                    setting.value, allowed_values(*key)));
      }
      apply(description, setting.key, setting.value);
      deck.origin[setting.key] = setting.origin;
    } catch (const po::unknown_option&) {
      problems.push_back(fmt::format("{}: {}", setting.origin, unknown_key(setting.key)));
    } catch (const po::error& error) {
      problems.push_back(fmt::format("{}: {}", setting.origin, error.what()));
    }
  }
}

void report_repeats(const std::vector<DeckSetting>& settings, std::vector<std::string>& problems) {
  std::map<std::string, std::string> first;
  for (const DeckSetting& setting : settings) {
    const auto [at, is_new] = first.emplace(setting.key, setting.origin);
    if (!is_new) {
      problems.push_back(
          fmt::format("{}: {} is given twice; the first is at {}", setting.origin, setting.key, at->second));
    }
  }
}

/// The file's text, or nothing after adding to `problems` why it cannot be read.
std::optional<std::string> text_of_file(const std::string& file, std::vector<std::string>& problems) {
  if (std::filesystem::is_directory(file)) {
    problems.push_back(fmt::format("{}: cannot read the deck: it is a directory", file));
    return std::nullopt;
  }
  std::ifstream stream(file);
  if (!stream) {
    problems.push_back(fmt::format("{}: cannot read the deck: {}", file, std::strerror(errno)));
    return std::nullopt;
  }
  std::ostringstream text;
  text << stream.rdbuf();
  return text.str();
}

DeckSetting setting_of(const std::string& assignment, std::vector<std::string>& problems) {
  const auto equals = assignment.find('=');
  if (equals == std::string::npos) {
    problems.push_back(fmt::format("--set {}: expected --set section.key=value", assignment));
    return {};
  }
  return {assignment.substr(0, equals), assignment.substr(equals + 1), false, "--set"};
}

Deck default_deck() {
  Deck deck;
  for (const DeckKey& key : deck_keys()) deck.origin[key.name] = "default";
  return deck;
}

}  // namespace

Deck read_deck(const std::vector<std::string>& files, const std::vector<std::string>& assignments) {
  Deck deck = default_deck();
  std::vector<std::string> problems;
  for (const std::string& file : files) {
    const auto text = text_of_file(file, problems);
    if (!text) continue;
    const auto settings = split_deck(*text, file, problems);
    report_repeats(settings, problems);
    apply_all(settings, deck, problems);
  }
  std::vector<DeckSetting> settings;
  for (const std::string& assignment : assignments) {
    const DeckSetting setting = setting_of(assignment, problems);
    if (!setting.key.empty()) settings.push_back(setting);
  }
  apply_all(settings, deck, problems);
  if (problems.size() == 1) fail(ErrorKind::kUsage, "{}", problems.front());
  if (!problems.empty()) {
    fail(ErrorKind::kUsage, "{} problems in the deck\n  {}", problems.size(), fmt::join(problems, "\n  "));
  }
  return deck;
}

std::string write_deck(const Deck& deck) {
  std::string text, section;
  for (const DeckKey& key : deck_keys()) {
    if (key.section() != section) {
      text += fmt::format("{}[{}]\n", section.empty() ? "" : "\n", key.section());
      section = key.section();
    }
    const auto origin = deck.origin.find(key.name);
    const std::string value = value_text(key, deck);
    text += fmt::format(
        "{:<40} # {}\n",
        fmt::format("{} = {}", key.short_name(), key.is_text() ? quote_where_needed(value) : value),
        origin == deck.origin.end() ? "default" : origin->second);
  }
  return text;
}

std::vector<std::pair<std::string, std::string>> deck_values(const Deck& deck) {
  std::vector<std::pair<std::string, std::string>> values;
  for (const DeckKey& key : deck_keys()) values.emplace_back(key.name, value_text(key, deck));
  return values;
}

Deck deck_from_values(const std::vector<std::pair<std::string, std::string>>& values) {
  Deck deck = default_deck();
  for (const auto& [name, value] : values) {
    const DeckKey* key = find_deck_key(name);
    if (!key) continue;
    const std::string problem = set_value(*key, value, deck);
    if (!problem.empty()) fail(ErrorKind::kUsage, "{}", problem);
  }
  return deck;
}

std::string describe_deck() {
  const Deck defaults;
  std::string text =
      "A deck is sections of `key = value  # comment`. Several decks and --set section.key=value may be "
      "given;\n"
      "later wins. Integers take the suffixes k, m, g (powers of 1000). Each key is shown with its "
      "default.\n";
  std::string section;
  for (const DeckKey& key : deck_keys()) {
    if (key.section() != section) {
      section = key.section();
      text += fmt::format("\n[{}]\n", section);
    }
    const std::string setting = fmt::format("{} = {}", key.name, value_text(key, defaults));
    text += fmt::format("  {:<35} {}\n  {:<35}   {}\n", setting, key.help, "", allowed_values(key));
  }
  return text;
}

}  // namespace octet
