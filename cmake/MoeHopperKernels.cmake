# SPDX-License-Identifier: Apache-2.0
# cmake/MoeHopperKernels.cmake: a library of the Hopper experts' kernels, so that programs that use them compile without them.
#
#   moe_add_hopper_kernels(<name> "<scheme> <activation>"...)
#
# compiles, for sm_90a, the layer kernel of each scheme (bf16, f16, fp8_block, fp8_row, int8_row) with each activation of
# experts/hopper/common/activation.hpp, one translation unit each, and the definitions of moe::hopper::ContiguousLayer.
#
# "w4a16 <storage>", with int4, int4_zero, mxfp4, int4_32, int4_32_zero, nvfp4 or int8, is the layer kernel with weights of 4 or 8 bits
# alone, for SwiGLU and its clamped forms and, in a translation unit of its own, for any activation; the first of these adds the definitions
# of moe::hopper::W4A16Layer. "w4a8 mxfp4" is the same with mxfp4 weights and e4m3 activations, with the definitions of
# moe::hopper::W4A8Layer.
#
# A program that links <name> includes experts/hopper_{contiguous,masked,w4a16,w8a16,w4a8}.hpp or
# experts/hopper/{contiguous,w4a16,w4a8}_layer.hpp and no .cuh.
function(moe_add_hopper_kernels name)
  moe_expect_cuda_language("moe_add_hopper_kernels(${name})")
  set(folder ${CMAKE_CURRENT_BINARY_DIR}/${name})
  set(sources ${folder}/hopper_contiguous.cu)  # a layer names launchers of `kernels`, and would compile those that it sees defined
  set(kernels)
  file(CONFIGURE OUTPUT ${folder}/hopper_contiguous.cu CONTENT "#include <moe/experts/hopper/contiguous_layer.cuh>\n" @ONLY)
  foreach(instance IN LISTS ARGN)
    separate_arguments(parts UNIX_COMMAND "${instance}")
    list(GET parts 0 scheme)
    list(GET parts 1 activation)
    set(source ${folder}/hopper_${scheme}_${activation}.cu)
    if(scheme STREQUAL "w4a16")
      file(CONFIGURE OUTPUT ${source} CONTENT "#include <moe/experts/hopper/w4/launch.cuh>
template moe::hopper::W4Launcher moe::hopper::w4_launcher<moe::hopper::W4Scheme::${activation}>();
" @ONLY)
      file(CONFIGURE OUTPUT ${folder}/hopper_${scheme}_${activation}_any.cu CONTENT "#include <moe/experts/hopper/w4/launch.cuh>
template moe::hopper::W4Launcher moe::hopper::w4_any_launcher<moe::hopper::W4Scheme::${activation}>();
" @ONLY)
      list(APPEND kernels ${folder}/hopper_${scheme}_${activation}_any.cu)
      file(CONFIGURE OUTPUT ${folder}/hopper_w4a16.cu CONTENT "#include <moe/experts/hopper/w4a16_layer.cuh>\n" @ONLY)
      list(APPEND sources ${folder}/hopper_w4a16.cu)
    elseif(scheme STREQUAL "w4a8")
      file(CONFIGURE OUTPUT ${source} CONTENT "#include <moe/experts/hopper/w4/a8/kernel.cuh>
template void moe::hopper::w4a8::launch_layer<moe::hopper::W4Scheme::${activation}, false>(Params const&, int, cudaStream_t);
" @ONLY)
      file(CONFIGURE OUTPUT ${folder}/hopper_${scheme}_${activation}_any.cu CONTENT "#include <moe/experts/hopper/w4/a8/kernel.cuh>
template void moe::hopper::w4a8::launch_layer<moe::hopper::W4Scheme::${activation}, true>(Params const&, int, cudaStream_t);
" @ONLY)
      file(CONFIGURE OUTPUT ${folder}/hopper_w4a8.cu CONTENT "#include <moe/experts/hopper/w4a8_layer.cuh>\n" @ONLY)
      list(APPEND kernels ${folder}/hopper_${scheme}_${activation}_any.cu)
      list(APPEND sources ${folder}/hopper_w4a8.cu)
    else()
      file(CONFIGURE OUTPUT ${source} CONTENT "#include <moe/experts/hopper/layer/launch.cuh>
template moe::hopper::LayerLauncher moe::hopper::layer_launcher<moe::hopper::Scheme::${scheme}, moe::hopper::${activation}>();
" @ONLY)
    endif()
    list(APPEND kernels ${source})
  endforeach()
  list(REMOVE_DUPLICATES sources)
  if(COMMAND moe_group_cuda_files)  # in this project's own build
    moe_group_cuda_files(kernels ${folder} ${kernels})
  endif()
  add_library(${name} STATIC ${sources} ${kernels})
  set_target_properties(${name} PROPERTIES POSITION_INDEPENDENT_CODE ON)  # it may go into a shared library
  target_link_libraries(${name} PUBLIC moe::cuda)
  moe_cuda_architectures(${name} HOPPER)
endfunction()
