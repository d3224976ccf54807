#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace octet {

/// What a token file says about itself (format version 1; see ARCHITECTURE.md).
struct TokenFileInfo {
  std::int64_t tokens = 0, documents = 0, vocabulary = 0;
  std::int64_t end_of_document = -1;  ///< id, -1 when none
  int token_bytes = 2;                ///< 2 (uint16) or 4 (uint32)
  bool has_mask = false;
  std::string tokenizer, tokenizer_hash, source, command_line, tokens_hash;
};

/// An open token file: HDF5 for its description, plain reads at dataset offsets for the tokens. HDF5 is
/// closed again before the constructor returns, so any thread may read.
class TokenFile {
 public:
  /// Opens and checks: completion flag, versions, types, sizes against the file's length, offsets rising and
  /// ending at the token count. Throws Error(kData) that names the file, what was found and what was
  /// expected.
  explicit TokenFile(const std::string& path);
  ~TokenFile();
  TokenFile(TokenFile&&) noexcept;

  const TokenFileInfo& info() const;
  const std::string& path() const;
  /// Document offsets, documents + 1 of them.
  std::span<const std::uint64_t> offsets() const;
  /// Copies tokens [begin, begin + out.size()) as int32.
  void read(std::int64_t begin, std::span<std::int32_t> out) const;
  /// Copies the loss mask of the same range; all ones where the file has none.
  void read_mask(std::int64_t begin, std::span<std::uint8_t> out) const;
  /// XXH3-64 of the tokens as stored, 16 hexadecimal digits. Reads the whole file.
  std::string hash() const;
  /// Throws Error(kData) naming file, document, offset, id and vocabulary of the first of `ids`, the tokens
  /// read from `begin` on, that is outside [0, vocabulary).
  void check_range(std::int64_t begin, std::span<const std::int32_t> ids, std::int64_t vocabulary) const;
  /// The same for the whole file, which it reads.
  void check_ids(std::int64_t vocabulary) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Writes a token file under a temporary name and publishes it by rename. Tokens go to a spill file beside
/// the target, `PATH.tokens.partial`, until their count is known; the file needs twice its size on disk for a
/// while.
class TokenFileWriter {
 public:
  /// Takes vocabulary, end_of_document, token_bytes, has_mask and the texts of `info`. Throws Error(kData)
  /// when the vocabulary does not fit the width (token_bytes 0 picks 2 up to 65536 ids, else 4) or the file
  /// cannot be made.
  TokenFileWriter(const std::string& path, const TokenFileInfo& info);
  ~TokenFileWriter();  ///< removes the temporary file unless finished
  /// Appends tokens to the document being written. Throws Error(kData) for an id outside the vocabulary and
  /// for a full disk. `mask` is empty (all ones) or as long as tokens; only a file with has_mask takes one.
  void append(std::span<const std::int32_t> tokens, std::span<const std::uint8_t> mask = {});
  void end_document();
  /// append and end_document in one.
  void add_document(std::span<const std::int32_t> tokens, std::span<const std::uint8_t> mask = {});
  /// Lays the HDF5 file out, copies the tokens, syncs, sets the completion flag and renames. Nothing may
  /// follow.
  void finish();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace octet
