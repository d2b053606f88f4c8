// SPDX-License-Identifier: Apache-2.0
// examples/moe/cuda/run_cuda.cpp: `--device cuda`: from the names of the policies to a composition that this program holds.
#include <type_traits>

#include "examples/moe/cuda/run_device.hpp"

namespace moe_tool {

using moe::experts::CudaReference;
using moe::experts::HopperContiguous;
namespace quantization = moe::quantization;

extern template JobResult run_device<quantization::None, CudaReference>(Job const&);
extern template JobResult run_device<quantization::None, HopperContiguous>(Job const&);
extern template JobResult run_device<quantization::Fp8PerTensor<>, HopperContiguous>(Job const&);
extern template JobResult run_device<quantization::Fp8PerToken<>, HopperContiguous>(Job const&);
extern template JobResult run_device<quantization::Fp8Block<>, HopperContiguous>(Job const&);

namespace {

/// The compositions that are compiled into this program.
template <class Quant, class Experts>
constexpr bool built() {
  if constexpr (std::is_same_v<Experts, HopperContiguous>) {
    return Experts::template supports_quantization<Quant>();
  } else {
    return std::is_same_v<Experts, CudaReference> && std::is_same_v<Quant, quantization::None>;
  }
}

template <class Quant, class Backend, class Experts>
JobResult run_if_built(Job const& job) {
  using Rules = moe::registry::CompositionOf<moe::registry::LayerFor<Experts>, Quant, Backend, Experts>;
  if constexpr (!Rules::kLegal) {
    throw moe::Error(moe::ErrorCode::config, Rules::reason());
  } else if constexpr (built<Quant, Experts>()) {
    return run_device<Quant, Experts>(job);
  } else {
    throw moe::Error(moe::ErrorCode::unsupported,
                     moe::text("--quantization ", Quant::kName, " with --experts ", Experts::kName,
                               ": not built into this program on --device cuda. Use --device host, or none with cuda_reference"));
  }
}

}  // namespace

JobResult run_cuda(Job const& job) {
  if (!moe::has_device()) {
    throw moe::Error(moe::ErrorCode::unsupported, "--device cuda: this machine has no usable GPU; use --device host");
  }
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
