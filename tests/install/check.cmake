# SPDX-License-Identifier: Apache-2.0
# tests/install/check.cmake: install, configure, build and run the consumer, configure the CUDA one; any failure is the test's.
function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE status)
  if(NOT status EQUAL 0)
    message(FATAL_ERROR "failed (${status}): ${ARGN}")
  endif()
endfunction()
file(REMOVE_RECURSE ${WORK})
run(${CMAKE_COMMAND} --install ${BUILD} --prefix ${WORK}/prefix)
run(${CMAKE_COMMAND} -S ${CONSUMER} -B ${WORK}/build -G Ninja -DCMAKE_CXX_COMPILER=${COMPILER} -DCMAKE_PREFIX_PATH=${WORK}/prefix
    -DMOE_CUDA_ROOT=${CUDA_ROOT})
run(${CMAKE_COMMAND} --build ${WORK}/build)
run(${WORK}/build/consumer)
run(${WORK}/build/consumer_host)
if(TOOL)
  run(${WORK}/prefix/bin/moe list compositions)
endif()
if(NVCC)
  run(${CMAKE_COMMAND} -S ${CUDA_CONSUMER} -B ${WORK}/cuda -G Ninja -DCMAKE_CXX_COMPILER=${COMPILER} -DCMAKE_CUDA_COMPILER=${NVCC}
      -DCMAKE_CUDA_HOST_COMPILER=${COMPILER} -DCMAKE_PREFIX_PATH=${WORK}/prefix -DMOE_CUDA_ROOT=${CUDA_ROOT})
endif()
