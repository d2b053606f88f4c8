# SPDX-License-Identifier: Apache-2.0
# cmake/MoeTargets.cmake: the library's targets. All are header-only; a user pays only for the components that are linked.
#
#   moe::moe     core, routing, quantisation, host backends: CUDA toolkit headers, Boost.Hana, OpenMP
#   moe::io      checkpoints: nlohmann-json
#   moe::mpi     comm::Mpi: MPI
#   moe::onednn  experts::OneDnn: oneDNN
#   moe::host    all of the above
#   moe::cuda    the CUDA space: CUDA runtime, NCCL
#   moe::cublas  experts::CublasGrouped, a runner's products on the device: moe::cuda and cuBLAS
include(GNUInstallDirs)
set(MOE_EXPORTED_TARGETS moe)

add_library(moe INTERFACE)
add_library(moe::moe ALIAS moe)
target_compile_features(moe INTERFACE cxx_std_20)
target_include_directories(moe INTERFACE
  $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include> $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
target_link_libraries(moe INTERFACE MoeToolkit::headers Boost::headers OpenMP::OpenMP_CXX Threads::Threads)
# FindOpenMP sets CXX flags only; the host code of a .cu has the same pragmas.
target_compile_options(moe INTERFACE "$<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-fopenmp>")

# moe_component(name depends...): moe::<name>, which adds one dependency to moe::moe; not defined if the dependency is missing.
function(moe_component name)
  foreach(dependency IN LISTS ARGN)
    if(NOT TARGET ${dependency})
      message(STATUS "moe: component moe::${name} left out, no ${dependency}")
      return()
    endif()
  endforeach()
  add_library(moe_${name} INTERFACE)
  add_library(moe::${name} ALIAS moe_${name})
  set_target_properties(moe_${name} PROPERTIES EXPORT_NAME ${name})
  target_link_libraries(moe_${name} INTERFACE moe ${ARGN})
  list(APPEND MOE_EXPORTED_TARGETS moe_${name})
  set(MOE_EXPORTED_TARGETS ${MOE_EXPORTED_TARGETS} PARENT_SCOPE)
endfunction()

moe_component(io nlohmann_json::nlohmann_json)
moe_component(mpi MPI::MPI_CXX)
if(TARGET moe_mpi)
  target_compile_definitions(moe_mpi INTERFACE OMPI_SKIP_MPICXX MPICH_SKIP_MPICXX)  # the C interface only
  target_link_libraries(moe_mpi INTERFACE rt)  # shm_open, in libc itself from glibc 2.34 on
endif()
moe_component(onednn MoeOneDnn::dnnl)
if(TARGET moe_io AND TARGET moe_mpi AND TARGET moe_onednn)
  moe_component(host moe_io moe_mpi moe_onednn)
endif()
if(MOE_HAS_CUDA)
  moe_component(cuda MoeToolkit::runtime)
  if(TARGET MoeToolkit::nccl)
    target_link_libraries(moe_cuda INTERFACE MoeToolkit::nccl)
  endif()
  target_compile_options(moe_cuda INTERFACE "$<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr>")
  # CMake 3.25 has no cuda_std_20; nvcc takes the same -std twice.
  target_compile_options(moe_cuda INTERFACE "$<$<COMPILE_LANGUAGE:CUDA>:-std=c++20>")
  target_compile_definitions(moe_cuda INTERFACE MOE_HAS_CUDA=1)
  moe_component(cublas moe_cuda MoeToolkit::cublas)
endif()

# How this project's own programs are compiled. Never exported.
add_library(moe_build_flags INTERFACE)
set(MOE_WARNINGS -Wall -Wextra -Werror)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # g++ 12 emits these warnings after inlining, often wrongly for code of the standard library.
  list(APPEND MOE_WARNINGS -Wno-array-bounds -Wno-free-nonheap-object -Wno-maybe-uninitialized -Wno-restrict -Wno-stringop-overflow
       -Wno-stringop-overread)
endif()
list(JOIN MOE_WARNINGS "," MOE_WARNINGS_COMMAS)
target_compile_options(moe_build_flags INTERFACE
  "$<$<COMPILE_LANGUAGE:CXX>:${MOE_WARNINGS};-Wpedantic>"
  "$<$<COMPILE_LANGUAGE:CUDA>:${MOE_CUDA_FLAGS};-Xcompiler=${MOE_WARNINGS_COMMAS};--Werror=all-warnings>")
if(MOE_NATIVE)
  target_compile_options(moe_build_flags INTERFACE "$<$<COMPILE_LANGUAGE:CXX>:-march=native>")
endif()

# moe_has_main(result file): whether the file brings its own main.
function(moe_has_main result file)
  file(STRINGS ${file} lines REGEX "^(int main\\(|BENCHMARK_MAIN|auto main\\()")
  if(lines)
    set(${result} ON PARENT_SCOPE)
  else()
    set(${result} OFF PARENT_SCOPE)
  endif()
endfunction()
