#pragma once

#include <cstddef>
#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace octet {

/// A way of computing something that was found to be the fastest.
struct TimedPlan {
  std::vector<std::byte> plan;  ///< opaque here
  double microseconds = 0.0;

  bool operator==(const TimedPlan&) const = default;
};

/// Plans chosen by timing, remembered from run to run in a JSON file. A key names all that a choice depends
/// on, such as device, library version and shape. What a file says stays: runs that find a plan there use it,
/// and so get the same numbers.
class PlanCache {
 public:
  /// Adds the plans of a text in the file's format whose keys are not known yet; false, and nothing added,
  /// where it is damaged or of another version.
  bool take(const std::string& text);
  /// nullptr: not known.
  const TimedPlan* find(const std::string& key) const;
  void add(const std::string& key, TimedPlan plan);
  /// Forgets a plan that turned out to be unusable; one that is added later takes its place in the file.
  void reject(const std::string& key);

  /// How many plans were added, and they alone in the file's format.
  std::size_t added() const { return added_.size(); }
  std::string added_text() const;
  /// What all ranks added, in rank order, takes the place of what this one did; of several plans for a key
  /// the first counts, so that all ranks have the same.
  void agree(const std::vector<std::string>& texts);

  /// Adds what was added here to the file, making its folder where needed. Others may do so at the same time:
  /// readers see a whole file always, and every plan ends up in it. A damaged file is replaced. Returns why
  /// it could not be written, or nothing.
  std::string save(const std::filesystem::path& file) const;

 private:
  std::map<std::string, TimedPlan> plans_;
  std::set<std::string> added_, rejected_;
};

/// The file's text; nothing where there is none.
std::string read_plan_file(const std::filesystem::path& file);

/// The file that the deck's run.tune_cache names: a folder, "none" for no file, or nothing for
/// $XDG_CACHE_HOME/octet, else ~/.cache/octet, else the run's folder where neither can be written.
std::filesystem::path plan_cache_file(const std::string& setting, const std::filesystem::path& run_folder);

}  // namespace octet
