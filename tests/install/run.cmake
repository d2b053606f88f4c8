# SPDX-License-Identifier: Apache-2.0
# tests/install/run.cmake: run(command...), whose failure fails the test.
function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE status)
  if(NOT status EQUAL 0)
    message(FATAL_ERROR "failed (${status}): ${ARGN}")
  endif()
endfunction()
