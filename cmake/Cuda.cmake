# The CUDA part of octet_dependencies, and OCTET_CUDA_FOUND. OCTET_CUDA=AUTO goes on without CUDA where nvcc, cuDNN
# or NCCL is missing and says which; ON stops.

set(OCTET_CUDA_FOUND OFF)
set(OCTET_CUDA_MISSING "" CACHE INTERNAL "Why there is no CUDA in this build")
if(NOT OCTET_CUDA)
  set(OCTET_CUDA_MISSING "OCTET_CUDA=${OCTET_CUDA}" CACHE INTERNAL "")
  message(STATUS "CUDA: off, ${OCTET_CUDA_MISSING}")
  return()
endif()

function(octet_without_cuda why)
  if(OCTET_CUDA STREQUAL "AUTO")
    set(OCTET_CUDA_MISSING "${why}" CACHE INTERNAL "")
    message(STATUS "CUDA: off, ${why}")
  else()
    message(FATAL_ERROR "OCTET_CUDA=ON, but ${why}")
  endif()
endfunction()

find_program(OCTET_NVCC nvcc HINTS $ENV{CUDA_HOME}/bin $ENV{CUDA_PATH}/bin /usr/local/cuda/bin)
mark_as_advanced(OCTET_NVCC)
if(NOT OCTET_NVCC)
  octet_without_cuda("nvcc is neither in PATH nor in /usr/local/cuda/bin")
  return()
endif()
get_filename_component(OCTET_NVCC_REAL ${OCTET_NVCC} REALPATH)
get_filename_component(OCTET_CUDA_ROOT ${OCTET_NVCC_REAL}/../.. ABSOLUTE)

# Finds a library that comes beside the toolkit: in <NAME>_ROOT, in the toolkit, in the system, or in the
# Python packages of NVIDIA, which have a versioned library only.
function(octet_find_nvidia_library name header)
  string(TOUPPER ${name} upper)
  file(GLOB wheels /usr/lib/python3*/*-packages/nvidia/${name} /usr/local/lib/python3*/*-packages/nvidia/${name})
  set(places ${${upper}_ROOT} $ENV{${upper}_ROOT} ${OCTET_CUDA_ROOT} ${OCTET_CUDA_ROOT}/targets/x86_64-linux
             ${wheels})
  find_path(${upper}_HEADERS ${header} HINTS ${places} PATH_SUFFIXES include)
  find_library(${upper}_LIBRARY NAMES ${name} ${ARGN} HINTS ${places} PATH_SUFFIXES lib lib64)
  mark_as_advanced(${upper}_HEADERS ${upper}_LIBRARY)
  if(${upper}_HEADERS AND ${upper}_LIBRARY)
    add_library(octet::${name} INTERFACE IMPORTED)
    target_include_directories(octet::${name} INTERFACE ${${upper}_HEADERS})
    target_link_libraries(octet::${name} INTERFACE ${${upper}_LIBRARY})
  endif()
endfunction()

octet_find_nvidia_library(cudnn cudnn.h libcudnn.so.9)
octet_find_nvidia_library(nccl nccl.h libnccl.so.2)
if(NOT TARGET octet::cudnn)
  octet_without_cuda("cuDNN (cudnn.h, libcudnn.so) was not found; CUDNN_ROOT may name its folder")
  return()
endif()
if(NOT TARGET octet::nccl)
  octet_without_cuda("NCCL (nccl.h, libnccl.so) was not found; NCCL_ROOT may name its folder")
  return()
endif()

# Major.minor of a library from two defines of its header, PREFIX_MAJOR and PREFIX_MINOR; empty where there are none.
function(octet_header_version result header prefix)
  set(version "")
  if(EXISTS "${header}")
    foreach(part MAJOR MINOR)
      file(STRINGS "${header}" line REGEX "^#define +${prefix}_${part} +[0-9]+" LIMIT_COUNT 1)
      string(REGEX MATCH "[0-9]+" number "${line}")
      list(APPEND version ${number})
    endforeach()
    list(JOIN version "." version)
  endif()
  set(${result} "${version}" PARENT_SCOPE)
endfunction()

# cuBLAS of CUDA 12.9 has the scales of 8-bit products; NCCL 2.27 the policies for its thread blocks.
find_path(CUBLAS_HEADERS cublas_api.h HINTS ${OCTET_CUDA_ROOT} ${OCTET_CUDA_ROOT}/targets/x86_64-linux
          PATH_SUFFIXES include)
mark_as_advanced(CUBLAS_HEADERS)
octet_header_version(cublas_version "${CUBLAS_HEADERS}/cublas_api.h" CUBLAS_VER)
octet_header_version(nccl_version "${NCCL_HEADERS}/nccl.h" NCCL)
if(cublas_version AND cublas_version VERSION_LESS 12.9)
  octet_without_cuda("cuBLAS ${cublas_version} in ${CUBLAS_HEADERS} is older than 12.9, which comes with CUDA 12.9")
  return()
endif()
if(nccl_version AND nccl_version VERSION_LESS 2.27)
  octet_without_cuda("NCCL ${nccl_version} in ${NCCL_HEADERS} is older than 2.27; NCCL_ROOT may name another's folder")
  return()
endif()

set(CMAKE_CUDA_COMPILER ${OCTET_NVCC_REAL} CACHE FILEPATH "nvcc")
set(CMAKE_CUDA_ARCHITECTURES "80;90" CACHE STRING "GPU architectures: 80 is A100, 90 is H100 and H200")
set(CMAKE_CUDA_RUNTIME_LIBRARY Shared)
enable_language(CUDA)
set(CMAKE_CUDA_STANDARD 17)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
find_package(CUDAToolkit REQUIRED)

target_link_libraries(octet_dependencies INTERFACE CUDA::cudart CUDA::cublas CUDA::cublasLt octet::cudnn octet::nccl
                      ${CMAKE_DL_LIBS})
list(JOIN OCTET_WARNINGS "," OCTET_HOST_WARNINGS)
target_compile_options(octet_dependencies INTERFACE
                       "$<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=${OCTET_HOST_WARNINGS};-Werror=all-warnings;-lineinfo>")
set(OCTET_CUDA_FOUND ON)
message(STATUS "CUDA: ${CMAKE_CUDA_COMPILER_VERSION}, architectures ${CMAKE_CUDA_ARCHITECTURES}, "
               "cuDNN ${CUDNN_LIBRARY}, NCCL ${NCCL_LIBRARY}")
