#include <fcntl.h>

#include <cmath>

#include "hdf5_file.h"
#include "manifest.h"
#include "octet/base/error.h"

namespace octet::checkpoint {
namespace {

/// Properties of a dataset whose boxes are read from the shards. File names are relative to the index.
Hdf5Handle virtual_properties(const CheckpointInfo::TensorInfo& tensor, hid_t space,
                              const std::string& subject) {
  Hdf5Handle properties(H5Pcreate(H5P_DATASET_CREATE), &H5Pclose, subject);
  const float missing = std::nanf("");
  check_hdf5(H5Pset_fill_value(properties, H5T_NATIVE_FLOAT, &missing), subject);
  for (const CheckpointInfo::Part& part : tensor.parts) {
    const hsize_t offset[2] = {static_cast<hsize_t>(part.box.row), static_cast<hsize_t>(part.box.col)};
    const hsize_t extent[2] = {static_cast<hsize_t>(part.box.rows), static_cast<hsize_t>(part.box.cols)};
    const Hdf5Handle source(H5Screate_simple(2, extent, nullptr), &H5Sclose, subject);
    check_hdf5(H5Sselect_hyperslab(space, H5S_SELECT_SET, offset, nullptr, extent, nullptr), subject);
    check_hdf5(H5Pset_virtual(properties, space, part.file.c_str(), part.dataset.c_str(), source), subject);
  }
  check_hdf5(H5Sselect_all(space), subject);
  return properties;
}

/// One line a box: "<file>:<dataset> offset [r, c] extent [r, c]".
std::string box_list(const CheckpointInfo::TensorInfo& tensor) {
  std::string lines;
  for (const CheckpointInfo::Part& part : tensor.parts)
    lines += fmt::format("{}:{} offset [{}, {}] extent [{}, {}]\n", part.file, part.dataset, part.box.row,
                         part.box.col, part.box.rows, part.box.cols);
  return lines;
}

}  // namespace

void write_index(const std::filesystem::path& path, const CheckpointInfo& info) {
  const MemoryFile memory;
  Hdf5Handle file = create_hdf5(memory, path);
  write_text_attribute(file, "format", "octet-checkpoint-index");
  write_integers_attribute(file, "version", {1});
  write_text_attribute(file, "identity", info.identity);
  const Hdf5Handle links(H5Pcreate(H5P_LINK_CREATE), &H5Pclose, "HDF5 link properties");
  check_hdf5(H5Pset_create_intermediate_group(links, 1), "HDF5 intermediate groups");
  for (const auto& [name, tensor] : info.tensors) {
    const std::string subject = fmt::format("{}, dataset {}", path.string(), name);
    const hsize_t shape[2] = {static_cast<hsize_t>(tensor.rows), static_cast<hsize_t>(tensor.cols)};
    const Hdf5Handle space(H5Screate_simple(2, shape, nullptr), &H5Sclose, subject);
    const Hdf5Handle creation = virtual_properties(tensor, space, subject);
    const Hdf5Handle dataset(
        H5Dcreate2(file, name.c_str(), H5T_IEEE_F32LE, space, links, creation, H5P_DEFAULT), &H5Dclose,
        subject);
    write_integers_attribute(dataset, "global_shape", {tensor.rows, tensor.cols});
    write_text_attribute(dataset, "boxes", box_list(tensor));
  }
  file.close(fmt::format("cannot write {}", path.string()));
  PosixFile target(path, O_WRONLY | O_CREAT | O_EXCL);
  memory.copy_to(target);
  target.sync();
}

}  // namespace octet::checkpoint
