#include <cstdio>

#include "octet/app/commands.h"
#include "octet/base/error.h"
#include "octet/data/packer.h"
#include "octet/data/random_tokens.h"
#include "options.h"

namespace octet {
namespace {

namespace po = boost::program_options;

po::options_description pack_options() {
  po::options_description options("Options");
  auto add = options.add_options();
  add("output", po::value<std::string>(), "token file of the training documents (needed)");
  add("validation", po::value<std::string>(), "token file of the validation documents");
  add("validation-fraction", po::value<double>(), "share of the documents for validation, 0.05 unless given");
  add("separator", po::value<std::string>(),
      "a line equal to this ends a document; without it, a document is a file");
  add("seed", po::value<std::uint64_t>(), "of the choice of validation documents, 0 unless given");
  add("threads", po::value<int>(), "that read; one a core, at most 8, unless given");
  add("random", po::value<std::int64_t>(),
      "instead of text, write this many random tokens, for measurements");
  add("vocabulary", po::value<std::int64_t>(), "of random tokens");
  add("overwrite", "replace outputs that exist");
  add("quiet", "no progress on standard error");
  add("input", po::value<std::vector<std::string>>(), "files and directories of text (the other words)");
  add("help", "this page");
  return options;
}

template <typename T>
void take(const po::variables_map& values, const char* name, T& target) {
  if (values.count(name) > 0) target = values[name].as<T>();
}

std::string command_line(const std::vector<std::string>& arguments) {
  return fmt::format("octet pack {}", fmt::join(arguments, " "));
}

std::string describe(const std::string& path, const PackedSplit& split) {
  return fmt::format("{}: {} documents, {} tokens, {:.4f} nats/token unigram entropy\n", path,
                     split.documents, split.tokens, split.entropy);
}

int pack_random(const po::variables_map& values, const std::vector<std::string>& arguments) {
  std::int64_t tokens = 0, vocabulary = 0;
  std::uint64_t seed = 0;
  take(values, "random", tokens);
  take(values, "vocabulary", vocabulary);
  take(values, "seed", seed);
  if (tokens <= 0 || vocabulary <= 0 || values.count("input") > 0 || values.count("validation") > 0) {
    fail(ErrorKind::kUsage,
         "octet pack: --random N and --vocabulary V, both above 0, go with --output, --seed and --overwrite "
         "only");
  }
  const auto output = values["output"].as<std::string>();
  write_random_tokens(output, tokens, vocabulary, seed, values.count("overwrite") > 0,
                      command_line(arguments));
  std::fputs(fmt::format("{}: {} random tokens of {}\n", output, tokens, vocabulary).c_str(), stdout);
  return 0;
}

}  // namespace

std::string pack_usage() {
  return fmt::format(
      "usage: octet pack --output FILE.h5 [options] INPUT...\n\n"
      "Turns text into a token file, byte by byte: ids 0 to 255 are bytes, 256 ends a document, so the "
      "model's\n"
      "vocabulary is 257. Directories are read recursively. Binary files, hidden files and links to files "
      "read\n"
      "already are left out. With --validation, some documents go to a second file; a single document "
      "without a\n"
      "separator is cut near its end instead.\n\n{}",
      text_of(pack_options()));
}

int run_pack(const std::vector<std::string>& arguments) {
  const po::variables_map values = parse_options("pack", arguments, pack_options(), "input");
  if (values.count("help") > 0) {
    std::fputs(pack_usage().c_str(), stdout);
    return 0;
  }
  if (values.count("output") == 0)
    fail(ErrorKind::kUsage, "octet pack: --output is missing; see `octet help pack`");
  if (values.count("validation-fraction") > 0 && values.count("validation") == 0)
    fail(ErrorKind::kUsage, "octet pack: --validation-fraction without --validation, which names the file");

  if (values.count("random") > 0) return pack_random(values, arguments);
  if (values.count("vocabulary") > 0) {
    fail(
        ErrorKind::kUsage,
        "octet pack: --vocabulary is for --random; that of text is 257, its bytes and the end of a document");
  }

  PackOptions options;
  take(values, "input", options.inputs);
  take(values, "output", options.output);
  take(values, "validation", options.validation);
  take(values, "validation-fraction", options.validation_fraction);
  if (values.count("separator") > 0) options.separator = values["separator"].as<std::string>();
  take(values, "seed", options.seed);
  take(values, "threads", options.threads);
  options.overwrite = values.count("overwrite") > 0;
  options.progress = values.count("quiet") == 0;
  options.command_line = command_line(arguments);

  const PackSummary summary = pack(options);
  if (summary.binary_files > 0)
    std::fputs(fmt::format("octet: warning: skipped {} binary files, the first is {}\n", summary.binary_files,
                           summary.first_binary_file)
                   .c_str(),
               stderr);
  std::string text = describe(options.output, summary.train);
  if (!options.validation.empty()) text += describe(options.validation, summary.validation);
  text += fmt::format("read {} files, {:.2f} MB in {:.1f} s, {:.1f} MB/s", summary.files,
                      static_cast<double>(summary.train.bytes + summary.validation.bytes) / 1e6,
                      summary.seconds, summary.megabytes_per_second());
  if (summary.repeated_files > 0)
    text += fmt::format("; left out {} links to files read already", summary.repeated_files);
  std::fputs((text + "\n").c_str(), stdout);
  return 0;
}

}  // namespace octet
