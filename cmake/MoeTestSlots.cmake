# SPDX-License-Identifier: Apache-2.0
# cmake/MoeTestSlots.cmake: what a test reserves while ctest runs others beside it.

# MOE_GPU_LOCK: the resource lock of tests that need GPUs, of which one runs at a time. In a build that will run on none (MOE_RUN_CUDA is
# OFF) they all report skipped, and need not wait for each other.
set(MOE_GPU_LOCK "")
if(MOE_RUN_CUDA)
  set(MOE_GPU_LOCK gpu)
endif()

# moe_rank_slots(result label ranks): how many of ctest's parallel tests one of several ranks counts as: one for each rank, since tests of
# deadlines fail where ranks wait for a core. Ranks with a GPU each report skipped at once in a build that will run on none.
function(moe_rank_slots result label ranks)
  set(slots ${ranks})
  if(label STREQUAL "multigpu" AND NOT MOE_RUN_CUDA)
    set(slots 1)
  endif()
  set(${result} ${slots} PARENT_SCOPE)
endfunction()

# moe_long_tests_first(): of the current directory's tests ctest starts first those that take longest, a minute and more on two cores: one
# that starts last would run alone at the end. ctest knows how long a test took only where it ran before.
function(moe_long_tests_first)
  set(long headers.alone install.cuda_consumer python.wheel python.transformers_bench golden.read_families tool.device_refusals_test
      python.oldest_tvm_ffi python.transformers mpi.runner_grid_test.np2 tool.bad_input_test install.no_nccl
      # under the address sanitizer
      golden.io_blocks_test unit.runner_killed_test unit.routing_policies_test unit.io_family_fields_test unit.comm_window_killed_test)
  get_property(tests DIRECTORY PROPERTY TESTS)
  foreach(test IN LISTS tests)
    list(FIND long ${test} place)
    if(NOT place EQUAL -1)
      math(EXPR cost "1000 - ${place}")
      set_tests_properties(${test} PROPERTIES COST ${cost})
    endif()
  endforeach()
endfunction()
