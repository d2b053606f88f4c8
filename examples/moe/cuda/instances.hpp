// SPDX-License-Identifier: Apache-2.0
// examples/moe/cuda/instances.hpp: the compositions of the CUDA space that the tool instantiates, what each needs, and the functions that
// run them. Plain C++: a build without CUDA, NCCL or cuBLAS also includes it, to report what is missing.
#pragma once

#include <array>
#include <cstdint>
#include <type_traits>

#include "examples/moe/compositions.hpp"
#include "examples/moe/job.hpp"
#include "moe/models/registry.hpp"

namespace moe_tool {

/// The components that a composition of the tool's list needs. A block on the device has its gate and projections in cuBLAS.
enum class Needs : std::uint8_t { cuda, nccl, own_program };

#ifdef MOE_HAS_CUDA
inline constexpr bool kHasCuda = true;
#else
inline constexpr bool kHasCuda = false;
#endif
#ifdef MOE_HAS_CUBLAS
inline constexpr bool kHasCublas = true;
#else
inline constexpr bool kHasCublas = false;
#endif
#ifdef MOE_HAS_NCCL
inline constexpr bool kHasNccl = true;
#else
inline constexpr bool kHasNccl = false;
#endif
/// Whether this program has what a composition needs.
inline constexpr std::array<bool, 3> kHas{kHasCuda && kHasCublas, kHasCuda && kHasCublas && kHasNccl, false};

/// How to build this program with a composition.
inline char const* what_builds() {
  if (!kHasCuda) {
    return "it was built without CUDA; build the cuda preset (MOE_CUDA=ON)";
  }
  return !kHasCublas ? "it was built without cuBLAS; install cuBLAS (where the CUDA toolkit is) and configure again"
                     : "it was built without NCCL; install NCCL (nccl.h and libnccl, where the CUDA toolkit is) and configure again with "
                       "MOE_NCCL=ON";
}

namespace instances {

using moe::experts::CublasGrouped;
using moe::experts::CudaReference;
using moe::experts::HopperContiguous;
using moe::experts::HopperMasked;
using moe::experts::HopperW4A16;
using moe::experts::HopperW4A8;
using moe::experts::HopperW8A16;
using Inside = moe::experts::Monolithic<CudaReference>;
namespace quantization = moe::quantization;

template <class Type, class... Types>
inline constexpr bool is_one_of = (std::is_same_v<Type, Types> || ...);

/// On one GPU.
template <class Quant, class Experts>
constexpr Needs local() {
  if constexpr (is_one_of<Experts, HopperContiguous, HopperW8A16>) {
    return Experts::template supports_quantization<Quant>() ? Needs::cuda : Needs::own_program;
  } else if constexpr (std::is_same_v<Experts, HopperW4A16>) {
    using quantization::WNa16;
    constexpr bool kBuilt = is_one_of<Quant, WNa16<4, 32>, WNa16<4, 64>, WNa16<4, 128>, WNa16<4, 32, true>, WNa16<4, 64, true>,
                                      WNa16<4, 128, true>, quantization::Mxfp4W4A16<>, quantization::Nvfp4W4A16>;
    return kBuilt ? Needs::cuda : Needs::own_program;
  } else if constexpr (std::is_same_v<Experts, HopperW4A8>) {
    using quantization::Int4Fp8;
    constexpr bool kBuilt = is_one_of<Quant, quantization::Mxfp4Fp8<>, Int4Fp8<32>, Int4Fp8<64>, Int4Fp8<128>, Int4Fp8<32, true>,
                                      Int4Fp8<64, true>, Int4Fp8<128, true>>;
    return kBuilt ? Needs::cuda : Needs::own_program;
  } else if constexpr (std::is_same_v<Experts, CublasGrouped>) {
    return std::is_same_v<Quant, quantization::None> ? Needs::cuda : Needs::own_program;
  } else {
    return is_one_of<Experts, CudaReference, Inside> && is_one_of<Quant, quantization::None> ? Needs::cuda : Needs::own_program;
  }
}

/// Between GPUs: rows as they are and fp8 blocks with the Hopper experts, rows as they are with the reference.
template <class Quant, class Experts>
constexpr Needs between() {
  constexpr bool kHopper =
      is_one_of<Experts, HopperContiguous, HopperMasked> && is_one_of<Quant, quantization::None, quantization::Fp8Block<>>;
  constexpr bool kReference = is_one_of<Experts, CudaReference, Inside> && is_one_of<Quant, quantization::None>;
  return kHopper || kReference ? Needs::nccl : Needs::own_program;
}

}  // namespace instances

/// For a composition that the rules allow.
template <class Quant, class Backend, class Experts>
constexpr Needs instance_needs() {
  if constexpr (std::is_same_v<Backend, moe::backends::NoExpertParallel<moe::space::cuda>>) {
    return instances::local<Quant, Experts>();
  } else {
    return instances::between<Quant, Experts>();
  }
}

/// Selects the GPU with this rank's number on its node. Collective. E_UNSUPPORTED, on every rank, if there is none.
void choose_device(Job const& job);

/// With NoExpertParallel. Each of cuda/*.cpp instantiates it for a few schemes.
template <class Quant, class Experts>
JobResult run_device(Job const& job);
/// With the backend over a communicator that the job names, over NCCL. Collective. Instantiated in cuda/nccl/*.cpp.
template <class Quant, class Experts>
JobResult run_over_nccl(Job const& job);
/// With the backend that the job names, which delivers this format over a window of NCCL's. Collective. Instantiated in
/// cuda/nccl/windows_*.cpp.
template <class Quant, class Experts, moe::ActivationFormat Format>
JobResult run_over_nccl_window(Job const& job);

template <class Quant, class Backend, class Experts>
constexpr Runner cuda_runner() {
  if constexpr (std::is_same_v<Backend, moe::backends::NoExpertParallel<moe::space::cuda>>) {
    return &run_device<Quant, Experts>;
  } else if constexpr (decltype(boost::hana::contains(moe::registry::cuda_window_backends, boost::hana::type_c<Backend>))::value) {
    return &run_over_nccl_window<Quant, Experts, Backend::kFormat>;
  } else {
    return &run_over_nccl<Quant, Experts>;
  }
}

}  // namespace moe_tool
