// SPDX-License-Identifier: Apache-2.0
// tests/mpi/window_layers_test.cpp: every composition of the registry over windows, as whole layers, against one rank that holds
// all experts.
// moe-ranks: 1 2 3 4
#include "moe/backends/window/host/high_throughput.hpp"
#include "moe/backends/window/host/low_latency.hpp"
#include "moe/backends/window/host/one_sided.hpp"
#include "moe/backends/window/host/pplx.hpp"
#include "moe/backends/window/host/two_sided.hpp"
#include "registry_layers.hpp"

namespace {

using namespace moe_test;

/// For backends whose number of experts must be divisible by 1, 2, 3 and 4 ranks.
constexpr Scenario kDivides{.name = "ExpertsDivide", .num_experts = 12, .k = 3, .max_tokens = 7, .rounds = 3};

bool register_window_layers() {
  auto const legal = moe::registry::legal_compositions<RegistryConfig>(moe::registry::sample_quantizations, moe::registry::window_backends,
                                                                       moe::registry::host_experts);
  static_assert(hana::size(legal) == hana::size_c<24>);
  hana::for_each(legal, [](auto triple) {
    using Quant = typename decltype(+triple[hana::size_c<0>])::type;
    using Backend = typename decltype(+triple[hana::size_c<1>])::type;
    using Experts = typename decltype(+triple[hana::size_c<2>])::type;
    std::string const suite = moe::text("Window_", Quant::kName, "_", Backend::kName, "_", Experts::kName);
    auto add = [&](Scenario const& s) {
      testing::RegisterTest(suite.c_str(), s.name, nullptr, nullptr, __FILE__, __LINE__,
                            [s]() -> testing::Test* { return new CompositionTest<Quant, Backend, Experts>(s); });
    };
    if (std::string_view(Backend::kName) == "pplx") {
      add(kDivides);
      return;
    }
    for (Scenario const& s : kScenarios) {
      add(s);
    }
  });
  return true;
}
[[maybe_unused]] bool const registered = register_window_layers();

}  // namespace
