# SPDX-License-Identifier: Apache-2.0
# cmake/MoeTestSlots.cmake: what a test reserves while ctest runs others beside it.

# MOE_GPU_LOCK: the resource lock of tests that need GPUs, of which one runs at a time. Without a GPU they all report skipped, and need not
# wait for each other.
set(MOE_GPU_LOCK "")
if(MOE_GPU_FOUND)
  set(MOE_GPU_LOCK gpu)
endif()

# moe_rank_slots(result label ranks): how many of ctest's parallel tests one of several ranks counts as. Ranks wait for each other half of
# the time and more, so two are one. Ranks with a GPU each count fully, and not at all where there is none, since they do not run.
function(moe_rank_slots result label ranks)
  if(NOT label STREQUAL "multigpu")
    math(EXPR slots "(${ranks} + 1) / 2")
  elseif(MOE_GPU_FOUND)
    set(slots ${ranks})
  else()
    set(slots 1)
  endif()
  set(${result} ${slots} PARENT_SCOPE)
endfunction()
