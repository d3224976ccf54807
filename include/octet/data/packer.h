#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace octet {

/// What `pack` reads and writes.
struct PackOptions {
  std::vector<std::string> inputs;       ///< files, and directories read recursively in sorted order
  std::string output;                    ///< token file of the training documents
  std::string validation;                ///< token file of the validation documents; empty: none
  double validation_fraction = 0.05;     ///< of the documents, 0 < fraction < 1
  std::optional<std::string> separator;  ///< a line equal to it ends a document; none: a document is a file
  std::uint64_t seed = 0;                ///< of the choice of validation documents
  int threads = 0;                       ///< that read; 0: one a core, at most 8
  bool overwrite = false;
  bool progress = true;      ///< on standard error
  std::string command_line;  ///< stored in the token files
};

/// One of the token files written.
struct PackedSplit {
  std::int64_t documents = 0, tokens = 0, bytes = 0;  ///< bytes of text
  double entropy = 0.0;                               ///< of single tokens, nats/token: -Σ p ln p
};

struct PackSummary {
  PackedSplit train, validation;
  std::int64_t files = 0;           ///< read
  std::int64_t binary_files = 0;    ///< skipped, for a NUL in their first 64 KiB
  std::string first_binary_file;    ///< the first of these
  std::int64_t repeated_files = 0;  ///< skipped, links to files that are read already
  double seconds = 0.0;
  double megabytes_per_second() const;  ///< of text, 10^6 bytes
};

/// Turns text of any kind into token files with the bytes tokenizer; every document ends with its
/// end-of-document id, empty ones are left out. The output depends on inputs, separator, fraction and seed,
/// never on threads.
///
/// A document is for validation when a hash of its number and the seed says so; the first is always for
/// training and the second for validation, so that two documents fill both. The one document of a single file
/// without a separator is cut: its last `validation_fraction` is for validation.
///
/// Throws Error(kUsage) when an input is missing, an output exists (without overwrite), is an input or cannot
/// be written, and Error(kData) when there is no text or only one document for two outputs.
PackSummary pack(const PackOptions& options);

}  // namespace octet
