# SPDX-License-Identifier: Apache-2.0
# cmake/MoeGroups.cmake: compiles MOE_GROUP_FILES sources as one translation unit, neighbours in the list together. It reads the headers
# once and compiles once what several of the sources instantiate.

# moe_group_sources(<target> [<regex>]): the target's C++ sources, but for those whose path matches the regular expression.
function(moe_group_sources target)
  if(MOE_GROUP_FILES GREATER 1)
    set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE ${MOE_GROUP_FILES})
    get_target_property(sources ${target} SOURCES)
    foreach(source IN LISTS sources)
      if(ARGC GREATER 1 AND source MATCHES "${ARGV1}")
        set_source_files_properties(${source} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
      endif()
    endforeach()
  endif()
endfunction()

# moe_group_cuda_files(<result> <folder> files...): CMake's own unity builds do not take CUDA. The result is a list of files in <folder>
# that include these; without grouping it is the files themselves.
function(moe_group_cuda_files result folder)
  set(groups ${ARGN})
  if(MOE_GROUP_FILES GREATER 1)
    set(groups)
    set(first 0)
    list(LENGTH ARGN count)
    while(first LESS count)
      list(SUBLIST ARGN ${first} ${MOE_GROUP_FILES} files)
      list(TRANSFORM files REPLACE "(.+)" "#include \"\\1\"\n")
      list(JOIN files "" content)
      file(CONFIGURE OUTPUT ${folder}/group_${first}.cu CONTENT "${content}" @ONLY)
      list(APPEND groups ${folder}/group_${first}.cu)
      math(EXPR first "${first} + ${MOE_GROUP_FILES}")
    endwhile()
  endif()
  set(${result} ${groups} PARENT_SCOPE)
endfunction()
