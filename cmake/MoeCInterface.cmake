# SPDX-License-Identifier: Apache-2.0
# cmake/MoeCInterface.cmake: moe_export_only_c(<target>): a shared library that exports the functions of moe.h and nothing else: libmoe, and
# a project's own over a model library (moe/c/export.hpp). Static libraries that it links need POSITION_INDEPENDENT_CODE ON. oneDNN is
# opened when a runner needs it (onednn_on_demand.cpp). Other build systems pass libmoe.map, beside this file, to the linker:
# -Wl,--version-script=libmoe.map.
function(moe_export_only_c target)
  get_target_property(type ${target} TYPE)
  if(NOT type MATCHES "^(SHARED|MODULE)_LIBRARY$")
    message(FATAL_ERROR "moe_export_only_c(${target}): is a ${type}, expected a SHARED_LIBRARY or MODULE_LIBRARY")
  endif()
  set(map ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/libmoe.map)
  set_target_properties(${target} PROPERTIES CXX_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON)
  # Instantiations of the standard library's templates are visible whatever the preset: the script hides all but moe_*.
  target_link_options(${target} PRIVATE "LINKER:--version-script=${map}")
  set_property(TARGET ${target} APPEND PROPERTY LINK_DEPENDS ${map})
  if(TARGET MoeOneDnn::dnnl)
    get_target_property(soname MoeOneDnn::dnnl MOE_SONAME)
    if(NOT soname)  # a target of the project's own
      set(soname libdnnl.so)
    endif()
    set(source ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/onednn_on_demand.cpp)
    target_sources(${target} PRIVATE ${source})
    # Never in one unit with oneDNN's header.
    set_source_files_properties(${source} TARGET_DIRECTORY ${target} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
    target_compile_definitions(${target} PRIVATE "MOE_C_OPENS_ONEDNN=\"${soname}\"")
    target_link_options(${target} PRIVATE "LINKER:--as-needed")
    target_link_libraries(${target} PRIVATE ${CMAKE_DL_LIBS})
  endif()
endfunction()

# Of this package, also where a project includes it whose own version is another.
set_property(GLOBAL PROPERTY MOE_C_VERSION "${moe_VERSION}")

# _moe_c_definitions(library): for sources with moe/c/export.hpp that link a model library: what moe_version() and moe_has() say, and the
# communicators of its groups.
function(_moe_c_definitions library)
  get_property(version GLOBAL PROPERTY MOE_C_VERSION)
  target_compile_definitions(${library} INTERFACE "MOE_C_VERSION=\"${version}\"")
  get_target_property(linked ${library} INTERFACE_LINK_LIBRARIES)
  if("moe::onednn" IN_LIST linked)
    target_compile_definitions(${library} INTERFACE MOE_C_HAS_ONEDNN=1)
  endif()
  if("moe::mpi" IN_LIST linked)
    target_compile_definitions(${library} INTERFACE MOE_C_HAS_MPI=1)
  endif()
  if(linked MATCHES "(^|;)moe::(cuda|cublas)(;|$)" AND TARGET MoeToolkit::nccl)
    target_compile_definitions(${library} INTERFACE MOE_C_HAS_NCCL=1)
  endif()
endfunction()
