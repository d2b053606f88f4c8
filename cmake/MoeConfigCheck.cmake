# SPDX-License-Identifier: Apache-2.0
# cmake/MoeConfigCheck.cmake: compositions checked by the compiler, without nvcc and without a GPU.
#
#   moe_add_config_check(<name> HEADERS <header>... COMPOSITIONS "<Config, Router, Quantization, Backend, Experts>"...)
#
# adds the target <name>, part of the default build, which compiles if every composition satisfies the contracts and the rules of
# moe/core/contract/check.hpp; each one that does not is one error, whose first line is the rule's sentence. HEADERS declare what the
# compositions name: the project's own and those of the policies (moe/backends/low_latency.hpp and so on; no .cuh). Policies of both spaces
# are checked; no kernel and no exchange is instantiated.
function(moe_add_config_check name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "HEADERS;COMPOSITIONS")
  if(arg_UNPARSED_ARGUMENTS)
    list(JOIN arg_UNPARSED_ARGUMENTS " " unknown)
    message(FATAL_ERROR "moe_add_config_check(${name}): not known: ${unknown}, known: HEADERS COMPOSITIONS")
  elseif(NOT arg_HEADERS OR NOT arg_COMPOSITIONS)
    message(FATAL_ERROR "moe_add_config_check(${name}): HEADERS and COMPOSITIONS are required")
  elseif(TARGET ${name})
    message(FATAL_ERROR "moe_add_config_check(${name}): a target has this name already; each check needs one of its own")
  endif()
  set(text "// ${name}.cpp: generated; each composition that breaks a rule is one error.\n#include <moe/core/contract/check.hpp>\n")
  foreach(header IN LISTS arg_HEADERS)
    string(APPEND text "#include <${header}>\n")
  endforeach()
  foreach(composition IN LISTS arg_COMPOSITIONS)
    string(APPEND text "template struct moe::CheckedComposition<${composition}>;\n")
  endforeach()
  set(source ${CMAKE_CURRENT_BINARY_DIR}/${name}/${name}.cpp)
  file(CONFIGURE OUTPUT ${source} CONTENT "${text}" @ONLY)
  add_library(${name} OBJECT ${source})
  target_link_libraries(${name} PRIVATE moe::moe)
  if(TARGET moe::mpi AND TARGET MPI::MPI_CXX)  # a header of a composition over MPI includes mpi.h
    target_link_libraries(${name} PRIVATE moe::mpi)
  endif()
endfunction()
