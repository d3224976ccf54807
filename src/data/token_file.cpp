#include "octet/data/token_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <functional>
#include <limits>

#include "hdf5_handle.h"
#include "octet/base/error.h"
#include "stored_array.h"
#include "token_format.h"

namespace octet {
namespace {

constexpr std::int64_t kBlock = 32768;  ///< tokens looked at in one go by whole-file passes

std::int64_t required_integer(hid_t file, const std::string& path, const char* name) {
  const auto value = hdf5::read_integer(file, name);
  if (!value) fail(ErrorKind::kData, "{}: integer attribute \"{}\" is missing", path, name);
  return *value;
}

hdf5::Dataset open_dataset(hid_t file, const std::string& path, const char* name) {
  if (H5Lexists(file, name, H5P_DEFAULT) <= 0)
    fail(ErrorKind::kData, "{}: dataset /{} is missing", path, name);
  hdf5::Dataset dataset(H5Dopen2(file, name, H5P_DEFAULT));
  if (!dataset.valid())
    fail(ErrorKind::kData, "{}: /{} cannot be opened: {}", path, name, hdf5::last_error());
  return dataset;
}

void require_type(hid_t dataset, const std::string& path, const char* name,
                  std::initializer_list<hid_t> allowed, const char* allowed_names) {
  hdf5::Type type(H5Dget_type(dataset));
  for (const hid_t candidate : allowed)
    if (H5Tequal(type, candidate) > 0) return;
  fail(ErrorKind::kData, "{}: /{} has type {}, expected {}", path, name, hdf5::type_name(type),
       allowed_names);
}

/// Refuses what is not a finished token file of a version that we read.
void check_identity(hid_t file, const std::string& path) {
  namespace tf = token_format;
  const auto format = hdf5::read_string(file, tf::kFormatAttribute);
  if (!format || *format != tf::kFormat)
    fail(ErrorKind::kData, "{}: not a token file: attribute \"format\" is {}, expected \"{}\"", path,
         format ? "\"" + *format + "\"" : "missing", tf::kFormat);
  const std::int64_t version = required_integer(file, path, tf::kVersionAttribute);
  if (version != tf::kVersion)
    fail(ErrorKind::kData, "{}: token file version {}, this octet reads version {}", path, version,
         tf::kVersion);
  if (hdf5::read_integer(file, tf::kComplete).value_or(0) != 1)
    fail(ErrorKind::kData, "{}: incomplete: whoever wrote it did not finish; pack it again", path);
}

TokenFileInfo read_info(hid_t file, const std::string& path) {
  namespace tf = token_format;
  TokenFileInfo info;
  info.tokens = required_integer(file, path, tf::kTokenCount);
  info.documents = required_integer(file, path, tf::kDocumentCount);
  info.vocabulary = required_integer(file, path, tf::kVocabulary);
  if (info.vocabulary < 1 || info.vocabulary > std::numeric_limits<std::int32_t>::max())
    fail(ErrorKind::kData, "{}: vocabulary is {}, expected 1 to {}", path, info.vocabulary,
         std::numeric_limits<std::int32_t>::max());
  info.end_of_document = hdf5::read_integer(file, tf::kEndOfDocument).value_or(-1);
  if (info.end_of_document < -1 || info.end_of_document >= info.vocabulary)
    fail(ErrorKind::kData, "{}: end_of_document is {}, expected -1 (none) or less than the vocabulary {}",
         path, info.end_of_document, info.vocabulary);
  info.has_mask = H5Lexists(file, tf::kLossMask, H5P_DEFAULT) > 0;
  info.tokenizer = hdf5::read_string(file, tf::kTokenizer).value_or("");
  info.tokenizer_hash = hdf5::read_string(file, tf::kTokenizerHash).value_or("");
  info.source = hdf5::read_string(file, tf::kSource).value_or("");
  info.command_line = hdf5::read_string(file, tf::kCommandLine).value_or("");
  info.tokens_hash = hdf5::read_string(file, tf::kTokensHash).value_or("");
  return info;
}

std::vector<std::uint64_t> read_offsets(hid_t file, const std::string& path, const TokenFileInfo& info) {
  namespace tf = token_format;
  hdf5::Dataset dataset = open_dataset(file, path, tf::kDocuments);
  require_type(dataset, path, tf::kDocuments, {H5T_STD_U64LE, H5T_STD_U64BE}, "uint64");
  hdf5::Space space(H5Dget_space(dataset));
  const std::int64_t count = H5Sget_simple_extent_npoints(space);
  if (count != info.documents + 1)
    fail(ErrorKind::kData, "{}: /{} has {} offsets, expected {} (document_count + 1)", path, tf::kDocuments,
         count, info.documents + 1);
  std::vector<std::uint64_t> offsets(static_cast<std::size_t>(count));
  if (H5Dread(dataset, H5T_NATIVE_UINT64, H5S_ALL, H5S_ALL, H5P_DEFAULT, offsets.data()) < 0)
    fail(ErrorKind::kData, "{}: /{} cannot be read: {}", path, tf::kDocuments, hdf5::last_error());

  if (offsets.front() != 0)
    fail(ErrorKind::kData, "{}: /{} begins at {}, expected 0", path, tf::kDocuments, offsets.front());
  const auto fall = std::adjacent_find(offsets.begin(), offsets.end(), std::greater<>());
  if (fall != offsets.end())
    fail(ErrorKind::kData, "{}: /{} falls from {} to {} at document {}; offsets must rise", path,
         tf::kDocuments, fall[0], fall[1], fall - offsets.begin());
  if (offsets.back() != static_cast<std::uint64_t>(info.tokens))
    fail(ErrorKind::kData, "{}: /{} ends at {}, expected the token count {}", path, tf::kDocuments,
         offsets.back(), info.tokens);
  return offsets;
}

StoredArray locate_tokens(hid_t file, const std::string& path, const char* name,
                          std::initializer_list<hid_t> types, const char* type_names, std::int64_t tokens,
                          std::int64_t file_bytes) {
  hdf5::Dataset dataset = open_dataset(file, path, name);
  require_type(dataset, path, name, types, type_names);
  StoredArray array = locate(dataset, path, name, file_bytes);
  if (array.count != tokens)
    fail(ErrorKind::kData, "{}: /{} has {} elements, expected the token count {}", path, name, array.count,
         tokens);
  return array;
}

/// HDF5's own words, or plain ones where it noticed that the file is shorter than when it was closed.
[[noreturn]] void fail_to_open(const std::string& path, std::int64_t file_bytes) {
  const std::string reason = hdf5::last_error();
  constexpr std::string_view kStored = "stored_eof = ";
  if (const std::size_t at = reason.find(kStored); at != std::string::npos)
    fail(ErrorKind::kData, "{}: truncated: {} bytes, expected {}", path, file_bytes,
         reason.substr(at + kStored.size()));
  fail(ErrorKind::kData, "{}: not a readable HDF5 file ({} bytes): {}", path, file_bytes, reason);
}

}  // namespace

struct TokenFile::Impl {
  std::string path;
  TokenFileInfo info;
  std::vector<std::uint64_t> offsets;
  StoredArray tokens, mask;
  int descriptor = -1;

  ~Impl() {
    if (descriptor >= 0) close(descriptor);
  }

  std::int64_t open_bytes() {
    descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    struct stat status = {};
    if (descriptor < 0 || fstat(descriptor, &status) != 0)
      fail(ErrorKind::kData, "{}: cannot be opened: {}", path, std::strerror(errno));
    if (!S_ISREG(status.st_mode)) fail(ErrorKind::kData, "{}: not a regular file", path);
    return status.st_size;
  }

  void describe(std::int64_t file_bytes) {
    namespace tf = token_format;
    const hdf5::Quiet quiet;
    const hdf5::Properties access = hdf5::file_access();
    hdf5::File file(H5Fopen(path.c_str(), H5F_ACC_RDONLY, access));
    if (!file.valid()) fail_to_open(path, file_bytes);
    check_identity(file, path);
    info = read_info(file, path);
    tokens = locate_tokens(file, path, tf::kTokens, {H5T_STD_U16LE, H5T_STD_U32LE}, "uint16 or uint32",
                           info.tokens, file_bytes);
    info.token_bytes = tokens.element_bytes;
    if (info.has_mask)
      mask = locate_tokens(file, path, tf::kLossMask, {H5T_STD_U8LE}, "uint8", info.tokens, file_bytes);
    offsets = read_offsets(file, path, info);
  }
};

TokenFile::TokenFile(const std::string& path) : impl_(std::make_unique<Impl>()) {
  impl_->path = path;
  impl_->describe(impl_->open_bytes());
}

TokenFile::~TokenFile() = default;
TokenFile::TokenFile(TokenFile&&) noexcept = default;

const TokenFileInfo& TokenFile::info() const {
  return impl_->info;
}
const std::string& TokenFile::path() const {
  return impl_->path;
}
std::span<const std::uint64_t> TokenFile::offsets() const {
  return impl_->offsets;
}

void TokenFile::read(std::int64_t begin, std::span<std::int32_t> out) const {
  std::array<std::uint16_t, 8192> narrow;
  const auto count = static_cast<std::int64_t>(out.size());
  if (impl_->tokens.element_bytes == 4) {
    read_stored(impl_->tokens, impl_->descriptor, impl_->path, begin, count,
                reinterpret_cast<std::byte*>(out.data()));
    return;
  }
  for (std::int64_t done = 0; done < count;) {
    const std::int64_t part = std::min<std::int64_t>(count - done, narrow.size());
    read_stored(impl_->tokens, impl_->descriptor, impl_->path, begin + done, part,
                reinterpret_cast<std::byte*>(narrow.data()));
    std::copy_n(narrow.begin(), part, out.begin() + done);
    done += part;
  }
}

void TokenFile::read_mask(std::int64_t begin, std::span<std::uint8_t> out) const {
  const auto count = static_cast<std::int64_t>(out.size());
  OCTET_ASSERT(begin >= 0 && begin + count <= impl_->info.tokens);
  if (impl_->info.has_mask)
    read_stored(impl_->mask, impl_->descriptor, impl_->path, begin, count,
                reinterpret_cast<std::byte*>(out.data()));
  else
    std::fill(out.begin(), out.end(), std::uint8_t{1});
}

std::string TokenFile::hash() const {
  const std::unique_ptr<XXH3_state_t, decltype(&XXH3_freeState)> state(XXH3_createState(), XXH3_freeState);
  OCTET_ASSERT(state != nullptr);
  XXH3_64bits_reset(state.get());
  std::vector<std::byte> block(static_cast<std::size_t>(kBlock * impl_->info.token_bytes));
  for (std::int64_t begin = 0; begin < impl_->info.tokens; begin += kBlock) {
    const std::int64_t part = std::min(kBlock, impl_->info.tokens - begin);
    read_stored(impl_->tokens, impl_->descriptor, impl_->path, begin, part, block.data());
    XXH3_64bits_update(state.get(), block.data(), static_cast<std::size_t>(part * impl_->info.token_bytes));
  }
  return fmt::format("{:016x}", XXH3_64bits_digest(state.get()));
}

void TokenFile::check_range(std::int64_t begin, std::span<const std::int32_t> ids,
                            std::int64_t vocabulary) const {
  const auto bad =
      std::find_if(ids.begin(), ids.end(), [&](std::int32_t id) { return id < 0 || id >= vocabulary; });
  if (bad == ids.end()) return;
  const auto position = static_cast<std::uint64_t>(begin + (bad - ids.begin()));
  const auto next = std::upper_bound(impl_->offsets.begin(), impl_->offsets.end(), position);
  const auto id = impl_->info.token_bytes == 4 ? static_cast<std::int64_t>(static_cast<std::uint32_t>(*bad))
                                               : static_cast<std::int64_t>(*bad);
  fail(ErrorKind::kData, "{}: document {}, offset {} (token {}): id {} is outside the vocabulary of {} ids",
       impl_->path, next - impl_->offsets.begin() - 1, position - *std::prev(next), position, id, vocabulary);
}

void TokenFile::check_ids(std::int64_t vocabulary) const {
  std::vector<std::int32_t> block(static_cast<std::size_t>(kBlock));
  for (std::int64_t begin = 0; begin < impl_->info.tokens; begin += kBlock) {
    const std::span<std::int32_t> part(
        block.data(), static_cast<std::size_t>(std::min(kBlock, impl_->info.tokens - begin)));
    read(begin, part);
    check_range(begin, part, vocabulary);
  }
}

}  // namespace octet
