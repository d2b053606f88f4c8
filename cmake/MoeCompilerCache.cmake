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
