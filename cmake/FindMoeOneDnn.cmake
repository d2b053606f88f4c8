# SPDX-License-Identifier: Apache-2.0
# cmake/FindMoeOneDnn.cmake: MoeOneDnn::dnnl. Does not use oneDNN's own package file: Debian's requires OpenCL, which nothing here uses.
find_path(MoeOneDnn_INCLUDE_DIR dnnl.h)
find_library(MoeOneDnn_LIBRARY dnnl)
mark_as_advanced(MoeOneDnn_INCLUDE_DIR MoeOneDnn_LIBRARY)
set(MoeOneDnn_VERSION)
if(MoeOneDnn_INCLUDE_DIR AND EXISTS "${MoeOneDnn_INCLUDE_DIR}/oneapi/dnnl/dnnl_version.h")
  file(STRINGS "${MoeOneDnn_INCLUDE_DIR}/oneapi/dnnl/dnnl_version.h" _lines REGEX "#define DNNL_VERSION_(MAJOR|MINOR|PATCH)[ \t]+[0-9]+")
  string(REGEX MATCHALL "[0-9]+" _numbers "${_lines}")
  list(JOIN _numbers "." MoeOneDnn_VERSION)
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(MoeOneDnn REQUIRED_VARS MoeOneDnn_LIBRARY MoeOneDnn_INCLUDE_DIR VERSION_VAR MoeOneDnn_VERSION)
if(MoeOneDnn_FOUND AND NOT TARGET MoeOneDnn::dnnl)
  add_library(MoeOneDnn::dnnl UNKNOWN IMPORTED)
  string(REGEX REPLACE "^([0-9]+).*$" ".\\1" _major "${MoeOneDnn_VERSION}")  # empty where the version is not known
  set_target_properties(MoeOneDnn::dnnl PROPERTIES IMPORTED_LOCATION "${MoeOneDnn_LIBRARY}" MOE_SONAME "libdnnl.so${_major}")
  if(NOT MoeOneDnn_INCLUDE_DIR STREQUAL "/usr/include")
    set_target_properties(MoeOneDnn::dnnl PROPERTIES INTERFACE_INCLUDE_DIRECTORIES "${MoeOneDnn_INCLUDE_DIR}")
  endif()
endif()
