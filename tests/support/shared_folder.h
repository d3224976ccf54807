#pragma once

#include <mpi.h>

#include <cstdlib>
#include <filesystem>
#include <stdexcept>
#include <string>

namespace octet::test {

/// A new folder that all ranks know, removed with the object. Making and removing it are collective.
class SharedFolder {
 public:
  SharedFolder() {
    MPI_Comm_rank(MPI_COMM_WORLD, &rank_);
    std::string name = (std::filesystem::temp_directory_path() / "octet-shared-XXXXXX").string();
    if (rank_ == 0 && ::mkdtemp(name.data()) == nullptr) name.assign(name.size(), '\0');
    // All ranks of a node, which tests run on, have the same folder for temporary files.
    MPI_Bcast(name.data(), static_cast<int>(name.size()), MPI_CHAR, 0, MPI_COMM_WORLD);
    if (name.front() == '\0') throw std::runtime_error("no temporary folder can be made");
    path_ = name;
  }
  ~SharedFolder() {
    MPI_Barrier(MPI_COMM_WORLD);
    std::error_code ignored;
    if (rank_ == 0) std::filesystem::remove_all(path_, ignored);
  }
  SharedFolder(const SharedFolder&) = delete;
  SharedFolder& operator=(const SharedFolder&) = delete;

  const std::string& path() const { return path_; }

 private:
  int rank_ = 0;
  std::string path_;
};

}  // namespace octet::test
