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
set(_moe_given "${CMAKE_CUDA_FLAGS_RELWITHDEBINFO}")  # the presets' own: without CUDA, CMake would warn that nothing reads it
message(STATUS "moe: CUDA toolkit ${MoeToolkit_VERSION} in ${MoeToolkit_ROOT}, CUDA space ${MOE_HAS_CUDA}")

include(MoeCudaArchitectures)  # moe_cuda_architectures

# How this project's own .cu files are compiled with RelWithDebInfo. Everything is compiled by both of nvcc's passes and linked, with and
# without a GPU. If none of it will run on a GPU (MOE_RUN_CUDA is OFF), the device code of a target is not optimised, which saves half of
# its compile time. Exception: targets of moe_cuda_optimised(target), where the ptxas output of the kernels is tested
# (tests/gpu/kernel_registers.txt).
if(NOT MOE_RUN_CUDA AND CMAKE_BUILD_TYPE STREQUAL "RelWithDebInfo")
  set(CMAKE_CUDA_FLAGS_RELWITHDEBINFO "")
  set(MOE_CUDA_FLAGS "$<IF:$<BOOL:$<TARGET_PROPERTY:MOE_CUDA_OPTIMISED>>,-O1,-O0;--Ofast-compile=max>")
else()
  set(MOE_CUDA_FLAGS "-lineinfo")
endif()
function(moe_cuda_optimised)
  foreach(target IN LISTS ARGN)
    set_target_properties(${target} PROPERTIES MOE_CUDA_OPTIMISED ON
      RULE_LAUNCH_COMPILE "${PROJECT_SOURCE_DIR}/cmake/ptxas_log.sh <OBJECT>")
    target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:-Xptxas=-v>")
    set_property(GLOBAL APPEND PROPERTY MOE_CUDA_OPTIMISED_TARGETS ${target})
  endforeach()
endfunction()
