// SPDX-License-Identifier: Apache-2.0
// examples/moe/cuda/run_cuda.cpp: `--device cuda`: from the names of the policies to a composition that this program holds.
#include <mpi.h>

#include <type_traits>

#include "examples/moe/cuda/run_device.hpp"

namespace moe_tool {

using moe::experts::CublasGrouped;
using moe::experts::CudaReference;
using moe::experts::HopperContiguous;
using moe::experts::HopperW4A16;
namespace quantization = moe::quantization;

extern template JobResult run_device<quantization::None, CudaReference>(Job const&);
extern template JobResult run_device<quantization::None, HopperContiguous>(Job const&);
extern template JobResult run_device<quantization::Fp8PerTensor<>, HopperContiguous>(Job const&);
extern template JobResult run_device<quantization::Fp8PerToken<>, HopperContiguous>(Job const&);
extern template JobResult run_device<quantization::Fp8Block<>, HopperContiguous>(Job const&);
extern template JobResult run_device<quantization::Int4Group128, HopperW4A16>(Job const&);
#ifdef MOE_HAS_CUBLAS
extern template JobResult run_device<quantization::None, CublasGrouped>(Job const&);
#endif
extern template JobResult run_over_nccl<quantization::None, CudaReference>(Job const&);
extern template JobResult run_over_nccl<quantization::None, HopperContiguous>(Job const&);
extern template JobResult run_over_nccl<quantization::Fp8Block<>, HopperContiguous>(Job const&);

namespace {

/// The compositions that are compiled into this program.
template <class Quant, class Experts>
constexpr bool built() {
  if constexpr (std::is_same_v<Experts, HopperContiguous>) {
    return Experts::template supports_quantization<Quant>();
  } else if constexpr (std::is_same_v<Experts, HopperW4A16>) {
    return std::is_same_v<Quant, quantization::Int4Group128>;
#ifdef MOE_HAS_CUBLAS
  } else if constexpr (std::is_same_v<Experts, CublasGrouped>) {
    return std::is_same_v<Quant, quantization::None>;
#endif
  } else {
    return std::is_same_v<Experts, CudaReference> && std::is_same_v<Quant, quantization::None>;
  }
}

/// Those that are also there between GPUs.
template <class Quant, class Experts>
constexpr bool built_over_nccl() {
  return built<Quant, Experts>() && !std::is_same_v<Experts, CublasGrouped> &&
         (std::is_same_v<Quant, quantization::None> || std::is_same_v<Quant, quantization::Fp8Block<>>);
}

template <class Quant, class Backend, class Experts>
JobResult run_if_built(Job const& job) {
  using Rules = moe::registry::CompositionOf<moe::registry::LayerFor<Experts>, Quant, Backend, Experts>;
  if constexpr (!Rules::kLegal) {
    throw moe::Error(moe::ErrorCode::config, Rules::reason());
  } else if constexpr (!std::is_same_v<Backend, moe::backends::NoExpertParallel<moe::space::cuda>> && built_over_nccl<Quant, Experts>()) {
    return run_over_nccl<Quant, Experts>(job);
  } else if constexpr (std::is_same_v<Backend, moe::backends::NoExpertParallel<moe::space::cuda>> && built<Quant, Experts>()) {
    return run_device<Quant, Experts>(job);
  } else {
    throw moe::Error(moe::ErrorCode::unsupported,
                     moe::text("--quantization ", Quant::kName, " with --experts ", Experts::kName, " and --backend ", Backend::kName,
                               ": not built into this program on --device cuda. Use --device host, or none with cuda_reference"));
  }
}

/// One GPU a rank: that of the rank's number on its node. Collective.
void choose_device(Job const& job) {
  MPI_Comm node = MPI_COMM_NULL;
  MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &node);
  int rank = 0;
  int ranks = 1;
  MPI_Comm_rank(node, &rank);
  MPI_Comm_size(node, &ranks);
  MPI_Comm_free(&node);
  together(job, [&] {
    if (!moe::has_device()) {
      throw moe::Error(moe::ErrorCode::unsupported, "--device cuda: this machine has no usable GPU; use --device host");
    }
    int devices = 0;
    moe::check_cuda(cudaGetDeviceCount(&devices), "cudaGetDeviceCount");
    if (ranks > devices) {
      throw moe::Error(moe::ErrorCode::unsupported,
                       moe::text("--device cuda: ", ranks, " ranks on one node, which has ", devices, " GPUs; each rank needs its own"));
    }
    moe::check_cuda(cudaSetDevice(rank), "cudaSetDevice");
  });
}

}  // namespace

JobResult run_cuda(Job const& job) {
  choose_device(job);
  JobResult result;
  namespace registry = moe::registry;
  registry::with_policy(registry::cuda_backends, "backend", job.options.backend, [&](auto backend) {
    registry::with_policy(registry::cuda_experts, "experts", job.options.experts, [&](auto experts) {
      registry::with_policy(registry::quantizations, "quantization", job.options.quantization, [&](auto quant) {
        result = run_if_built<typename decltype(quant)::type, typename decltype(backend)::type, typename decltype(experts)::type>(job);
      });
    });
  });
  return result;
}

}  // namespace moe_tool
