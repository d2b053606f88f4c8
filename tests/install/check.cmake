# SPDX-License-Identifier: Apache-2.0
# tests/install/check.cmake: one test of the installed package, each from an empty prefix. ONLY says which: header_only, model_library,
# config_check, c_consumer and cuda_consumer configure and build the project of that name; package has the documents' CMake blocks, the
# components and the version. Any failure fails the test.
include(${CMAKE_CURRENT_LIST_DIR}/run.cmake)
set(options -G Ninja -DCMAKE_CXX_COMPILER=${COMPILER} -DCMAKE_PREFIX_PATH=${WORK}/prefix -DMOE_CUDA_ROOT=${CUDA_ROOT})
foreach(language CXX CUDA)
  list(APPEND options -DCMAKE_${language}_COMPILER_LAUNCHER=${LAUNCHER})
endforeach()
set(docs_blocks ${PYTHON} ${CMAKE_CURRENT_LIST_DIR}/docs_blocks.py --root ${CMAKE_CURRENT_LIST_DIR}/../..)
file(REMOVE_RECURSE ${WORK})
run(${CMAKE_COMMAND} --install ${BUILD} --prefix ${WORK}/prefix)

# Configures and builds the project of the test, and runs programs of it.
function(run_project)
  cmake_parse_arguments(PARSE_ARGV 0 arg "" "" "OPTIONS;PROGRAMS")
  run(${CMAKE_COMMAND} -S ${CMAKE_CURRENT_LIST_DIR}/${ONLY} -B ${WORK}/build ${options} ${arg_OPTIONS})
  run(${CMAKE_COMMAND} --build ${WORK}/build)
  foreach(program IN LISTS arg_PROGRAMS)
    run(${WORK}/build/${program})
  endforeach()
endfunction()

if(ONLY STREQUAL "header_only")
  run_project(PROGRAMS program program_host archetypes)
elseif(ONLY STREQUAL "model_library")
  set(programs model_O0 model_O2 model_O3 preset)
  if(CLANGXX)
    list(APPEND programs model_clang_O2)
  endif()
  run_project(OPTIONS -DCLANGXX=${CLANGXX} PROGRAMS ${programs})
  run(${PYTHON} ${CHECK_C_SYMBOLS} --nm ${NM} --header ${WORK}/prefix/include/moe/moe.h ${WORK}/build/libconsumer_c.so)
elseif(ONLY STREQUAL "config_check")
  run_project()
  execute_process(COMMAND ${CMAKE_COMMAND} --build ${WORK}/build --target broken RESULT_VARIABLE status OUTPUT_VARIABLE said)
  string(REGEX MATCHALL "error: [^\n]*" errors "${said}")
  list(LENGTH errors count)
  if(status EQUAL 0 OR NOT count EQUAL 1 OR NOT errors MATCHES "moe: backend and experts live in different memory spaces. Fix: choose both")
    message(FATAL_ERROR "the config check of a broken composition must be one error with the rule's sentence, and is ${count}: ${said}")
  endif()
elseif(ONLY STREQUAL "c_consumer")  # through CMake and pkg-config, without a header of CUDA on the path
  set(options -G Ninja -DCMAKE_PREFIX_PATH=${WORK}/prefix -DCMAKE_CXX_COMPILER=${COMPILER})
  run_project(PROGRAMS c_consumer c_consumer_pkg_config cpp_consumer)
elseif(ONLY STREQUAL "package")
  if(TOOL)
    run(${WORK}/prefix/bin/moe list compositions)
  endif()

  # What the documents show.
  set(libmoe)
  if(LIBMOE)
    set(libmoe --libmoe)
  endif()
  run(${docs_blocks} --prefix ${WORK}/prefix --work ${WORK}/docs --cmake ${CMAKE_COMMAND} --cxx ${COMPILER}
      --option=-DMOE_CUDA_ROOT=${CUDA_ROOT} ${libmoe})

  file(WRITE ${WORK}/hots/CMakeLists.txt
    "cmake_minimum_required(VERSION 3.25)\nproject(hots LANGUAGES CXX)\nfind_package(moe REQUIRED COMPONENTS hots)\n")
  execute_process(COMMAND ${CMAKE_COMMAND} -S ${WORK}/hots -B ${WORK}/hots/build ${options}
    RESULT_VARIABLE status OUTPUT_QUIET ERROR_VARIABLE said)
  string(REGEX REPLACE "[ \n]+" " " said "${said}")
  if(status EQUAL 0 OR NOT said MATCHES "moe has no component \"hots\"; its components are io, mpi, onednn, host, cuda, cublas, c")
    message(FATAL_ERROR "find_package(moe COMPONENTS hots) does not name the components: ${said}")
  endif()

  # Another version: CMake's reason names the wanted and the installed one.
  file(WRITE ${WORK}/version/CMakeLists.txt
       "cmake_minimum_required(VERSION 3.25)\nproject(version LANGUAGES CXX)\nfind_package(moe 99 REQUIRED)\n")
  execute_process(COMMAND ${CMAKE_COMMAND} -S ${WORK}/version -B ${WORK}/version/build ${options} RESULT_VARIABLE status OUTPUT_QUIET
                  ERROR_VARIABLE said)
  string(REGEX REPLACE "[ \n]+" " " said "${said}")
  if(status EQUAL 0 OR NOT said MATCHES "compatible with requested version \"99\"" OR
     NOT said MATCHES "share/cmake/moe/moeConfig.cmake, version: ${VERSION}")
    message(FATAL_ERROR "find_package(moe 99) is not refused with the version that was found, ${VERSION}: ${said}")
  endif()

  # Installed without being built: the component c alone, and beside others.
  file(REMOVE ${WORK}/prefix/lib/libmoe.so.${VERSION})
  foreach(components "c" "c onednn")
    file(WRITE ${WORK}/no_libmoe/CMakeLists.txt
      "cmake_minimum_required(VERSION 3.25)\nproject(no_libmoe LANGUAGES CXX)\nfind_package(moe REQUIRED COMPONENTS ${components})\n")
    execute_process(COMMAND ${CMAKE_COMMAND} -S ${WORK}/no_libmoe -B ${WORK}/no_libmoe/build ${options} RESULT_VARIABLE status OUTPUT_QUIET
                    ERROR_VARIABLE said)
    string(REGEX REPLACE "[ \n]+" " " said "${said}")
    if(status EQUAL 0 OR NOT said MATCHES "installed without its component c: libmoe was not built. Build it, cmake --build")
      message(FATAL_ERROR "find_package(moe COMPONENTS ${components}) without a libmoe does not say so: ${said}")
    endif()
  endforeach()
elseif(ONLY STREQUAL "cuda_consumer")
  file(COPY ${CMAKE_CURRENT_LIST_DIR}/cuda_consumer/ DESTINATION ${WORK}/cuda_source)
  if(NCCL_PROGRAM)
    run(${docs_blocks} --cuda-block ${WORK}/cuda_source/docs_block.cmake)
    configure_file(${NCCL_PROGRAM} ${WORK}/cuda_source/program.cu COPYONLY)
  endif()
  run(${CMAKE_COMMAND} -S ${WORK}/cuda_source -B ${WORK}/cuda ${options} -DCMAKE_CUDA_COMPILER=${NVCC}
      -DCMAKE_CUDA_HOST_COMPILER=${COMPILER})
  run(${CMAKE_COMMAND} --build ${WORK}/cuda)
  foreach(level 0 2 3)
    run(${PYTHON} ${CHECK_SYMBOLS} --nm ${NM} ${WORK}/cuda/CMakeFiles/cuda_model_O${level}.dir/model.cpp.o)
    if(RUN_CUDA)
      run(${WORK}/cuda/cuda_model_O${level})
    endif()
  endforeach()
  if(EXISTS ${WORK}/cuda/cuda_preset)
    run(${PYTHON} ${CHECK_SYMBOLS} --block --nm ${NM} ${WORK}/cuda/CMakeFiles/cuda_preset.dir/preset.cpp.o)
  endif()
else()
  message(FATAL_ERROR "ONLY is ${ONLY}, no test")
endif()
file(REMOVE_RECURSE ${WORK}/prefix)  # libmoe and the tool of a build with kernels are large
