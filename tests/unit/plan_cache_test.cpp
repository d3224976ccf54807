#include "octet/ops/plan_cache.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <random>
#include <thread>

#include "support/seed.h"

namespace octet::test {
namespace {

namespace fs = std::filesystem;

class PlanCacheTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "octet_plans_XXXXXX").string();
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
    file_ = folder_ / "made when needed" / "matmul-plans.json";
  }
  void TearDown() override { fs::remove_all(folder_); }

  TimedPlan random_plan() {
    TimedPlan plan;
    for (int i = 0; i < 64; ++i) plan.plan.push_back(static_cast<std::byte>(random_() & 255));
    plan.microseconds = std::uniform_real_distribution<>(0.5, 1e6)(random_);
    return plan;
  }
  void write(const std::string& text) const {
    fs::create_directories(file_.parent_path());
    std::ofstream(file_) << text;
  }
  PlanCache from_file() const {
    PlanCache cache;
    EXPECT_TRUE(cache.take(read_plan_file(file_)));
    return cache;
  }

  fs::path folder_, file_;
  std::mt19937_64 random_{test_seed()};
};

const TimedPlan kNone;

const TimedPlan& plan_of(const PlanCache& cache, const std::string& key) {
  const TimedPlan* found = cache.find(key);
  EXPECT_NE(found, nullptr) << key;
  return found == nullptr ? kNone : *found;
}

TEST_F(PlanCacheTest, PlansComeBackFromTheFileAsTheyWere) {
  PlanCache cache;
  std::map<std::string, TimedPlan> plans;
  for (int i = 0; i < 20; ++i) plans[fmt::format("NVIDIA \"X\", sm_90: [{}, 7]T x é", i)] = random_plan();
  for (const auto& [key, plan] : plans) cache.add(key, plan);
  ASSERT_EQ(cache.save(file_), "");
  const PlanCache read = from_file();
  for (const auto& [key, plan] : plans) EXPECT_EQ(plan_of(read, key), plan);
  EXPECT_EQ(read.find("another"), nullptr);
  EXPECT_EQ(read.added(), 0u);
}

TEST_F(PlanCacheTest, DamagedFileGivesNothingAndIsReplaced) {
  PlanCache whole;
  whole.add("a", random_plan());
  const std::string text = whole.added_text();
  const std::string damaged[] = {
      "",
      "{",
      "[]",
      "null",
      "{\"format\": 3}",
      text.substr(0, text.size() / 2),
      R"({"format": "octet-plans", "version": 2, "plans": {}})",
      R"({"format": "octet-plans", "version": 1, "plans": []})",
      R"({"format": "octet-plans", "version": 1, "plans": {"a": "00"}})",
      R"({"format": "octet-plans", "version": 1, "plans": {"a": {"plan": "0g", "microseconds": 1}}})",
      R"({"format": "octet-plans", "version": 1, "plans": {"a": {"plan": "000", "microseconds": 1}}})",
      R"({"format": "octet-plans", "version": 1, "plans": {"a": {"plan": "00"}}})",
      R"({"format": "octet-plans", "version": 1, "plans": {"a": {"plan": 0, "microseconds": 1}}})"};
  for (const std::string& bad : damaged) {
    write(bad);
    PlanCache cache;
    EXPECT_FALSE(cache.take(read_plan_file(file_))) << bad;
    EXPECT_EQ(cache.find("a"), nullptr);
    cache.add("b", random_plan());
    ASSERT_EQ(cache.save(file_), "");
    EXPECT_EQ(plan_of(from_file(), "b"), plan_of(cache, "b"));
  }
}

TEST_F(PlanCacheTest, WhatTheFileSaysStays) {
  PlanCache first, second;
  first.add("a", random_plan());
  second.add("a", random_plan());
  second.add("b", random_plan());
  ASSERT_EQ(first.save(file_), "");
  ASSERT_EQ(second.save(file_), "");
  EXPECT_EQ(plan_of(from_file(), "a"), plan_of(first, "a"));
  EXPECT_EQ(plan_of(from_file(), "b"), plan_of(second, "b"));
}

TEST_F(PlanCacheTest, RejectedPlanIsReplacedInTheFile) {
  PlanCache first;
  first.add("a", random_plan());
  ASSERT_EQ(first.save(file_), "");
  PlanCache second = from_file();
  second.reject("a");
  EXPECT_EQ(second.find("a"), nullptr);
  second.add("a", random_plan());
  ASSERT_EQ(second.save(file_), "");
  EXPECT_EQ(plan_of(from_file(), "a"), plan_of(second, "a"));
}

TEST_F(PlanCacheTest, WritersAtTheSameTimeLoseNothingAndReadersSeeWholeFiles) {
  constexpr int kWriters = 4, kPlans = 10;
  std::vector<PlanCache> plans(kWriters);
  std::vector<std::thread> threads;
  std::vector<std::string> problems(kWriters);
  for (int writer = 0; writer < kWriters; ++writer) {
    for (int i = 0; i < kPlans; ++i)
      plans[static_cast<std::size_t>(writer)].add(fmt::format("{} {}", writer, i), random_plan());
  }
  for (std::size_t writer = 0; writer < kWriters; ++writer) {
    threads.emplace_back([&, writer] {
      for (int i = 0; i < kPlans && problems[writer].empty(); ++i) {
        PlanCache one;
        const std::string key = fmt::format("{} {}", writer, i);
        one.add(key, *plans[writer].find(key));
        problems[writer] = one.save(file_);
        if (!PlanCache().take(read_plan_file(file_))) problems[writer] = "half a file";
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::string& problem : problems) EXPECT_EQ(problem, "");
  const PlanCache read = from_file();
  for (int writer = 0; writer < kWriters; ++writer) {
    for (int i = 0; i < kPlans; ++i) {
      const std::string key = fmt::format("{} {}", writer, i);
      EXPECT_EQ(plan_of(read, key), plan_of(plans[static_cast<std::size_t>(writer)], key));
    }
  }
  std::size_t files = 0;
  for (const auto& entry : fs::directory_iterator(file_.parent_path()))
    files += entry.path().filename().string().front() == '.' ? 0 : 1;
  EXPECT_EQ(files, 1u) << "a temporary file was left";
}

TEST_F(PlanCacheTest, OfPlansTimedByManyRanksTheFirstRanksCounts) {
  const TimedPlan known = random_plan();
  PlanCache ranks[3];
  std::vector<std::string> texts;
  for (int rank = 0; rank < 3; ++rank) {
    PlanCache file;
    file.add("known", known);
    ASSERT_TRUE(ranks[rank].take(file.added_text()));
    if (rank > 0) ranks[rank].add("shared", random_plan());
    ranks[rank].add(fmt::format("own {}", rank), random_plan());
    texts.push_back(ranks[rank].added_text());
  }
  const TimedPlan expected = plan_of(ranks[1], "shared");
  for (PlanCache& rank : ranks) rank.agree(texts);
  for (const PlanCache& rank : ranks) {
    EXPECT_EQ(rank.added_text(), ranks[0].added_text());
    EXPECT_EQ(rank.added(), 4u);
    EXPECT_EQ(plan_of(rank, "shared"), expected);
    EXPECT_EQ(plan_of(rank, "known"), known);
  }
}

TEST_F(PlanCacheTest, FileThatCannotBeWrittenIsSaidAndNotThrown) {
  write("a file, not a folder");
  PlanCache cache;
  cache.add("a", random_plan());
  EXPECT_NE(cache.save(file_ / "plans.json"), "");
}

TEST_F(PlanCacheTest, FileLiesInTheCacheOfTheUserOrElseTheRunFolder) {
  const auto set = [](const char* name, const char* value) {
    if (value == nullptr) {
      ::unsetenv(name);
    } else {
      ::setenv(name, value, 1);
    }
  };
  const char *cache = std::getenv("XDG_CACHE_HOME"), *home = std::getenv("HOME");
  const std::string old_cache = cache == nullptr ? "" : cache, old_home = home == nullptr ? "" : home;
  const fs::path run = folder_ / "run";

  EXPECT_EQ(plan_cache_file("none", run), fs::path());
  EXPECT_EQ(plan_cache_file("/some/folder", run), fs::path("/some/folder/matmul-plans.json"));
  set("XDG_CACHE_HOME", (folder_ / "xdg").c_str());
  EXPECT_EQ(plan_cache_file("", run), folder_ / "xdg" / "octet" / "matmul-plans.json");
  set("XDG_CACHE_HOME", nullptr);
  set("HOME", (folder_ / "home").c_str());
  EXPECT_EQ(plan_cache_file("", run), folder_ / "home" / ".cache" / "octet" / "matmul-plans.json");
  std::ofstream(folder_ / "occupied") << "a file";
  set("HOME", (folder_ / "occupied").c_str());
  EXPECT_EQ(plan_cache_file("", run), run / "matmul-plans.json");

  set("XDG_CACHE_HOME", cache == nullptr ? nullptr : old_cache.c_str());
  set("HOME", home == nullptr ? nullptr : old_home.c_str());
}

}  // namespace
}  // namespace octet::test
