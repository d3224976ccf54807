#include "octet/config/version.h"

#include <cblas.h>
#include <fmt/format.h>
#include <hdf5.h>
#include <hwloc.h>
#include <mpi.h>
#include <xxhash.h>

#include <boost/version.hpp>
#include <nlohmann/json.hpp>

#include "octet/runtime/device.h"
#include "octet_build.h"

namespace octet {
namespace {

/// The first line of the library's own description, such as "Open MPI v4.1.4, package: …".
std::string mpi_library() {
  char text[MPI_MAX_LIBRARY_VERSION_STRING];
  int length = 0;
  MPI_Get_library_version(text, &length);
  const std::string whole(text, static_cast<std::size_t>(length));
  return whole.substr(0, whole.find_first_of(",\n"));
}

std::string hdf5_library() {
  unsigned major = 0, minor = 0, release = 0;
  H5get_libversion(&major, &minor, &release);
  return fmt::format("{}.{}.{}", major, minor, release);
}

/// 10203 as 1.2.3.
std::string dotted(unsigned version) {
  return fmt::format("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

}  // namespace

std::string version() {
  return OCTET_VERSION " (" OCTET_GIT ")";
}

std::string version_report() {
  std::string text = fmt::format("octet     {}\n", version());
  text += fmt::format("compiler  {} ({})\n", OCTET_COMPILER, OCTET_BUILD_TYPE);
  text += fmt::format("MPI       {}\n", mpi_library());
  text += fmt::format("HDF5      {}\n", hdf5_library());
  text += fmt::format("BLAS      {}\n", openblas_get_config());
  text += fmt::format("Boost     {}.{}.{}\n", BOOST_VERSION / 100000, BOOST_VERSION / 100 % 1000,
                      BOOST_VERSION % 100);
  text += fmt::format("json      {}.{}.{}\n", NLOHMANN_JSON_VERSION_MAJOR, NLOHMANN_JSON_VERSION_MINOR,
                      NLOHMANN_JSON_VERSION_PATCH);
  text += fmt::format("fmt       {}\n", dotted(FMT_VERSION));
  text += fmt::format("hwloc     {}\n", HWLOC_VERSION);
  text += fmt::format("xxHash    {}\n", dotted(XXH_versionNumber()));
  text += fmt::format("CUDA      {}\n", cuda_versions());
  return text;
}

}  // namespace octet
