# Included by CMakeLists.txt, this makes the target octet_version, which keeps <build>/generated/octet_build.h true
# to the checkout. Run as a script (cmake -P) it writes that header, and only when it changes.

if(NOT CMAKE_SCRIPT_MODE_FILE)
  find_program(GIT_EXECUTABLE git)
  mark_as_advanced(GIT_EXECUTABLE)
  add_custom_target(
    octet_version
    COMMAND ${CMAKE_COMMAND} -DVERSION=${PROJECT_VERSION} -DSOURCE=${CMAKE_CURRENT_SOURCE_DIR}
            -DGIT_EXECUTABLE=${GIT_EXECUTABLE} -DHEADER=${CMAKE_CURRENT_BINARY_DIR}/generated/octet_build.h
            -DBUILD_TYPE=${CMAKE_BUILD_TYPE}
            "-DCOMPILER=${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}" -P ${CMAKE_CURRENT_LIST_FILE}
    BYPRODUCTS ${CMAKE_CURRENT_BINARY_DIR}/generated/octet_build.h
    VERBATIM)
  return()
endif()

set(DESCRIPTION "")
if(GIT_EXECUTABLE)
  execute_process(COMMAND ${GIT_EXECUTABLE} -c safe.directory=* -C ${SOURCE} describe --always --dirty
                  OUTPUT_VARIABLE DESCRIPTION ERROR_QUIET OUTPUT_STRIP_TRAILING_WHITESPACE)
endif()
if(NOT DESCRIPTION)
  set(DESCRIPTION "no git commit")
endif()
file(CONFIGURE OUTPUT ${HEADER} @ONLY CONTENT [[#pragma once

#define OCTET_VERSION "@VERSION@"
#define OCTET_GIT "@DESCRIPTION@"
#define OCTET_COMPILER "@COMPILER@"
#define OCTET_BUILD_TYPE "@BUILD_TYPE@"
]])
