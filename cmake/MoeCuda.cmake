# SPDX-License-Identifier: Apache-2.0
# cmake/MoeCuda.cmake: decides whether the CUDA space is compiled (MOE_HAS_CUDA) and enables the language.
find_package(MoeToolkit 13.0 REQUIRED)

string(TOUPPER "${MOE_CUDA}" _moe_cuda)
set(MOE_HAS_CUDA OFF)
if(_moe_cuda STREQUAL "AUTO")
  if(MoeToolkit_NVCC AND MoeToolkit_CUDART)
    set(MOE_HAS_CUDA ON)
  endif()
elseif(MOE_CUDA)
  if(NOT MoeToolkit_NVCC)
    message(FATAL_ERROR "MOE_CUDA=${MOE_CUDA}, but ${MoeToolkit_ROOT}/bin has no nvcc. Run scripts/setup, or configure with -DMOE_CUDA=OFF")
  endif()
  set(MOE_HAS_CUDA ON)
endif()

if(MOE_HAS_CUDA)
  if(NOT DEFINED CMAKE_CUDA_COMPILER)
    set(CMAKE_CUDA_COMPILER "${MoeToolkit_NVCC}")
  endif()
  if(NOT DEFINED CMAKE_CUDA_HOST_COMPILER)
    set(CMAKE_CUDA_HOST_COMPILER "${CMAKE_CXX_COMPILER}")
  endif()
  # The architectures are given per source (moe_cuda_architectures): most kernels run on sm_80 too, the wgmma ones only on sm_90a.
  set(CMAKE_CUDA_ARCHITECTURES OFF)
  enable_language(CUDA)
endif()
message(STATUS "moe: CUDA toolkit ${MoeToolkit_VERSION} in ${MoeToolkit_ROOT}, CUDA space ${MOE_HAS_CUDA}")

include(MoeCudaArchitectures)  # moe_cuda_architectures

# What only has to compile is not optimised, which takes a third of the time. (ptxas then says that wgmma would be slow: it never runs.)
if(NOT MOE_RUN_CUDA AND CMAKE_BUILD_TYPE STREQUAL "RelWithDebInfo")
  set(CMAKE_CUDA_FLAGS_RELWITHDEBINFO "-O0 --Ofast-compile=max")
endif()

# moe_cuda_programs_only_compile(): for a directory of programs that need a GPU. Where they only have to compile, nvcc stops when the device code
# is machine code and its front end has checked the host code; the host compiler, the longest part, and the linker are left out.
macro(moe_cuda_programs_only_compile)
  if(NOT MOE_RUN_CUDA)
    string(REPLACE "<CUDA_COMPILE_MODE>" "--cuda" CMAKE_CUDA_COMPILE_OBJECT "${CMAKE_CUDA_COMPILE_OBJECT}")
  endif()
endmacro()
# moe_add_cuda_program(target source...): an executable, or in such a directory no more than its objects.
function(moe_add_cuda_program target)
  if(MOE_RUN_CUDA)
    add_executable(${target} ${ARGN})
  else()
    add_library(${target} OBJECT ${ARGN})
  endif()
endfunction()
