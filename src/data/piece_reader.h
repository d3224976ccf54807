#pragma once

#include <memory>
#include <string>
#include <vector>

#include "input_files.h"

namespace octet {

/// Reads files in pieces of bounded size with several threads, and hands the pieces out in the order of the
/// files.
class PieceReader {
 public:
  struct Piece {
    std::string text;
    bool ends_file = false;
  };

  /// `files` outlives the reader.
  PieceReader(const std::vector<InputFile>& files, int threads);
  ~PieceReader();
  /// The next piece, valid until the next call; null after the last. Throws Error(kData) for a file that
  /// cannot be read or that has become shorter.
  const Piece* next();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace octet
