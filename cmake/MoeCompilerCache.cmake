# SPDX-License-Identifier: Apache-2.0
# cmake/MoeCompilerCache.cmake: use ccache if it is installed and no other launcher is set.
find_program(MOE_CCACHE ccache)
mark_as_advanced(MOE_CCACHE)
if(MOE_CCACHE)
  foreach(language CXX CUDA)
    if(NOT DEFINED CMAKE_${language}_COMPILER_LAUNCHER)
      set(CMAKE_${language}_COMPILER_LAUNCHER ${MOE_CCACHE})
    endif()
  endforeach()
endif()

# moe_cache_precompiled(targets...): what ccache asks of targets with precompiled headers, see "Precompiled headers" in its manual.
function(moe_cache_precompiled)
  foreach(target IN LISTS ARGN)
    if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
      target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-fpch-preprocess>)
    endif()
    if(MOE_CCACHE AND CMAKE_CXX_COMPILER_LAUNCHER STREQUAL MOE_CCACHE)
      set_target_properties(${target} PROPERTIES
        CXX_COMPILER_LAUNCHER "${CMAKE_COMMAND};-E;env;CCACHE_SLOPPINESS=pch_defines,time_macros;${MOE_CCACHE}")
    endif()
  endforeach()
endfunction()
