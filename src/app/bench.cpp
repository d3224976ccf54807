#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>

#include "octet/app/commands.h"
#include "octet/base/error.h"
#include "octet/bench/bench.h"
#include "octet/config/nearest_name.h"
#include "octet/runtime/world.h"
#include "options.h"

namespace octet {
namespace {

namespace po = boost::program_options;

po::options_description bench_options() {
  po::options_description options("Options");
  auto add = options.add_options();
  add("set", po::value<std::vector<std::string>>(), "section.key=value, over the decks");
  add("json", po::value<std::string>(), "file of the results; bench.json in run.directory unless given");
  add("max-bytes", po::value<std::string>(),
      "largest message of comm, with K, M or G for powers of 1024; 1G on GPUs, 4M on CPU ranks unless given");
  add("io-mib", po::value<std::int64_t>(),
      "MiB of state that io writes a rank; 1024 on GPUs, 16 on CPU ranks unless given");
  add("seconds", po::value<double>(), "of each measurement; 0.2 on GPUs, 0.02 on CPU ranks unless given");
  add("word", po::value<std::vector<std::string>>(), "parts and decks (the other words)");
  add("help", "this page");
  return options;
}

std::int64_t bytes_of(const std::string& text) {
  std::size_t digits = 0;
  while (digits < text.size() && text[digits] >= '0' && text[digits] <= '9') ++digits;
  const std::string unit = text.substr(digits);
  const int shift = unit.empty() ? 0 : unit == "K" ? 10 : unit == "M" ? 20 : unit == "G" ? 30 : -1;
  if (digits == 0 || digits > 12 || shift < 0)
    fail(ErrorKind::kUsage,
         "octet bench: --max-bytes {} is no size; allowed: a whole number, with K, M or G behind it", text);
  const std::int64_t bytes = std::stoll(text.substr(0, digits)) << shift;
  if (bytes < 1) fail(ErrorKind::kUsage, "octet bench: --max-bytes {} must be at least 1", text);
  return bytes;
}

/// Sorts words into parts and deck files. A word that is neither a part nor a file may be a misspelt part.
void take_words(const std::vector<std::string>& words, BenchRequest& request) {
  std::vector<std::string> names;
  for (const BenchPart& part : bench_parts()) names.push_back(part.name);
  for (const std::string& word : words) {
    if (std::find(names.begin(), names.end(), word) != names.end()) {
      request.parts.push_back(word);
      continue;
    }
    if (word.find_first_of("./") == std::string::npos && !std::filesystem::exists(word)) {
      const std::string nearest = nearest_name(word, names);
      fail(ErrorKind::kUsage, "octet bench: {} is neither a part nor a deck file; {}", word,
           nearest.empty() ? fmt::format("parts: {}", fmt::join(names, ", "))
                           : "did you mean " + nearest + "?");
    }
    request.files.push_back(word);
  }
}

BenchRequest parse(const std::vector<std::string>& arguments) {
  const po::variables_map values = parse_options("bench", arguments, bench_options(), "word");
  BenchRequest request;
  if (values.count("word") > 0) take_words(values["word"].as<std::vector<std::string>>(), request);
  if (values.count("set") > 0) request.assignments = values["set"].as<std::vector<std::string>>();
  if (values.count("json") > 0) request.json = values["json"].as<std::string>();
  if (values.count("max-bytes") > 0)
    request.limits.max_bytes = bytes_of(values["max-bytes"].as<std::string>());
  if (values.count("io-mib") > 0) {
    const auto mib = values["io-mib"].as<std::int64_t>();
    if (mib < 1 || mib > (std::int64_t{1} << 20))
      fail(ErrorKind::kUsage, "octet bench: --io-mib {} is out of range; allowed: 1 to {}", mib, 1 << 20);
    request.limits.io_bytes = mib << 20;
  }
  if (values.count("seconds") > 0) {
    request.limits.seconds = values["seconds"].as<double>();
    if (!(request.limits.seconds > 0))
      fail(ErrorKind::kUsage, "octet bench: --seconds {} must be above 0", request.limits.seconds);
  }
  if (request.files.empty() && request.assignments.empty())
    fail(ErrorKind::kUsage, "octet bench needs at least one deck file; see `octet help bench`");
  return request;
}

}  // namespace

std::string bench_usage() {
  std::string text =
      "octet bench [PART...] DECK... [--set section.key=value]... [options]\n"
      "  Measures what the training of a deck is made of, on the ranks that mpirun or srun started, and "
      "checks\n"
      "  every result. A table a part; units stand in the headings (GB: 10^9 bytes, MiB, GiB: powers of "
      "1024);\n"
      "  all results go into one JSON file. Exit code 5 where a result is WRONG. Parts, all of them unless "
      "named:\n";
  for (const BenchPart& part : bench_parts()) text += fmt::format("    {:<10} {}\n", part.name, part.summary);
  return text + "\n" + text_of(bench_options());
}

int run_bench(const std::vector<std::string>& arguments) {
  if (std::find(arguments.begin(), arguments.end(), "--help") != arguments.end()) {
    std::fputs(bench_usage().c_str(), stdout);
    return 0;
  }
  const World world;
  try {
    BenchRequest request;
    world.together([&] { request = parse(arguments); });
    return run_bench(world, request);
  } catch (const Error& error) {
    // All ranks have the same error; one of them speaks.
    if (world.rank() == 0) std::fprintf(stderr, "octet: error: %s\n", error.what());
    return error.exit_code();
  }
}

}  // namespace octet
