# SPDX-License-Identifier: Apache-2.0
# cmake/FindMoeToolkit.cmake: the CUDA toolkit (>= 13) that this library's headers need, on machines with and without a GPU.
#
# Looks in MOE_CUDA_ROOT, CUDA_HOME, CUDA_PATH, beside the nvcc on PATH, in /usr/local/cuda and in <project>/.deps/cuda (where
# scripts/setup puts one). Defines
#   MoeToolkit_ROOT, MoeToolkit_NVCC (may be NOTFOUND), MoeToolkit_VERSION
#   MoeToolkit::headers   the toolkit's headers and CCCL (cuda::std::mdspan, __nv_bfloat16, ...); enough for the host space
#   MoeToolkit::runtime   libcudart (static)
#   MoeToolkit::nccl      NCCL; absent if it is not installed or if MOE_NCCL is OFF
#   MoeToolkit::cublas    cuBLAS and cuBLASLt; absent if they are not installed
set(_moe_toolkit_hints)
foreach(_root IN ITEMS "${MOE_CUDA_ROOT}" "$ENV{CUDA_HOME}" "$ENV{CUDA_PATH}")
  if(_root)
    list(APPEND _moe_toolkit_hints "${_root}")
  endif()
endforeach()
find_program(_moe_nvcc_on_path nvcc NO_CMAKE_FIND_ROOT_PATH)
mark_as_advanced(_moe_nvcc_on_path)
if(_moe_nvcc_on_path)
  # nvcc says where its toolkit is: the file on PATH may be a script or a link.
  execute_process(COMMAND ${_moe_nvcc_on_path} --dryrun -x cu -c /dev/null -o /dev/null ERROR_VARIABLE _dryrun OUTPUT_QUIET)
  if(_dryrun MATCHES "TOP=([^\r\n]+)")
    string(STRIP "${CMAKE_MATCH_1}" _root)
    file(REAL_PATH "${_root}" _root)
    list(APPEND _moe_toolkit_hints "${_root}")
  endif()
endif()
list(APPEND _moe_toolkit_hints /usr/local/cuda "${CMAKE_CURRENT_LIST_DIR}/../.deps/cuda")

# The first root that is new enough wins: an old toolkit on PATH must not hide a good one in .deps.
if(NOT MoeToolkit_INCLUDE_DIR)
  foreach(_root IN LISTS _moe_toolkit_hints)
    if(EXISTS "${_root}/include/cuda.h" OR EXISTS "${_root}/include/cuda_runtime_api.h")
      file(STRINGS "${_root}/include/cuda_runtime_api.h" _line REGEX "#define CUDART_VERSION[ \t]+[0-9]+")
      string(REGEX REPLACE ".*CUDART_VERSION[ \t]+([0-9]+).*" "\\1" _number "${_line}")
      if(_number GREATER_EQUAL 13000)
        set(MoeToolkit_INCLUDE_DIR "${_root}/include" CACHE PATH "Headers of the CUDA toolkit")
        break()
      endif()
    endif()
  endforeach()
endif()
mark_as_advanced(MoeToolkit_INCLUDE_DIR)

if(MoeToolkit_INCLUDE_DIR)
  cmake_path(GET MoeToolkit_INCLUDE_DIR PARENT_PATH MoeToolkit_ROOT)
  file(STRINGS "${MoeToolkit_INCLUDE_DIR}/cuda_runtime_api.h" _line REGEX "#define CUDART_VERSION[ \t]+[0-9]+")
  string(REGEX REPLACE ".*CUDART_VERSION[ \t]+([0-9]+).*" "\\1" _number "${_line}")
  math(EXPR _major "${_number} / 1000")
  math(EXPR _minor "${_number} % 1000 / 10")
  set(MoeToolkit_VERSION "${_major}.${_minor}")
  find_program(MoeToolkit_NVCC nvcc HINTS "${MoeToolkit_ROOT}/bin" NO_DEFAULT_PATH)
  find_library(MoeToolkit_CUDART NAMES libcudart_static.a cudart_static
               HINTS "${MoeToolkit_ROOT}/lib64" "${MoeToolkit_ROOT}/lib" "${MoeToolkit_ROOT}/targets/x86_64-linux/lib" NO_DEFAULT_PATH)
  find_path(MoeToolkit_NCCL_INCLUDE_DIR nccl.h HINTS "${MoeToolkit_INCLUDE_DIR}" "${MoeToolkit_ROOT}/../nccl/include")
  find_library(MoeToolkit_NCCL NAMES nccl libnccl.so.2
               HINTS "${MoeToolkit_ROOT}/lib64" "${MoeToolkit_ROOT}/lib" "${MoeToolkit_ROOT}/../nccl/lib")
  find_path(MoeToolkit_CUBLAS_INCLUDE_DIR cublas_v2.h HINTS "${MoeToolkit_INCLUDE_DIR}" NO_DEFAULT_PATH)
  find_library(MoeToolkit_CUBLAS NAMES cublas libcublas.so.13
               HINTS "${MoeToolkit_ROOT}/lib64" "${MoeToolkit_ROOT}/lib" "${MoeToolkit_ROOT}/targets/x86_64-linux/lib" NO_DEFAULT_PATH)
  find_library(MoeToolkit_CUBLASLT NAMES cublasLt libcublasLt.so.13
               HINTS "${MoeToolkit_ROOT}/lib64" "${MoeToolkit_ROOT}/lib" "${MoeToolkit_ROOT}/targets/x86_64-linux/lib" NO_DEFAULT_PATH)
  mark_as_advanced(MoeToolkit_NVCC MoeToolkit_CUDART MoeToolkit_NCCL_INCLUDE_DIR MoeToolkit_NCCL MoeToolkit_CUBLAS_INCLUDE_DIR
                   MoeToolkit_CUBLAS MoeToolkit_CUBLASLT)
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(MoeToolkit REQUIRED_VARS MoeToolkit_INCLUDE_DIR VERSION_VAR MoeToolkit_VERSION
  REASON_FAILURE_MESSAGE "CUDA >= 13 headers are needed even without a GPU: run scripts/setup, or set CUDA_HOME")

if(MoeToolkit_FOUND)
  if(NOT TARGET MoeToolkit::headers)
    set(_dirs "${MoeToolkit_INCLUDE_DIR}")
    if(EXISTS "${MoeToolkit_INCLUDE_DIR}/cccl")
      list(APPEND _dirs "${MoeToolkit_INCLUDE_DIR}/cccl")
    endif()
    add_library(MoeToolkit::headers INTERFACE IMPORTED)
    set_target_properties(MoeToolkit::headers PROPERTIES
      INTERFACE_INCLUDE_DIRECTORIES "${_dirs}" INTERFACE_SYSTEM_INCLUDE_DIRECTORIES "${_dirs}")
  endif()
  if(MoeToolkit_CUDART AND NOT TARGET MoeToolkit::runtime)
    find_package(Threads REQUIRED)
    add_library(MoeToolkit::runtime INTERFACE IMPORTED)
    set_target_properties(MoeToolkit::runtime PROPERTIES
      INTERFACE_LINK_LIBRARIES "${MoeToolkit_CUDART};Threads::Threads;${CMAKE_DL_LIBS};rt")
  endif()
  if(MoeToolkit_NCCL AND MoeToolkit_NCCL_INCLUDE_DIR AND (NOT DEFINED MOE_NCCL OR MOE_NCCL) AND NOT TARGET MoeToolkit::nccl)
    add_library(MoeToolkit::nccl INTERFACE IMPORTED)
    set_target_properties(MoeToolkit::nccl PROPERTIES
      INTERFACE_INCLUDE_DIRECTORIES "${MoeToolkit_NCCL_INCLUDE_DIR}" INTERFACE_SYSTEM_INCLUDE_DIRECTORIES "${MoeToolkit_NCCL_INCLUDE_DIR}"
      INTERFACE_LINK_LIBRARIES "${MoeToolkit_NCCL}")
  endif()
  if(MoeToolkit_CUBLAS AND MoeToolkit_CUBLASLT AND MoeToolkit_CUBLAS_INCLUDE_DIR AND NOT TARGET MoeToolkit::cublas)
    add_library(MoeToolkit::cublas INTERFACE IMPORTED)
    set_target_properties(MoeToolkit::cublas PROPERTIES INTERFACE_LINK_LIBRARIES "${MoeToolkit_CUBLAS};${MoeToolkit_CUBLASLT}")
  endif()
endif()
