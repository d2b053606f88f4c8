# SPDX-License-Identifier: Apache-2.0
# cmake/MoePresetLibrary.cmake: moe_add_model_library(<name> MODEL <model> …): the layers and blocks of a model as a library.
#
# For each of BACKENDS (default no_expert_parallel) and of QUANTIZATIONS (default: how the model is released) one composition, its block
# (moe::Runner) and a translation unit. <name>.hpp declares them extern and names the blocks
#
#   <name>::<backend>::<quantization>::prefill and ::decode     the composition of that backend, the same for both phases
#   <name>::prefill, <name>::decode                             what models/preset_choice.hpp prefers of them
#
# of the PHASES that are asked for (default both). <name>::decode is a moe::Runner; its layer is <name>::decode::Layer. SPACE is host or
# cuda (default host). In the CUDA space the routing kernel and low_latency's dispatch and combine are compiled for the model's sizes, in
# the library; all other kernels have run-time dimensions and are compiled once for all libraries of a project. All for sm_90a.

# _moe_preset_lists(): what the arguments may be, for the calling function: a project that has this one as a subdirectory calls
# moe_add_model_library() in a folder where no variable of this file is set.
macro(_moe_preset_lists)
  set(MOE_PRESET_BACKENDS no_expert_parallel all_to_all_v low_latency high_throughput)
  set(MOE_PRESET_PHASES prefill decode)
  set(MOE_PRESET_SPACES host cuda)
  # Names of the registry.
  set(MOE_PRESET_QUANTIZATIONS none fp8_block128 fp8_per_token fp8_per_tensor int8_per_token int8_per_channel int4_group128 int4_group64
      int4_group32 mxfp4_w4a16 nvfp4_w4a16 mxfp4_fp8 int4_group128_fp8 int4_group64_fp8 int4_group32_fp8)
  # Those that an exchange over windows of device memory cannot carry: their rows are neither bf16 nor fp8 with a scale for 128 values.
  set(MOE_PRESET_NOT_OVER_WINDOWS fp8_per_token fp8_per_tensor int8_per_token)

  # How the models of the catalogue are released, where it is not "none"; moe::models::PresetChoice says the same, and the generated code
  # asserts it.
  set(MOE_PRESET_fp8_block128 DeepSeek_V3 Kimi_K2 MiniMax_M2)
  set(MOE_PRESET_mxfp4_w4a16 DeepSeek_V4_Flash DeepSeek_V4_Pro GptOss_20B GptOss_120B Kimi_K3)
endmacro()

# _moe_preset_backend(type headers kernels space backend): what a program writes for a backend, the headers that declare its exchange, and
# in the CUDA space the one that defines the exchange's templates.
function(_moe_preset_backend type headers kernels space backend)
  set(camel_no_expert_parallel NoExpertParallel)
  set(camel_all_to_all_v AllToAllV)
  set(camel_low_latency LowLatency)
  set(camel_high_throughput HighThroughput)
  set(window OFF)
  if(backend MATCHES "^(low_latency|high_throughput)$")
    set(window ON)
  endif()
  set(${kernels} "" PARENT_SCOPE)
  if(backend STREQUAL "no_expert_parallel")
    set(over moe::space::${space})
    set(found moe/comm/self.hpp moe/backends/no_expert_parallel.hpp)
  elseif(space STREQUAL "host")
    set(over moe::comm::Mpi)
    set(found moe/comm/mpi.hpp moe/backends/${backend}.hpp)
    if(window)
      set(over moe::comm::MpiShared)
      set(found moe/comm/mpi.hpp moe/comm/mpi_shared.hpp moe/backends/window/host/${backend}.hpp)
    endif()
  else()
    set(over moe::comm::Nccl)
    set(found moe/comm/nccl.hpp)
    if(window)
      set(over moe::comm::NcclSymmetric)
      set(found moe/comm/nccl_symmetric.hpp moe/backends/window/device/${backend}/exchange.hpp)
    endif()
  endif()
  if(space STREQUAL "cuda" AND NOT window)
    list(APPEND found moe/backends/collective/device/${backend}.hpp)
    set(${kernels} moe/backends/collective/device/${backend}.cuh PARENT_SCOPE)
  endif()
  set(${type} "moe::backends::${camel_${backend}}<${over}>" PARENT_SCOPE)
  set(${headers} ${found} PARENT_SCOPE)
endfunction()

# _moe_preset_quantization(type header kernels name): likewise; kernels: the Hopper kernels, as moe_add_hopper_kernels names them.
function(_moe_preset_quantization type header kernels name)
  set(type_none None)
  set(type_fp8_block128 Fp8Block<>)
  set(type_fp8_per_token Fp8PerToken<>)
  set(type_fp8_per_tensor Fp8PerTensor<>)
  set(type_int8_per_token Int8PerToken)
  set(type_int8_per_channel Int8PerChannel)
  set(type_int4_group128 Int4Group128)
  set(type_int4_group64 "WNa16<4, 64>")
  set(type_int4_group32 "WNa16<4, 32>")
  set(type_mxfp4_w4a16 Mxfp4W4A16<>)
  set(type_nvfp4_w4a16 Nvfp4W4A16)
  set(type_mxfp4_fp8 Mxfp4Fp8<>)
  set(type_int4_group128_fp8 Int4Fp8<128>)
  set(type_int4_group64_fp8 Int4Fp8<64>)
  set(type_int4_group32_fp8 Int4Fp8<32>)
  set(kernels_none "bf16 FastSilu" "bf16 AnyActivation")
  set(kernels_fp8_block128 "fp8_block FastSilu" "fp8_block AnyActivation")
  set(kernels_fp8_per_token "fp8_row FastSilu" "fp8_row AnyActivation")
  set(kernels_fp8_per_tensor ${kernels_fp8_per_token})
  set(kernels_int8_per_token "int8_row FastSilu" "int8_row AnyActivation")
  set(kernels_int8_per_channel "w4a16 int8")
  set(kernels_int4_group128 "w4a16 int4")
  set(kernels_int4_group64 "w4a16 int4")
  set(kernels_int4_group32 "w4a16 int4_32")
  set(kernels_mxfp4_w4a16 "w4a16 mxfp4")
  set(kernels_nvfp4_w4a16 "w4a16 nvfp4")
  set(kernels_mxfp4_fp8 "w4a8 mxfp4")
  set(kernels_int4_group128_fp8 "w4a8 int4")
  set(kernels_int4_group64_fp8 "w4a8 int4")
  set(kernels_int4_group32_fp8 "w4a8 int4_32")
  string(REGEX REPLACE "_w4a16$" "" file ${name})
  string(REGEX REPLACE "^int4_group[0-9]+$" "int4_group128" file ${file})  # one header for all groups
  string(REGEX REPLACE "^int4_group[0-9]+_fp8$" "int4_fp8" file ${file})
  set(${type} "moe::quantization::${type_${name}}" PARENT_SCOPE)
  set(${header} moe/quantization/${file}.hpp PARENT_SCOPE)
  set(${kernels} ${kernels_${name}} PARENT_SCOPE)
endfunction()

# _moe_shared_library(name sources...): a static library of CUDA sources that the project's presets share, built only if one needs it.
# Sources are lines of C++, one file each.
function(_moe_shared_kernels name)
  if(TARGET ${name})
    return()
  endif()
  set(folder ${CMAKE_BINARY_DIR}/moe_preset_kernels)
  set(sources)
  set(number 0)
  foreach(text IN LISTS ARGN)
    set(source ${folder}/${name}_${number}.cu)
    string(REPLACE "|" ";" text "${text}")
    file(CONFIGURE OUTPUT ${source} CONTENT "// ${name}_${number}.cu: generated; kernels that presets share.\n${text}\n" @ONLY)
    list(APPEND sources ${source})
    math(EXPR number "${number} + 1")
  endforeach()
  add_library(${name} STATIC EXCLUDE_FROM_ALL ${sources})
  set_target_properties(${name} PROPERTIES POSITION_INDEPENDENT_CODE ON)
  target_link_libraries(${name} PUBLIC moe::cuda)
  if(TARGET MoeToolkit::cublas)
    target_link_libraries(${name} PUBLIC moe::cublas)
  endif()
  moe_cuda_architectures(${name} HOPPER)
endfunction()

# _moe_preset_kernels(targets quantisations' kernels; backends): the libraries of kernels that a preset in the CUDA space links.
function(_moe_preset_kernels result kernels backends)
  set(targets)
  if(TARGET moe_hopper_kernels)  # this project's own, which has all of them
    list(APPEND targets moe_hopper_kernels)
  else()
    foreach(kernel IN LISTS kernels)
      separate_arguments(parts UNIX_COMMAND "${kernel}")
      list(GET parts 0 scheme)
      list(GET parts 1 activation)
      _moe_hopper_kernel_texts(texts layer ${scheme} ${activation})
      list(FILTER texts EXCLUDE REGEX "w4_rounded_launcher")  # no scheme of a preset has rows in codes with these
      _moe_shared_kernels(moe_preset_${scheme}_${activation} ${texts})
      list(APPEND targets moe_preset_${scheme}_${activation})
      if(scheme MATCHES "^w4a")
        _moe_shared_kernels(moe_preset_${scheme} "${layer}")
        list(APPEND targets moe_preset_${scheme})
      endif()
      _moe_shared_kernels(moe_preset_hopper "#include <moe/experts/hopper/contiguous_layer.cuh>")
      list(APPEND targets moe_preset_hopper)
    endforeach()
  endif()
  foreach(backend IN LISTS backends)
    if(NOT backend MATCHES "^(low_latency|high_throughput)$")
      continue()
    endif()
    if(TARGET moe_exchange_kernels)
      list(APPEND targets moe_exchange_kernels)
    else()
      _moe_shared_kernels(moe_preset_${backend} "#include <moe/backends/window/device/${backend}/launch.cuh>")
      list(APPEND targets moe_preset_${backend})
    endif()
    _moe_shared_kernels(moe_preset_window "#include <moe/comm/nccl_symmetric.cuh>")
    list(APPEND targets moe_preset_window)
  endforeach()
  # What surrounds a layer, in bf16: gate, projections, shared experts (also from rows in fp8), the sum.
  set(cuda "moe::space::cuda")
  set(rows "template void moe::runner::RowKernels<${cuda}>::")
  set(quantize)
  foreach(scheme IN ITEMS "Fp8Block<>" "Fp8PerToken<>" "Mxfp4Fp8<>" "Int4Fp8<128>" "Int4Fp8<64>" "Int4Fp8<32>")
    set(quant "moe::quantization::${scheme}")
    string(APPEND quantize "${rows}quantize(${quant} const&, moe::Rows<moe::bf16 const>, moe::Rows<${quant}::Payload<moe::bf16>>, \
moe::Rows<float>, cudaStream_t)|\n")
  endforeach()
  _moe_shared_kernels(moe_preset_runner "#include <moe/quantization/fp8_block128.hpp>
#include <moe/quantization/fp8_per_token.hpp>
#include <moe/quantization/int4_fp8.hpp>
#include <moe/quantization/mxfp4_fp8.hpp>
#include <moe/runner/device/dense_shared.cuh>
#include <moe/runner/device/row_kernels.cuh>
template class moe::runner::Linear<${cuda}, float, moe::bf16, float>|
template class moe::runner::Linear<${cuda}, moe::bf16, moe::bf16, moe::bf16>|
template class moe::runner::device::DenseShared<moe::bf16>|
${quantize}${rows}sigmoid_gate(moe::Rows<moe::bf16 const>, float const*, moe::Rows<float>, cudaStream_t)|
${rows}rms_norm(moe::Rows<moe::bf16 const>, float const*, float, float, moe::Rows<moe::bf16>, cudaStream_t)|
${rows}copy_columns(moe::Rows<moe::bf16 const>, moe::Rows<moe::bf16>, cudaStream_t)|
${rows}finish(moe::runner::FinishRows<moe::bf16, moe::bf16> const&, cudaStream_t)|")
  list(APPEND targets moe_preset_runner)
  list(REMOVE_DUPLICATES targets)
  set(${result} ${targets} PARENT_SCOPE)
endfunction()

# _moe_preset_instantiations(text model quantization backend): explicit instantiations of the composition's layer and block.
function(_moe_preset_instantiations text model quantization backend)
  set(arguments "${model}, ${quantization}, ${backend}")
  set(layer "moe::detail::Layer<moe::models::PresetComposition<${arguments}>>")
  set(runner "moe::Runner<moe::models::PresetLayer<${arguments}>, moe::models::PresetParts<${arguments}>>")
  set(${text} "template class ${layer};
template void ${layer}::run_routed<moe::NoProbe>(Hidden, moe::routing::GivenIds, moe::Rows<float const>, Output, \
moe::ForwardOptions const&, moe::Stream<Space>, moe::NoProbe&);
template void ${layer}::run<float, moe::NoProbe>(Hidden, moe::Rows<float const>, Output, moe::ForwardOptions const&, \
moe::Stream<Space>, moe::NoProbe&);
template ${runner}::Runner(Comm&, typename Layer::Weights const&, Params const&);
template ${runner}::~Runner();
template void ${runner}::abandon(moe::Stream<Space>);
template void ${runner}::run<typename ${runner}::InnerLogits, moe::NoProbe>(moe::Rows<Act const>, InnerLogits const&, \
moe::Rows<Act>, moe::ForwardOptions const&, moe::Stream<Space>, moe::NoProbe&);
template void ${runner}::run<typename ${runner}::CallerRows, moe::NoProbe>(moe::Rows<Act const>, CallerRows const&, \
moe::Rows<Act>, moe::ForwardOptions const&, moe::Stream<Space>, moe::NoProbe&);
" PARENT_SCOPE)
endfunction()

# _moe_preset_exchange(text model quantization type backend): the exchange whose templates need nvcc.
function(_moe_preset_exchange text model quantization type backend)
  set(layer "typename moe::models::PresetLayer<${model}, ${quantization}, ${type}>")
  set(tail "${layer}::Config, ${layer}::RowQuant, ${layer}::Kernel::Output")
  if(backend STREQUAL "no_expert_parallel")
    set(${text} "template class moe::backends::detail::LocalExchange<moe::space::cuda, ${tail}>;\n" PARENT_SCOPE)
  else()
    set(${text} "template class moe::backends::detail::AllToAllVExchange<moe::comm::Nccl, ${tail}, moe::space::cuda>;\n" PARENT_SCOPE)
  endif()
endfunction()

# _moe_preset_fixed(text model quantizations): the kernels of low_latency at the model's sizes, for rows as the quantisations send them.
# CMake must know which of them send the same rows, since a kernel is instantiated once: fp8_block128 and those named …_fp8 send fp8, all
# others that such an exchange carries send bf16. The C++ compiler checks it.
function(_moe_preset_fixed text model quantizations)
  set(config "moe::models::PresetConfig<${model}, moe::space::cuda>")
  _moe_preset_backend(backend headers kernels cuda low_latency)
  set(instantiations)
  set(checks)
  foreach(quantization IN LISTS quantizations)
    set(fp8 false)
    if(quantization MATCHES "^fp8_block128$|_fp8$")
      set(fp8 true)
    endif()
    _moe_preset_quantization(type header kernels ${quantization})
    set(rows "moe::models::PresetLayer<${model}, ${type}, ${backend}>::RowQuant")
    string(APPEND checks "static_assert(${rows}::kQuantizesActivations == ${fp8},
              \"moe: cmake/MoePresetLibrary.cmake: ${quantization} was taken for fp8 rows (${fp8}), wrongly\");\n")
    list(APPEND instantiations "template moe::detail::LowLatencyFixed const& moe::detail::low_latency_fixed<${config}, ${fp8}>()|")
  endforeach()
  list(REMOVE_DUPLICATES instantiations)
  list(JOIN instantiations "\n" instantiations)
  string(REPLACE "|" ";" instantiations "${instantiations}")
  set(${text} "${checks}${instantiations}\n" PARENT_SCOPE)
endfunction()

# _moe_preset_catalog(result): the models of models/catalog.hpp, with their namespace.
function(_moe_preset_catalog result)
  get_target_property(folders moe::moe INTERFACE_INCLUDE_DIRECTORIES)
  set(text)
  foreach(folder IN LISTS folders)
    string(REGEX REPLACE "^[$]<BUILD_INTERFACE:(.*)>$" "\\1" folder "${folder}")
    if(EXISTS ${folder}/moe/models/catalog.hpp)
      file(READ ${folder}/moe/models/catalog.hpp text)
    endif()
  endforeach()
  if(NOT text MATCHES "tuple_t<([^>]+)>")
    message(FATAL_ERROR "cmake/MoePresetLibrary.cmake: no moe/models/catalog.hpp with a list tuple_t<…> in ${folders}")
  endif()
  string(REGEX MATCHALL "[A-Za-z0-9_]+" models "${CMAKE_MATCH_1}")
  list(TRANSFORM models PREPEND "moe::models::")
  set(${result} ${models} PARENT_SCOPE)
endfunction()

# _moe_preset_known(what keyword known values...): an error for a value that is not in the list that is called `known`.
function(_moe_preset_known what keyword known)
  foreach(value IN LISTS ARGN)
    if(NOT value IN_LIST ${known})
      list(JOIN ${known} " " all)
      message(FATAL_ERROR "${what}: ${keyword} ${value} is not known, known: ${all}")
    endif()
  endforeach()
endfunction()

function(moe_add_preset_library name model space quantizations backends phases user_headers)
  _moe_preset_lists()
  set(what "moe_add_model_library(${name} MODEL ${model})")
  if(NOT space)
    set(space host)
  endif()
  if(NOT backends)
    set(backends no_expert_parallel)
  endif()
  if(NOT phases)
    set(phases ${MOE_PRESET_PHASES})
  endif()
  # A model of the project is a struct of its own headers.
  _moe_preset_catalog(catalog)
  if(NOT model IN_LIST catalog AND (NOT user_headers OR model MATCHES "^moe::models::"))
    list(JOIN catalog " " all)
    message(FATAL_ERROR "${what}: MODEL ${model} is not known, known: ${all}; a struct of your own needs HEADERS that declare it")
  endif()
  _moe_preset_known("${what}" SPACE MOE_PRESET_SPACES ${space})
  _moe_preset_known("${what}" PHASES MOE_PRESET_PHASES ${phases})
  _moe_preset_known("${what}" BACKENDS MOE_PRESET_BACKENDS ${backends})
  _moe_preset_known("${what}" QUANTIZATIONS MOE_PRESET_QUANTIZATIONS ${quantizations})
  _moe_refuse_twice("${what}" PHASES ${phases})
  _moe_refuse_twice("${what}" BACKENDS ${backends})
  _moe_refuse_twice("${what}" QUANTIZATIONS ${quantizations})
  if(space STREQUAL "cuda")
    moe_expect_cuda_language("${what}: SPACE cuda")
    if(NOT (TARGET moe::cublas AND TARGET MoeToolkit::cublas))
      message(FATAL_ERROR "${what}: SPACE cuda needs the component cublas of moe (gates and shared experts)")
    endif()
  endif()
  # An installed package has targets whose dependencies only a component finds.
  if(space STREQUAL "host" AND NOT TARGET MoeOneDnn::dnnl)
    message(FATAL_ERROR "${what}: SPACE host needs the component onednn of moe")
  endif()
  string(REGEX REPLACE "^.*::" "" short "${model}")
  set(preset_default OFF)
  if(NOT quantizations)
    set(preset_default ON)
    set(quantizations none)
    foreach(scheme fp8_block128 mxfp4_w4a16)
      if(short IN_LIST MOE_PRESET_${scheme} AND model STREQUAL "moe::models::${short}")
        set(quantizations ${scheme})
      endif()
    endforeach()
  endif()
  foreach(backend IN LISTS backends)
    if(space STREQUAL "cuda" AND NOT backend STREQUAL "no_expert_parallel" AND NOT TARGET MoeToolkit::nccl)
      message(FATAL_ERROR "${what}: ${backend} needs NCCL, which this toolkit lacks")
    endif()
    if(space STREQUAL "host" AND NOT backend STREQUAL "no_expert_parallel" AND NOT TARGET MPI::MPI_CXX)
      message(FATAL_ERROR "${what}: ${backend} needs the component mpi of moe")
    endif()
    foreach(quantization IN LISTS quantizations)
      if(space STREQUAL "cuda" AND backend MATCHES "^(low_latency|high_throughput)$" AND quantization IN_LIST MOE_PRESET_NOT_OVER_WINDOWS)
        set(carried ${MOE_PRESET_QUANTIZATIONS})
        list(REMOVE_ITEM carried ${MOE_PRESET_NOT_OVER_WINDOWS})
        list(JOIN carried " " carried)
        message(FATAL_ERROR "${what}: BACKENDS ${backend} cannot carry QUANTIZATIONS ${quantization} in SPACE cuda, it carries: "
                            "${carried}. Others need a library of their own with no_expert_parallel or all_to_all_v")
      endif()
    endforeach()
  endforeach()

  set(headers moe/models/catalog.hpp moe/models/preset_${space}.hpp ${user_headers})
  set(kernel_headers moe/routing/device/route.cuh)
  set(hopper)
  foreach(backend IN LISTS backends)
    _moe_preset_backend(type more kernels ${space} ${backend})
    list(APPEND headers ${more})
    list(APPEND kernel_headers ${kernels})
  endforeach()
  foreach(quantization IN LISTS quantizations)
    _moe_preset_quantization(type header kernels ${quantization})
    list(APPEND headers ${header})
    list(APPEND hopper ${kernels})
  endforeach()
  list(REMOVE_DUPLICATES headers)
  list(REMOVE_DUPLICATES hopper)
  list(TRANSFORM headers REPLACE "(.+)" "#include <\\1>\n" OUTPUT_VARIABLE includes)
  list(JOIN includes "" includes)

  set(folder ${CMAKE_CURRENT_BINARY_DIR}/${name})
  set(declarations)
  set(names)
  set(runners)
  set(sources)
  set(exchanges)
  foreach(backend IN LISTS backends)
    _moe_preset_backend(backend_type more kernels ${space} ${backend})
    foreach(quantization IN LISTS quantizations)
      _moe_preset_quantization(quant_type header ignored ${quantization})
      _moe_preset_instantiations(instantiations ${model} ${quant_type} ${backend_type})
      set(source ${folder}/${name}_${backend}_${quantization}.cpp)
      file(CONFIGURE OUTPUT ${source} CONTENT "${includes}${instantiations}" @ONLY)
      list(APPEND sources ${source})
      string(REGEX REPLACE "(^|\n)template " "\\1extern template " instantiations "${instantiations}")
      string(APPEND declarations "${instantiations}")
      set(runner "moe::models::PresetRunner<${model}, ${quant_type}, ${backend_type}>")
      list(APPEND runners "${runner}")
      string(APPEND names "namespace ${backend}::${quantization} {\n")
      foreach(phase IN LISTS phases)
        string(APPEND names "using ${phase} = ${runner};\n")
      endforeach()
      string(APPEND names "}  // namespace ${backend}::${quantization}\n")
      if(kernels)
        _moe_preset_exchange(exchange ${model} ${quant_type} ${backend_type} ${backend})
        string(APPEND exchanges "${exchange}")
      endif()
    endforeach()
  endforeach()
  list(JOIN runners ", " runners)
  foreach(phase IN LISTS phases)
    string(APPEND names "using ${phase} = moe::models::ChosenRunner<${model}, moe::models::Phase::${phase}, ${runners}>;\n")
  endforeach()
  if(preset_default AND model MATCHES "^moe::models::")
    _moe_preset_quantization(quant_type header ignored ${quantizations})
    string(APPEND names "static_assert(std::is_same_v<moe::models::PresetChoice<${model}>::Quantization, ${quant_type}>,
              \"moe: cmake/MoePresetLibrary.cmake and models/preset_choice.hpp state different quantisations\");\n")
  endif()
  file(CONFIGURE OUTPUT ${folder}/include/${name}.hpp CONTENT "// ${name}.hpp: generated; blocks of ${model}, instantiated in the library \
${name}.\n#pragma once\n${includes}\nnamespace ${name} {\n${names}}  // namespace ${name}\n\n${declarations}" @ONLY)

  if(space STREQUAL "cuda")
    list(TRANSFORM kernel_headers REPLACE "(.+)" "#include <\\1>\n" OUTPUT_VARIABLE kernel_includes)
    list(JOIN kernel_includes "" kernel_includes)
    set(router "moe::models::PresetRouter<${model}, moe::space::cuda>")
    if("low_latency" IN_LIST backends)
      string(APPEND kernel_includes "#include <moe/backends/window/device/low_latency/fixed.cuh>\n")
      _moe_preset_fixed(fixed ${model} "${quantizations}")
      string(APPEND exchanges "${fixed}")
    endif()
    set(source ${folder}/${name}_kernels.cu)
    file(CONFIGURE OUTPUT ${source} CONTENT "${includes}${kernel_includes}
using PresetRows = moe::routing::RowRouter<typename ${router}::Config>;
template void moe::routing::RowRouter<typename ${router}::Config>::select<float>(RouteArgs<float> const&, Stream<space::cuda>) const;
template void moe::routing::route_fused(PresetRows const&, FusedRouting<float> const&, Stream<space::cuda>);
template void moe::routing::take_routing(${router} const&, CallerRouting const&, Stream<space::cuda>);
${exchanges}" @ONLY)
    list(APPEND sources ${source})
  endif()

  add_library(${name} STATIC ${sources})
  set_target_properties(${name} PROPERTIES POSITION_INDEPENDENT_CODE ON)
  target_include_directories(${name} PUBLIC ${folder}/include)
  if(space STREQUAL "cuda")
    _moe_preset_kernels(kernels "${hopper}" "${backends}")
    target_link_libraries(${name} PUBLIC moe::cublas ${kernels})
    moe_cuda_architectures(${name} HOPPER)
  else()
    target_link_libraries(${name} PUBLIC moe::onednn)
    if(TARGET MPI::MPI_CXX)
      target_link_libraries(${name} PUBLIC moe::mpi)
    endif()
  endif()
  if(TARGET nlohmann_json::nlohmann_json)  # moe::load_runner()
    target_link_libraries(${name} PUBLIC moe::io)
  endif()
  _moe_c_definitions(${name})
endfunction()
