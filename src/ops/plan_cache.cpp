#include "octet/ops/plan_cache.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>
#include <thread>

namespace octet {

namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;
using Plans = std::map<std::string, TimedPlan>;

constexpr const char* kFormat = "octet-plans";
constexpr int kVersion = 1;
constexpr const char* kFileName = "matmul-plans.json";
constexpr auto kLongestWait = std::chrono::seconds(10);

std::string hexadecimal(const std::vector<std::byte>& bytes) {
  std::string text;
  for (const std::byte byte : bytes) text += fmt::format("{:02x}", static_cast<unsigned>(byte));
  return text;
}

std::optional<std::vector<std::byte>> bytes_of(const std::string& text) {
  if (text.empty() || text.size() % 2 != 0) return std::nullopt;
  if (text.find_first_not_of("0123456789abcdef") != std::string::npos) return std::nullopt;
  std::vector<std::byte> bytes;
  for (std::size_t at = 0; at < text.size(); at += 2)
    bytes.push_back(static_cast<std::byte>(std::stoi(text.substr(at, 2), nullptr, 16)));
  return bytes;
}

std::string text_of(const Plans& plans) {
  Json listed = Json::object();
  for (const auto& [key, plan] : plans)
    listed[key] = {{"plan", hexadecimal(plan.plan)}, {"microseconds", plan.microseconds}};
  return Json{{"format", kFormat}, {"version", kVersion}, {"plans", listed}}.dump(1) + "\n";
}

std::optional<Plans> plans_of(const std::string& text) {
  const Json json = Json::parse(text, nullptr, false);
  if (!json.is_object() || json.value("format", Json()) != kFormat ||
      json.value("version", Json()) != kVersion || !json.contains("plans") || !json["plans"].is_object())
    return std::nullopt;
  Plans plans;
  for (const auto& [key, value] : json["plans"].items()) {
    if (!value.is_object() || !value.value("plan", Json()).is_string() ||
        !value.value("microseconds", Json()).is_number())
      return std::nullopt;
    const auto bytes = bytes_of(value["plan"].get<std::string>());
    if (!bytes) return std::nullopt;
    plans[key] = {*bytes, value["microseconds"].get<double>()};
  }
  return plans;
}

/// Holds a file's lock while it lives. Where the file system has no locks, or someone keeps this one, it goes
/// on without: then a plan written at the same moment may be lost, and is timed again.
class FileLock {
 public:
  explicit FileLock(const fs::path& file)
      : descriptor_(::open(file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666)) {
    if (descriptor_ < 0) return;
    const auto end = std::chrono::steady_clock::now() + kLongestWait;
    while (::flock(descriptor_, LOCK_EX | LOCK_NB) != 0 && (errno == EWOULDBLOCK || errno == EINTR) &&
           std::chrono::steady_clock::now() < end) {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
  }
  ~FileLock() {
    if (descriptor_ >= 0) ::close(descriptor_);
  }
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;

 private:
  int descriptor_;
};

bool writable(const fs::path& folder) {
  std::error_code error;
  fs::create_directories(folder, error);
  return !error && ::access(folder.c_str(), W_OK | X_OK) == 0;
}

}  // namespace

bool PlanCache::take(const std::string& text) {
  std::optional<Plans> plans = plans_of(text);
  if (plans) plans_.merge(*plans);
  return plans.has_value();
}

const TimedPlan* PlanCache::find(const std::string& key) const {
  const auto found = plans_.find(key);
  return found == plans_.end() ? nullptr : &found->second;
}

void PlanCache::add(const std::string& key, TimedPlan plan) {
  plans_[key] = std::move(plan);
  added_.insert(key);
}

void PlanCache::reject(const std::string& key) {
  plans_.erase(key);
  added_.erase(key);
  rejected_.insert(key);
}

std::string PlanCache::added_text() const {
  Plans plans;
  for (const std::string& key : added_) plans[key] = plans_.at(key);
  return text_of(plans);
}

void PlanCache::agree(const std::vector<std::string>& texts) {
  for (const std::string& key : added_) plans_.erase(key);
  added_.clear();
  for (const std::string& text : texts) {
    for (auto& [key, plan] : plans_of(text).value_or(Plans{})) {
      if (plans_.contains(key) && !added_.contains(key)) rejected_.insert(key);  // unusable elsewhere
      if (!added_.contains(key)) add(key, std::move(plan));
    }
  }
}

std::string PlanCache::save(const fs::path& file) const {
  std::error_code error;
  fs::create_directories(file.parent_path(), error);
  if (error) return fmt::format("{} cannot be made: {}", file.parent_path().string(), error.message());
  const FileLock lock(file.parent_path() / ("." + file.filename().string() + ".lock"));
  Plans all = plans_of(read_plan_file(file)).value_or(Plans{});
  for (const std::string& key : added_) {
    if (!all.contains(key) || rejected_.contains(key)) all[key] = plans_.at(key);
  }
  std::string name = file.string() + ".XXXXXX";
  const int descriptor = ::mkstemp(name.data());
  if (descriptor < 0) return fmt::format("{} cannot be written: {}", file.string(), std::strerror(errno));
  ::fchmod(descriptor, 0644);
  ::close(descriptor);
  const bool written = (std::ofstream(name) << text_of(all)).flush().good();
  if (written) fs::rename(name, file, error);
  if (written && !error) return "";
  const std::string reason = written ? error.message() : std::strerror(errno);
  fs::remove(name, error);
  return fmt::format("{} cannot be written: {}", file.string(), reason);
}

std::string read_plan_file(const fs::path& file) {
  std::ifstream in(file);
  return {std::istreambuf_iterator<char>(in), {}};
}

fs::path plan_cache_file(const std::string& setting, const fs::path& run_folder) {
  if (setting == "none") return {};
  if (!setting.empty()) return fs::path(setting) / kFileName;
  const char *cache = std::getenv("XDG_CACHE_HOME"), *home = std::getenv("HOME");
  fs::path folder;
  if (cache != nullptr && fs::path(cache).is_absolute()) {
    folder = fs::path(cache) / "octet";
  } else if (home != nullptr && fs::path(home).is_absolute()) {
    folder = fs::path(home) / ".cache" / "octet";
  }
  return (!folder.empty() && writable(folder) ? folder : run_folder) / kFileName;
}

}  // namespace octet
