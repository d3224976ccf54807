#include "shard_file.h"

#include <fcntl.h>

#include <cstdio>
#include <map>

#include "files.h"
#include "hdf5_file.h"
#include "octet/base/error.h"

namespace octet::checkpoint {
namespace {

constexpr const char* kFormat = "octet-checkpoint";
constexpr std::int64_t kVersion = 1;

std::string subject_of(const std::filesystem::path& path, const std::string& dataset) {
  return fmt::format("{}, dataset {}", path.string(), dataset);
}

/// Contiguous, allocated at once and never filled, so that it has an offset before any byte is written.
Hdf5Handle dataset_properties() {
  Hdf5Handle properties(H5Pcreate(H5P_DATASET_CREATE), &H5Pclose, "HDF5 dataset properties");
  check_hdf5(H5Pset_layout(properties, H5D_CONTIGUOUS), "HDF5 contiguous layout");
  check_hdf5(H5Pset_alloc_time(properties, H5D_ALLOC_TIME_EARLY), "HDF5 early allocation");
  check_hdf5(H5Pset_fill_time(properties, H5D_FILL_TIME_NEVER), "HDF5 without fill values");
  return properties;
}

Hdf5Handle link_properties() {
  Hdf5Handle properties(H5Pcreate(H5P_LINK_CREATE), &H5Pclose, "HDF5 link properties");
  check_hdf5(H5Pset_create_intermediate_group(properties, 1), "HDF5 intermediate groups");
  return properties;
}

void write_label(hid_t file, const ShardLabel& label) {
  write_text_attribute(file, "format", kFormat);
  write_integers_attribute(file, "version", {kVersion});
  write_text_attribute(file, "identity", label.identity);
  write_integers_attribute(file, "shard", {label.number});
  write_integers_attribute(file, "shards", {label.count});
}

ShardLabel label_of(hid_t file) {
  const std::string format = read_text_attribute(file, "format");
  if (format != kFormat)
    fail(ErrorKind::kCheckpoint, "attribute format is \"{}\", not \"{}\"", format, kFormat);
  return {read_text_attribute(file, "identity"), static_cast<int>(read_integer_attribute(file, "shard")),
          static_cast<int>(read_integer_attribute(file, "shards"))};
}

std::int64_t bytes_of(const SavedBox& saved) {
  return saved.box.size() * static_cast<std::int64_t>(sizeof(float));
}

/// More than the shard will take: data, alignment and metadata.
std::int64_t upper_bound_of_bytes(const std::vector<SavedBox>& boxes) {
  std::int64_t bytes = std::int64_t{1} << 20;
  for (const SavedBox& saved : boxes) bytes += bytes_of(saved) + 65536 + 4096;
  return bytes;
}

/// Writes all of a shard's metadata; returns the file offset of every box.
std::vector<std::int64_t> lay_out(const MemoryFile& memory, const std::filesystem::path& path,
                                  const ShardLabel& label, const std::vector<SavedBox>& boxes) {
  Hdf5Handle file = create_hdf5(memory, path);
  write_label(file, label);
  const Hdf5Handle creation = dataset_properties(), links = link_properties();
  const std::vector<std::string> names = dataset_names(boxes);
  std::vector<std::int64_t> offsets;
  for (std::size_t i = 0; i < boxes.size(); ++i) {
    const SavedBox& saved = boxes[i];
    const std::string subject = subject_of(path, names[i]);
    const hsize_t extent[2] = {static_cast<hsize_t>(saved.box.rows), static_cast<hsize_t>(saved.box.cols)};
    const Hdf5Handle space(H5Screate_simple(2, extent, nullptr), &H5Sclose, subject);
    const Hdf5Handle dataset(
        H5Dcreate2(file, names[i].c_str(), H5T_IEEE_F32LE, space, links, creation, H5P_DEFAULT), &H5Dclose,
        subject);
    write_integers_attribute(dataset, "global_shape", {saved.global_rows, saved.global_cols});
    write_integers_attribute(dataset, "offset", {saved.box.row, saved.box.col});
    write_integers_attribute(dataset, "extent", {saved.box.rows, saved.box.cols});
    const haddr_t offset = H5Dget_offset(dataset);
    if (offset == HADDR_UNDEF) fail(ErrorKind::kCheckpoint, "{}: HDF5 gives no file offset", subject);
    offsets.push_back(static_cast<std::int64_t>(offset));
  }
  file.close(fmt::format("cannot write {}", path.string()));
  return offsets;
}

std::int64_t checked_offset(hid_t file, const std::filesystem::path& path, const CheckpointInfo::Part& part) {
  const std::string subject = subject_of(path, part.dataset);
  const Hdf5Handle dataset(H5Dopen2(file, part.dataset.c_str(), H5P_DEFAULT), &H5Dclose, subject);
  const Hdf5Handle type(H5Dget_type(dataset), &H5Tclose, subject);
  const Hdf5Handle space(H5Dget_space(dataset), &H5Sclose, subject);
  hsize_t extent[2] = {0, 0};
  if (H5Sget_simple_extent_ndims(space) != 2 || H5Sget_simple_extent_dims(space, extent, nullptr) != 2 ||
      extent[0] != static_cast<hsize_t>(part.box.rows) || extent[1] != static_cast<hsize_t>(part.box.cols))
    fail(ErrorKind::kCheckpoint, "{} has shape [{}, {}], the manifest says [{}, {}]", subject, extent[0],
         extent[1], part.box.rows, part.box.cols);
  if (H5Tequal(type, H5T_IEEE_F32LE) <= 0) fail(ErrorKind::kCheckpoint, "{} is not float32", subject);
  const haddr_t offset = H5Dget_offset(dataset);
  if (offset == HADDR_UNDEF) fail(ErrorKind::kCheckpoint, "{} is not contiguous", subject);
  return static_cast<std::int64_t>(offset);
}

}  // namespace

std::string shard_name(int number, int count) {
  return fmt::format("shard-{:05}-of-{:05}.h5", number, count);
}

std::vector<std::string> dataset_names(const std::vector<SavedBox>& boxes) {
  std::map<std::string, int> next;
  std::vector<std::string> names;
  for (const SavedBox& saved : boxes)
    names.push_back(fmt::format("/{}/box_{}", saved.tensor, next[saved.tensor]++));
  return names;
}

void write_shard(const std::filesystem::path& path, const ShardLabel& label,
                 const std::vector<SavedBox>& boxes) {
  PosixFile file(path, O_WRONLY | O_CREAT | O_EXCL);
  file.reserve(upper_bound_of_bytes(boxes));
  const MemoryFile metadata;
  const std::vector<std::int64_t> offsets = lay_out(metadata, path, label, boxes);
  metadata.copy_to(file);
  for (std::size_t i = 0; i < boxes.size(); ++i) file.write_at(boxes[i].data, bytes_of(boxes[i]), offsets[i]);
  file.sync();
}

ShardLabel read_label(const std::filesystem::path& path) {
  return label_of(open_hdf5(path));
}

std::string describe(const ShardLabel& label) {
  return fmt::format("shard {} of {} of checkpoint {}", label.number, label.count, label.identity);
}

std::vector<std::int64_t> dataset_offsets(const std::filesystem::path& path, const ShardLabel& label,
                                          const std::vector<const CheckpointInfo::Part*>& parts) {
  const Hdf5Handle file = open_hdf5(path);
  const ShardLabel found = label_of(file);
  if (found != label)
    fail(ErrorKind::kCheckpoint, "{} is {}, expected {}", path.string(), describe(found), describe(label));
  std::vector<std::int64_t> offsets;
  for (const CheckpointInfo::Part* part : parts) offsets.push_back(checked_offset(file, path, *part));
  return offsets;
}

std::optional<ShardLabel> expected_label(const CheckpointInfo& info, const std::string& file_name) {
  ShardLabel label{info.identity, 0, 1};
  if (std::sscanf(file_name.c_str(), "shard-%d-of-%d.h5", &label.number, &label.count) != 2 ||
      shard_name(label.number, label.count) != file_name)
    return std::nullopt;
  return label;
}

void check_hash(const CheckpointInfo& info, const CheckpointInfo::File& file) {
  const std::filesystem::path path = info.path / file.name;
  const std::string found = hash_of_file(path);
  if (found == file.xxh3_128) return;
  std::string message =
      fmt::format("{} is damaged: XXH3-128 is {}, the manifest says {}", path.string(), found, file.xxh3_128);
  if (const std::optional<ShardLabel> label = expected_label(info, file.name)) {
    try {
      const ShardLabel own = read_label(path);
      if (own != *label)
        message += fmt::format("; it says it is {}, expected {}", describe(own), describe(*label));
    } catch (const Error&) {
      // Damage may well keep HDF5 from reading the label: the hashes say enough.
    }
  }
  fail(ErrorKind::kCheckpoint, "{}", message);
}

}  // namespace octet::checkpoint
