# SPDX-License-Identifier: Apache-2.0
# cmake/MoeCudaArchitectures.cmake: the GPU architectures that this library's kernels are compiled for, here and in projects that use the
# package, and the language that they need.

# moe_expect_cuda_language(what): an error unless the calling directory can compile .cu files.
function(moe_expect_cuda_language what)
  if(NOT CMAKE_CUDA_COMPILER_LOADED)
    message(FATAL_ERROR "${what}: needs the CUDA language, which this project has not enabled. Add CUDA to its project(), as in "
                        "project(${PROJECT_NAME} LANGUAGES CXX CUDA), or call enable_language(CUDA) before find_package(moe)")
  endif()
endfunction()

# moe_cuda_architectures(target HOPPER|ALL|OLDEST): the target's .cu files are compiled for sm_90a, for sm_90a and sm_80, or for sm_80, and
# for nothing else: CMake's own default is older than the kernels support.
function(moe_cuda_architectures target which)
  set(sm80 "-gencode=arch=compute_80,code=sm_80")
  set(sm90a "-gencode=arch=compute_90a,code=sm_90a")
  set(codes_HOPPER ${sm90a})
  set(codes_ALL ${sm90a} ${sm80})
  set(codes_OLDEST ${sm80})
  set_target_properties(${target} PROPERTIES CUDA_ARCHITECTURES OFF)
  foreach(code IN LISTS codes_${which})
    target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:${code}>")
  endforeach()
endfunction()
