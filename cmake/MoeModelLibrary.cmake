# SPDX-License-Identifier: Apache-2.0
# cmake/MoeModelLibrary.cmake: libraries of explicit instantiations, so that a program can use a composition without compiling it.
#
#   moe_add_model_library(<name> [CUDA] HEADERS <header>... [KERNELS <header>...]
#                         COMPOSITIONS "<Config, Router, Quantization, Backend, Experts>"... [LOGITS <type>...])
#
# compiles moe::ModularKernel<each composition>, its forward_routed() and its forward() for router logits of each type (default float), one
# translation unit a composition, a .cu with CUDA: for the project's CMAKE_CUDA_ARCHITECTURES, or without them for sm_90a and sm_80. It
# also writes <name>.hpp, which includes the headers and declares the instantiations extern. Link <name> and include <name>.hpp: the program
# compiles no kernel and no exchange, at any optimisation level. KERNELS are headers that the library alone includes: the .cuh of the
# policies, so that g++ can compile the programs that link a CUDA library. forward() with a probe of the program is compiled where it is
# called.
#
#   moe_add_model_library(<name> MODEL <model> [QUANTIZATIONS <name>...] [BACKENDS <name>...] [PHASES prefill decode] [SPACE host|cuda]
#                         [HEADERS <header>...])
#
# the same for a model by its name: moe::models::Qwen3_30B_A3B, or a struct of the project in HEADERS. cmake/MoePresetLibrary.cmake.

# _moe_refuse_twice(what keyword values...): an error for a value that is given more than once.
function(_moe_refuse_twice what keyword)
  set(seen)
  foreach(value IN LISTS ARGN)
    if(value IN_LIST seen)
      list(JOIN ARGN " " given)
      message(FATAL_ERROR "${what}: ${keyword} ${given}: ${value} is given twice, expected each value once")
    endif()
    list(APPEND seen "${value}")
  endforeach()
endfunction()

function(moe_add_model_library name)
  # MODEL and SPACE are parsed as lists, so that a second value is seen.
  cmake_parse_arguments(PARSE_ARGV 1 arg "CUDA" "" "MODEL;SPACE;HEADERS;KERNELS;COMPOSITIONS;LOGITS;QUANTIZATIONS;BACKENDS;PHASES")
  if(NOT name MATCHES "^[A-Za-z_][A-Za-z0-9_]*$")
    message(FATAL_ERROR "moe_add_model_library: the name is \"${name}\", expected an identifier of C++: letters, digits \
and _, first no digit")
  elseif(name MATCHES "^(moe|std)$")
    message(FATAL_ERROR "moe_add_model_library(${name}): the library's names would be in the namespace ${name}, which exists; take another")
  elseif(TARGET ${name})
    message(FATAL_ERROR "moe_add_model_library(${name}): a target has this name already; each library needs one of its own")
  endif()
  if(arg_UNPARSED_ARGUMENTS)
    list(JOIN arg_UNPARSED_ARGUMENTS " " unknown)
    message(FATAL_ERROR "moe_add_model_library(${name}): not known: ${unknown}, known: MODEL QUANTIZATIONS BACKENDS PHASES SPACE "
                        "HEADERS, or HEADERS KERNELS COMPOSITIONS LOGITS CUDA")
  endif()
  foreach(keyword IN ITEMS MODEL SPACE)
    if(keyword IN_LIST arg_KEYWORDS_MISSING_VALUES)
      message(FATAL_ERROR "moe_add_model_library(${name}): ${keyword} has no value")
    endif()
    list(LENGTH arg_${keyword} values)
    if(values GREATER 1)
      list(JOIN arg_${keyword} " " given)
      message(FATAL_ERROR "moe_add_model_library(${name}): ${keyword} ${given}: ${values} values, expected 1")
    endif()
  endforeach()
  # The keywords of one form are errors in the other.
  set(form "with MODEL")
  set(foreign COMPOSITIONS KERNELS LOGITS CUDA)
  set(own QUANTIZATIONS BACKENDS PHASES SPACE HEADERS)
  if(NOT arg_MODEL)
    set(form "without MODEL")
    set(foreign QUANTIZATIONS BACKENDS PHASES SPACE)
    set(own HEADERS KERNELS COMPOSITIONS LOGITS CUDA)
  endif()
  foreach(keyword IN LISTS foreign)
    if(arg_${keyword})
      list(JOIN own " " own)
      string(REGEX REPLACE "^CUDA TRUE$" "CUDA" given "${keyword} ${arg_${keyword}}")
      message(FATAL_ERROR "moe_add_model_library(${name}): ${given} cannot be given ${form}, which takes ${own}")
    endif()
  endforeach()
  if(arg_MODEL)
    moe_add_preset_library(${name} "${arg_MODEL}" "${arg_SPACE}" "${arg_QUANTIZATIONS}" "${arg_BACKENDS}" "${arg_PHASES}" "${arg_HEADERS}")
    return()
  endif()
  if(NOT arg_HEADERS OR NOT arg_COMPOSITIONS)
    message(FATAL_ERROR "moe_add_model_library(${name}): MODEL, or HEADERS and COMPOSITIONS, are required")
  endif()
  foreach(keyword IN ITEMS COMPOSITIONS LOGITS)
    _moe_refuse_twice("moe_add_model_library(${name})" ${keyword} ${arg_${keyword}})
  endforeach()
  if(arg_CUDA)
    moe_expect_cuda_language("moe_add_model_library(${name} CUDA)")
  endif()
  if(NOT arg_LOGITS)
    set(arg_LOGITS float)
  endif()
  set(folder ${CMAKE_CURRENT_BINARY_DIR}/${name})
  set(extension cpp)
  if(arg_CUDA)
    set(extension cu)
  endif()

  set(includes "#include <moe/modular_kernel.hpp>\n")
  foreach(header IN LISTS arg_HEADERS)
    string(APPEND includes "#include <${header}>\n")
  endforeach()
  set(kernels)
  foreach(header IN LISTS arg_KERNELS)
    string(APPEND kernels "#include <${header}>\n")
  endforeach()
  set(declarations "// ${name}.hpp: generated; the compositions that the library ${name} holds.\n#pragma once\n${includes}")
  set(sources)
  set(number 0)
  foreach(composition IN LISTS arg_COMPOSITIONS)
    # The layer's members are in the base class, which an instantiation of the derived class alone would not include.
    set(layer "moe::detail::Layer<moe::Composition<${composition}>>")
    set(instantiations "template class ${layer};\n")
    string(APPEND instantiations "template void ${layer}::run_routed<moe::NoProbe>(Hidden, moe::routing::GivenIds, "
      "moe::Rows<float const>, Output, moe::ForwardOptions const&, moe::Stream<Space>, moe::NoProbe&);\n")
    foreach(logits IN LISTS arg_LOGITS)
      # Parameters are looked up in the layer's class first: its names for them, and none of the user's.
      string(APPEND instantiations "template void ${layer}::run<${logits}, moe::NoProbe>(Hidden, moe::Rows<${logits} const>, Output, "
        "moe::ForwardOptions const&, moe::Stream<Space>, moe::NoProbe&);\n")
    endforeach()
    set(source ${folder}/${name}_${number}.${extension})
    file(CONFIGURE OUTPUT ${source} CONTENT "${includes}${kernels}${instantiations}" @ONLY)
    string(REGEX REPLACE "(^|\n)template " "\\1extern template " instantiations "${instantiations}")
    string(APPEND declarations "${instantiations}")
    list(APPEND sources ${source})
    math(EXPR number "${number} + 1")
  endforeach()
  file(CONFIGURE OUTPUT ${folder}/include/${name}.hpp CONTENT "${declarations}" @ONLY)

  add_library(${name} STATIC ${sources})
  target_include_directories(${name} PUBLIC ${folder}/include)
  if(arg_CUDA)
    target_link_libraries(${name} PUBLIC moe::cuda)
    # A project's own architectures are kept unless one is older than sm_80, as CMake's default is: the kernels need sm_80 or later.
    set(too_old ${CMAKE_CUDA_ARCHITECTURES})
    list(FILTER too_old INCLUDE REGEX "^[1-7][0-9](-|$)")
    if(too_old OR NOT CMAKE_CUDA_ARCHITECTURES)
      moe_cuda_architectures(${name} ALL)
    endif()
  else()
    target_link_libraries(${name} PUBLIC moe::moe)
    foreach(component mpi onednn)  # what policies of the host space need
      if(TARGET moe::${component})
        target_link_libraries(${name} PUBLIC moe::${component})
      endif()
    endforeach()
  endif()
  _moe_c_definitions(${name})
endfunction()
