#pragma once

#include <gtest/gtest.h>
#include <hdf5.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include "octet/base/error.h"
#include "octet/data/token_file.h"

namespace octet::data_test {

/// A fresh directory that vanishes with the object.
class TemporaryDirectory {
 public:
  TemporaryDirectory() {
    std::string name = (std::filesystem::temp_directory_path() / "octet-data-XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) throw std::runtime_error("no temporary directory");
    path_ = name;
  }
  ~TemporaryDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;
  std::string operator/(const std::string& name) const { return (path_ / name).string(); }
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

/// The message of the Error(kind) that `action` throws; anything else fails the calling test through the
/// message.
template <typename Action>
std::string error_of(ErrorKind kind, Action&& action) {
  try {
    action();
  } catch (const Error& error) {
    return error.kind() == kind ? error.what() : std::string("wrong kind: ") + error.what();
  }
  return "nothing was thrown";
}

/// Whether every one of `parts` occurs in `text`; says which does not.
inline ::testing::AssertionResult contains(const std::string& text, const std::vector<std::string>& parts) {
  for (const std::string& part : parts)
    if (text.find(part) == std::string::npos)
      return ::testing::AssertionFailure() << '"' << part << "\" is not in: " << text;
  return ::testing::AssertionSuccess();
}

/// Overwrites token `index` of a file of 4-byte tokens, which no writer of ours would do.
inline void overwrite_token(const std::string& path, std::int64_t index, std::uint32_t id) {
  const hid_t file = H5Fopen(path.c_str(), H5F_ACC_RDONLY, H5P_DEFAULT);
  const hid_t dataset = H5Dopen2(file, "tokens", H5P_DEFAULT);
  const auto begin = static_cast<std::int64_t>(H5Dget_offset(dataset));
  H5Dclose(dataset);
  H5Fclose(file);
  std::fstream bytes(path, std::ios::in | std::ios::out | std::ios::binary);
  bytes.seekp(begin + 4 * index);
  bytes.write(reinterpret_cast<const char*>(&id), 4);
}

inline std::vector<std::int32_t> random_tokens(std::mt19937_64& random, std::size_t count,
                                               std::int64_t vocabulary) {
  std::uniform_int_distribution<std::int32_t> id(0, static_cast<std::int32_t>(vocabulary - 1));
  std::vector<std::int32_t> tokens(count);
  for (auto& token : tokens) token = id(random);
  return tokens;
}

/// A token file of one document.
inline void write_tokens(const std::string& path, const std::vector<std::int32_t>& tokens,
                         std::int64_t vocabulary, int token_bytes = 0) {
  TokenFileInfo info;
  info.vocabulary = vocabulary;
  info.token_bytes = token_bytes;
  TokenFileWriter writer(path, info);
  writer.add_document(tokens);
  writer.finish();
}

inline void write_text(const std::string& path, const std::string& text) {
  std::filesystem::create_directories(std::filesystem::path(path).parent_path());
  std::ofstream(path, std::ios::binary) << text;
}

}  // namespace octet::data_test
