# SPDX-License-Identifier: Apache-2.0
# cmake/MoeHopperKernels.cmake: a library of the Hopper experts' kernels, so that programs that use them compile without them.
#
#   moe_add_hopper_kernels(<name> "<scheme> <activation>"...)
#
# compiles, for sm_90a, the layer kernel of each scheme (bf16, f16, fp8_block, fp8_row, int8_row) with each activation of
# experts/hopper/common/activation.hpp, one translation unit each, and the definitions of moe::hopper::ContiguousLayer.
#
# "w4a16 <storage>", with int4, int4_zero, mxfp4, int4_32, int4_32_zero, nvfp4, int8, fp8 or mxfp8, is the layer kernel with weights of 4
# or 8 bits alone, for SwiGLU and its clamped forms and, in a translation unit of its own, for any activation; the first of these adds the
# definitions of moe::hopper::W4A16Layer. With int4, int4_32, mxfp4, nvfp4 and mxfp8 there is a third unit, for rows in codes. "w4a8
# <storage>", with mxfp4, int4, int4_zero, int4_32 or int4_32_zero, is the same with e4m3 activations, and with the definitions of
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
    _moe_expect_hopper_instance(${name} "${instance}")
    separate_arguments(parts UNIX_COMMAND "${instance}")
    list(GET parts 0 scheme)
    list(GET parts 1 activation)
    _moe_hopper_kernel_texts(texts layer ${scheme} ${activation})
    string(MAKE_C_IDENTIFIER "${activation}" word)
    set(number 0)
    foreach(text IN LISTS texts)
      string(REPLACE "|" ";" text "${text}")
      set(source ${folder}/hopper_${scheme}_${word}_${number}.cu)
      file(CONFIGURE OUTPUT ${source} CONTENT "${text}\n" @ONLY)
      list(APPEND kernels ${source})
      math(EXPR number "${number} + 1")
    endforeach()
    if(scheme MATCHES "^w4a")
      file(CONFIGURE OUTPUT ${folder}/hopper_${scheme}.cu CONTENT "${layer}\n" @ONLY)
      list(APPEND sources ${folder}/hopper_${scheme}.cu)
    endif()
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

# Stops where an instance is not two words that are known: nvcc's error would name neither this call nor what is known.
function(_moe_expect_hopper_instance name instance)
  set(activations "FastSilu|AnyActivation|FixedActivation<.+>")
  if(NOT instance MATCHES "^((bf16|f16|fp8_block|fp8_row|int8_row) (${activations})|\
w4a16 (int4|int4_zero|mxfp4|int4_32|int4_32_zero|nvfp4|int8|fp8|mxfp8)|w4a8 (mxfp4|int4|int4_zero|int4_32|int4_32_zero))$")
    message(FATAL_ERROR "moe_add_hopper_kernels(${name}): not known: \"${instance}\", known: \"<bf16|f16|fp8_block|fp8_row|int8_row> "
      "<${activations}>\", \"w4a16 <int4|int4_zero|mxfp4|int4_32|int4_32_zero|nvfp4|int8|fp8|mxfp8>\", "
      "\"w4a8 <mxfp4|int4|int4_zero|int4_32|int4_32_zero>\"")
  endif()
endfunction()

# _moe_hopper_kernel_texts(kernels layer scheme activation): the sources that instantiate the kernels of one instance, with | for ;, and the
# one of its layer's definitions. Used by moe_add_model_library(), too.
function(_moe_hopper_kernel_texts kernels layer scheme activation)
  set(folder "#include <moe/experts/hopper")
  if(scheme STREQUAL "w4a16")
    set(begin "${folder}/w4/launch.cuh>\ntemplate moe::hopper::W4Launcher moe::hopper::")
    set(end "<moe::hopper::W4Scheme::${activation}>()|")
    set(texts "${begin}w4_launcher${end}" "${begin}w4_any_launcher${end}")
    if(activation MATCHES "^(mxfp4|nvfp4|mxfp8|int4|int4_32)$")  # those that a scheme with rows in codes has
      list(APPEND texts "${begin}w4_rounded_launcher${end}")
    endif()
    set(${kernels} "${texts}" PARENT_SCOPE)
    set(${layer} "${folder}/w4a16_layer.cuh>" PARENT_SCOPE)
  elseif(scheme STREQUAL "w4a8")
    set(begin "${folder}/w4/a8/kernel.cuh>\ntemplate void moe::hopper::w4a8::launch_layer<moe::hopper::W4Scheme::${activation}, ")
    set(end ">(Params const&, int, cudaStream_t)|")
    set(${kernels} "${begin}false${end}" "${begin}true${end}" PARENT_SCOPE)
    set(${layer} "${folder}/w4a8_layer.cuh>" PARENT_SCOPE)
  else()
    set(instance "<moe::hopper::Scheme::${scheme}, moe::hopper::${activation}>()|")
    set(${kernels} "${folder}/layer/launch.cuh>\ntemplate moe::hopper::LayerLauncher moe::hopper::layer_launcher${instance}" PARENT_SCOPE)
    set(${layer} "${folder}/contiguous_layer.cuh>" PARENT_SCOPE)
  endif()
endfunction()
