# The interface target octet_dependencies: everything that octet links against.

include(CheckCXXCompilerFlag)

find_package(MPI REQUIRED COMPONENTS C)
if(POLICY CMP0167)
  cmake_policy(SET CMP0167 NEW) # Boost's own package file, where CMake has no module for it
endif()
find_package(Boost 1.74 REQUIRED COMPONENTS program_options)
find_package(nlohmann_json 3 REQUIRED)
find_package(fmt REQUIRED)
find_package(Threads REQUIRED)
find_package(PkgConfig QUIET)

# Finds a C library as the imported target octet::<name>: pkg-config first, since the distributions put HDF5 and
# OpenBLAS in folders of their own, then the usual places.
function(octet_find_library name)
  cmake_parse_arguments(ARG "" "HEADER" "MODULES;LIBRARIES" ${ARGN})
  if(PkgConfig_FOUND)
    pkg_search_module(OCTET_${name} QUIET ${ARG_MODULES})
  endif()
  find_path(OCTET_${name}_HEADERS ${ARG_HEADER} HINTS ${OCTET_${name}_INCLUDE_DIRS}
            PATH_SUFFIXES hdf5/serial openblas-pthread openblas)
  find_library(OCTET_${name}_LIBRARY NAMES ${ARG_LIBRARIES} HINTS ${OCTET_${name}_LIBRARY_DIRS}
               PATH_SUFFIXES hdf5/serial openblas-pthread openblas)
  mark_as_advanced(OCTET_${name}_HEADERS OCTET_${name}_LIBRARY)
  if(NOT OCTET_${name}_HEADERS OR NOT OCTET_${name}_LIBRARY)
    message(FATAL_ERROR "${name} was not found (${ARG_HEADER}); `make packages` installs what octet needs")
  endif()
  add_library(octet::${name} INTERFACE IMPORTED)
  target_include_directories(octet::${name} INTERFACE ${OCTET_${name}_HEADERS})
  target_link_libraries(octet::${name} INTERFACE ${OCTET_${name}_LIBRARY})
endfunction()

octet_find_library(hdf5 HEADER hdf5.h MODULES hdf5-serial hdf5 LIBRARIES hdf5_serial hdf5)
octet_find_library(openblas HEADER cblas.h MODULES openblas LIBRARIES openblas)
octet_find_library(hwloc HEADER hwloc.h MODULES hwloc LIBRARIES hwloc)
octet_find_library(xxhash HEADER xxhash.h MODULES libxxhash LIBRARIES xxhash)

add_library(octet_dependencies INTERFACE)
target_link_libraries(
  octet_dependencies INTERFACE MPI::MPI_C Boost::program_options nlohmann_json::nlohmann_json fmt::fmt
                               Threads::Threads octet::hdf5 octet::hwloc octet::openblas octet::xxhash)
# MPI's C interface only.
target_compile_definitions(octet_dependencies INTERFACE OMPI_SKIP_MPICXX MPICH_SKIP_MPICXX)

# g++ 12 warns wrongly about code that it inlines at -O3: libfmt's parser, and std::string (GCC bug 105651).
set(OCTET_WARNINGS -Wall -Wextra -Werror)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  list(APPEND OCTET_WARNINGS -Wno-stringop-overflow -Wno-restrict)
endif()
target_compile_options(octet_dependencies INTERFACE "$<$<COMPILE_LANGUAGE:CXX>:${OCTET_WARNINGS}>")
if(OCTET_CPU_ARCH)
  check_cxx_compiler_flag(-march=${OCTET_CPU_ARCH} OCTET_CPU_ARCH_WORKS)
  if(OCTET_CPU_ARCH_WORKS)
    target_compile_options(octet_dependencies INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-march=${OCTET_CPU_ARCH}>)
  endif()
endif()
if(OCTET_SANITIZE)
  target_compile_options(
    octet_dependencies INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-fsanitize=address,undefined
                                 -fno-sanitize-recover=undefined -fno-omit-frame-pointer>)
  target_link_options(octet_dependencies INTERFACE -fsanitize=address,undefined)
endif()

include(Cuda)
