// SPDX-License-Identifier: Apache-2.0
// models/registry.hpp: the list of all policies, and what is derived from it: the legal compositions, the tests' matrix, the tool's way
// from names to types. A new policy gets one line here; docs/contributing.md lists what else names it.
#pragma once

#include <boost/hana.hpp>
#include <string>
#include <string_view>
#include <type_traits>

#include "moe/backends/all_to_all_v.hpp"
#include "moe/backends/allgather_reduce_scatter.hpp"
#include "moe/backends/high_throughput.hpp"
#include "moe/backends/low_latency.hpp"
#include "moe/backends/naive.hpp"
#include "moe/backends/no_expert_parallel.hpp"
#include "moe/backends/one_sided.hpp"
#include "moe/backends/pplx.hpp"
#include "moe/backends/two_sided.hpp"
#include "moe/comm/mpi.hpp"
#include "moe/comm/mpi_shared.hpp"
#include "moe/comm/self.hpp"
#include "moe/core/contract/check.hpp"
#include "moe/experts/cublas_grouped.hpp"
#include "moe/experts/cuda_reference.hpp"
#include "moe/experts/hopper_contiguous.hpp"
#include "moe/experts/hopper_masked.hpp"
#include "moe/experts/hopper_w4a16.hpp"
#include "moe/experts/hopper_w4a8.hpp"
#include "moe/experts/hopper_w8a16.hpp"
#include "moe/experts/monolithic.hpp"
#include "moe/experts/onednn.hpp"
#include "moe/experts/reference.hpp"
#include "moe/models/runtime_layer.hpp"
#include "moe/quantization/schemes.hpp"
#include "moe/routing/routers.hpp"

namespace moe::registry {

namespace hana = boost::hana;

using models::RuntimeLayer;

// ---- The policies, each list with its default first.

using routing::GroupScore;
using routing::Renormalize;
using routing::Scoring;
inline constexpr auto routers =
    hana::tuple_t<routing::AnyRouter, routing::SoftmaxTopK<Renormalize::no>, routing::SoftmaxTopK<Renormalize::yes>, routing::TopKSoftmax,
                  routing::SigmoidTopK<Renormalize::no>, routing::SigmoidTopK<Renormalize::yes>,
                  routing::GroupedTopK<Scoring::softmax, GroupScore::max, Renormalize::no>,
                  routing::GroupedTopK<Scoring::sigmoid, GroupScore::top2_sum, Renormalize::yes>,
                  routing::BiasedTopK<Scoring::softmax, Renormalize::yes>, routing::BiasedTopK<Scoring::sigmoid, Renormalize::yes>,
                  routing::BiasedTopK<Scoring::sqrtsoftplus, Renormalize::yes>, routing::HashTopK<Scoring::sqrtsoftplus, Renormalize::yes>,
                  routing::SparseMixer, routing::Llama4, routing::ZeroExpert<Scoring::softmax, Renormalize::no>, routing::External>;

/// The schemes that the tests and the tool pair with every host backend over a communicator.
inline constexpr auto common_quantizations =
    hana::tuple_t<quantization::None, quantization::Fp8PerTensor<>, quantization::Fp8PerToken<>, quantization::Fp8PerChannel<>,
                  quantization::Fp8Group<>, quantization::Fp8Block<>, quantization::Int8PerToken, quantization::Int8PerChannel,
                  quantization::Int4Group128, quantization::WNa16<4, 32>, quantization::Mxfp8<>, quantization::Mxfp4<>,
                  quantization::Mxfp4W4A16<>, quantization::Nvfp4, quantization::Nvfp4W4A16>;
/// Those that store rows or weights as two of these do, in another pair or with other groups. On the host the tests and the tool pair them
/// with sample_backends: every backend copies such rows for the schemes above.
inline constexpr auto further_quantizations =
    hana::tuple_t<quantization::WNa16<4, 64>, quantization::WNa16<4, 32, true>, quantization::WNa16<4, 64, true>,
                  quantization::Int4Group128Zero, quantization::W4A8Fp8, quantization::W4A8<quantization::Fp8Codec<>, 32>,
                  quantization::W4A8Int8, quantization::Mxfp4W4A8<>, quantization::Mxfp4Fp8<>, quantization::Int4Fp8<32>,
                  quantization::Int4Fp8<64>, quantization::Int4Fp8<128>, quantization::Int4Fp8<32, true>, quantization::Int4Fp8<64, true>,
                  quantization::Int4Fp8<128, true>, quantization::Mxfp8W8A16<>>;
inline constexpr auto quantizations = hana::concat(common_quantizations, further_quantizations);

/// Backends over a communicator, and over a window that the ranks of a node map: one list each for both spaces.
template <class Comm>
inline constexpr auto backends_over_comm =
    hana::tuple_t<backends::AllToAllV<Comm>, backends::AllGatherReduceScatter<Comm>, backends::Naive<Comm>>;
template <class Window>
inline constexpr auto backends_over_window =
    hana::tuple_t<backends::LowLatency<Window>, backends::HighThroughput<Window>, backends::OneSided<Window>, backends::TwoSided<Window>,
                  backends::Pplx<Window>, backends::LowLatencyRankMajor<Window>>;

inline constexpr auto host_backends = hana::append(backends_over_comm<comm::Mpi>, hana::type_c<backends::NoExpertParallel<space::host>>);
/// To instantiate one, include backends/window/host/NAME.hpp.
inline constexpr auto window_backends = backends_over_window<comm::MpiShared>;

/// Those of the CUDA space that need no window.
template <class Comm>
inline constexpr auto cuda_backends_over_comm =
    hana::prepend(backends_over_comm<Comm>, hana::type_c<backends::NoExpertParallel<space::cuda>>);

/// Stand-ins for comm::Nccl and comm::NcclSymmetric, which a build may lack: names, facts and rules are the same. To instantiate a layer,
/// use the lists above with the real types.
using DeviceComm = comm::Self<space::cuda>;
class DeviceWindow {
 public:
  using Space = space::cuda;
  using Comm = DeviceComm;
  struct Params {};
  DeviceWindow(Comm&, std::int64_t user_bytes, Params const&);
  int rank() const;
  int size() const;
  void* peer(int rank, std::int64_t offset) const;
  std::int64_t bytes() const;
  comm::WindowView const& view() const;
};
inline constexpr auto cuda_backends = cuda_backends_over_comm<DeviceComm>;
inline constexpr auto cuda_window_backends = backends_over_window<DeviceWindow>;

/// Schemes that the tests and the tool pair with windows of host memory and with experts that route inside: rows as they are, and codes
/// with a scale for each group. Those backends copy rows as bytes, and those experts hand them on, so any other scheme adds compile time
/// but no new case.
inline constexpr auto sample_quantizations = hana::tuple_t<quantization::None, quantization::Fp8Group<>>;
/// The host backends of further_quantizations: the defaults of one rank and of several.
inline constexpr auto sample_backends = hana::tuple_t<backends::NoExpertParallel<space::host>, backends::AllToAllV<comm::Mpi>>;

inline constexpr auto host_experts = hana::tuple_t<experts::OneDnn, experts::Reference<float>>;
inline constexpr auto cuda_experts = hana::tuple_t<experts::CudaReference, experts::CublasGrouped, experts::HopperContiguous,
                                                   experts::HopperMasked, experts::HopperW4A16, experts::HopperW8A16, experts::HopperW4A8>;
/// Experts that route inside (core/contract/monolithic.hpp): the plain ones of each space, so that a run with them has the bits of one with
/// routed rows. Lists of their own: few backends go with them.
inline constexpr auto host_experts_inside = hana::tuple_t<experts::Monolithic<experts::Reference<float>>>;
inline constexpr auto cuda_experts_inside = hana::tuple_t<experts::Monolithic<experts::CudaReference>>;

// ---- Derived.

inline constexpr auto all_host_backends = hana::concat(host_backends, window_backends);
inline constexpr auto all_cuda_backends = hana::concat(cuda_backends, cuda_window_backends);
inline constexpr auto all_backends = hana::concat(all_host_backends, all_cuda_backends);
inline constexpr auto all_experts =
    hana::concat(hana::concat(host_experts, host_experts_inside), hana::concat(cuda_experts, cuda_experts_inside));

/// The layer of run-time dimensions with the widest elements that the backend carries and the experts compute with: float32, else bf16.
template <class Backend, class Experts>
using LayerFor = std::conditional_t<Experts::template supports_element<float, float>() && facts::carries_element<Backend, float>(),
                                    RuntimeLayer<float, float>, RuntimeLayer<bf16, bf16>>;

/// The composition of these policies with the run-time router; kLegal says whether the rules allow it.
template <class Config, class Quant, class Backend, class Experts>
using CompositionOf = Composition<Config, routing::AnyRouter, Quant, Backend, Experts>;

/// All (quantization, backend, experts) triples of two lists that the rules allow, as a tuple of hana::tuple<type, type, type>.
template <class Config, class Quants, class Backends, class ExpertsList>
constexpr auto legal_compositions(Quants quants, Backends backends, ExpertsList experts) {
  return hana::filter(hana::cartesian_product(hana::make_tuple(quants, backends, experts)), [](auto triple) {
    using Quant = typename decltype(+triple[hana::size_c<0>])::type;
    using Backend = typename decltype(+triple[hana::size_c<1>])::type;
    using Experts = typename decltype(+triple[hana::size_c<2>])::type;
    return hana::bool_c<CompositionOf<Config, Quant, Backend, Experts>::kLegal>;
  });
}

/// Whether a list has a policy of that name.
template <class List>
bool has_name(List list, std::string_view wanted) {
  bool found = false;
  hana::for_each(list, [&](auto type) { found = found || wanted == decltype(type)::type::kName; });
  return found;
}

/// "a, b, c": the names of a list of policies, each once.
template <class List>
std::string names(List list) {
  std::string out;
  hana::for_each(list, [&](auto type) {
    std::string const one = decltype(type)::type::kName;
    if ((", " + out + ", ").find(", " + one + ", ") == std::string::npos) {
      out += (out.empty() ? "" : ", ") + one;
    }
  });
  return out;
}

/// Calls f(hana::type<P>) for the policy of that name. E_CONFIG listing the names if there is none; `what` is "backend", …
template <class List, class F>
void with_policy(List list, char const* what, std::string_view wanted, F&& f) {
  bool found = false;
  hana::for_each(list, [&](auto type) {
    if (!found && wanted == decltype(type)::type::kName) {
      found = true;
      f(type);
    }
  });
  if (!found) {
    throw Error(ErrorCode::config, text("unknown ", what, " \"", wanted, "\"; known: ", names(list)));
  }
}

/// What the parallel configuration needs to know of the backend of that name. E_CONFIG listing the names on any other.
inline BackendFacts backend_facts(std::string_view name) {
  BackendFacts facts;
  with_policy(all_backends, "backend", name, [&](auto type) { facts = decltype(type)::type::kFacts; });
  return facts;
}

}  // namespace moe::registry
