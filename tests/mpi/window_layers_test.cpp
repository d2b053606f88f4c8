// SPDX-License-Identifier: Apache-2.0
// tests/mpi/window_layers_test.cpp: whole layers over host windows, against one rank that holds all experts.
// moe-ranks: 1 2 3 4
#include "moe/backends/high_throughput_host.hpp"
#include "moe/backends/low_latency_host.hpp"
#include "moe/backends/one_sided_host.hpp"
#include "moe/backends/pplx_host.hpp"
#include "moe/backends/two_sided_host.hpp"
#include "moe/comm/mpi_shared.hpp"
#include "registry_layers.hpp"

namespace {

using namespace moe_test;
using Window = moe::comm::MpiShared;

constexpr Scenario kDivides{.name = "ExpertsDivide", .num_experts = 12, .k = 3, .max_tokens = 7, .rounds = 3};

bool register_window_layers() {
  constexpr auto backends = hana::tuple_t<moe::backends::LowLatency<Window>, moe::backends::HighThroughput<Window>,
                                          moe::backends::OneSided<Window>, moe::backends::TwoSided<Window>>;
  constexpr auto quants = hana::tuple_t<moe::quantization::None, moe::quantization::Fp8Group<>>;
  auto const legal = moe::registry::legal_compositions<RegistryConfig>(quants, backends, moe::registry::host_experts);
  static_assert(hana::size(legal) == hana::size_c<16>);
  hana::for_each(legal, [](auto triple) {
    using Quant = typename decltype(+triple[hana::size_c<0>])::type;
    using Backend = typename decltype(+triple[hana::size_c<1>])::type;
    using Experts = typename decltype(+triple[hana::size_c<2>])::type;
    std::string const suite = moe::text("Window_", Quant::kName, "_", Backend::kName, "_", Experts::kName);
    for (Scenario const& s : kScenarios) {
      testing::RegisterTest(suite.c_str(), s.name, nullptr, nullptr, __FILE__, __LINE__,
                            [s]() -> testing::Test* { return new CompositionTest<Quant, Backend, Experts>(s); });
    }
  });
  hana::for_each(moe::registry::host_experts, [](auto experts) {
    using Experts = typename decltype(experts)::type;
    testing::RegisterTest(
        moe::text("Window_none_pplx_", Experts::kName).c_str(), kDivides.name, nullptr, nullptr, __FILE__, __LINE__,
        []() -> testing::Test* { return new CompositionTest<moe::quantization::None, moe::backends::Pplx<Window>, Experts>(kDivides); });
  });
  return true;
}
[[maybe_unused]] bool const registered = register_window_layers();

}  // namespace
