// SPDX-License-Identifier: Apache-2.0
// tests/mpi/registry_window_blocks_test.cpp: every block file and every MoE layer of the reference checkpoints over windows. All pairs
// would be 6 backends x 2 experts x 2 placements for each: here each file goes through one backend, in turn, with the experts and the
// placement that are paired with it, so that every backend sees every kind of router and every experts kernel and placement sees every file
// kind. window_layers_test.cpp has the products on small layers.
#include <utility>

#include "moe/backends/window/host/high_throughput.hpp"
#include "moe/backends/window/host/low_latency.hpp"
#include "moe/backends/window/host/one_sided.hpp"
#include "moe/backends/window/host/pplx.hpp"
#include "moe/backends/window/host/two_sided.hpp"
#include "registry_blocks.hpp"

namespace {

using namespace moe_test;
/// A backend refuses unsupported cases on all ranks alike: pplx refuses a number of experts that the ranks do not divide, batched backends
/// refuse the router weight on the input with more than one expert per token.
template <class Backend, class Experts>
class WindowBlockTest : public BlockTest<Backend, Experts> {
 public:
  using BlockTest<Backend, Experts>::BlockTest;
  void TestBody() override {
    try {
      BlockTest<Backend, Experts>::TestBody();
    } catch (moe::Error const& e) {
      bool const batched = Backend::kFormat == moe::ActivationFormat::batched;
      bool const pplx = std::string_view(Backend::kName) == "pplx";
      auto const says = [&](char const* words) { return std::string(e.what()).find(words) != std::string::npos; };
      EXPECT_TRUE((pplx && e.code() == moe::ErrorCode::unsupported && says("do not divide by")) ||
                  (batched && e.code() == moe::ErrorCode::argument && says("apply_router_weight_on_input requires topk == 1")))
          << e.what();
    }
  }
};

template <std::size_t Number>
void register_backend(std::vector<Source> const& all) {
  constexpr auto backend = hana::size_c<Number>;
  constexpr auto experts = hana::size_c<Number % decltype(hana::size(moe::registry::host_experts))::value>;
  using Backend = typename decltype(+moe::registry::window_backends[backend])::type;
  using Experts = typename decltype(+moe::registry::host_experts[experts])::type;
  constexpr bool batched = Backend::kFormat == moe::ActivationFormat::batched;
  constexpr auto strategy = batched ? moe::PlacementStrategy::linear : moe::PlacementStrategy::round_robin;
  std::string const suite = moe::text("WindowBlock_", Backend::kName, "_", Experts::kName);
  constexpr std::size_t kBackends = decltype(hana::size(moe::registry::window_backends))::value;
  for (std::size_t i = Number; i < all.size(); i += kBackends) {
    testing::RegisterTest(suite.c_str(), all[i].name.c_str(), nullptr, nullptr, __FILE__, __LINE__,
                          [source = all[i]]() -> testing::Test* { return new WindowBlockTest<Backend, Experts>(source, strategy); });
  }
}

bool register_all() {
  std::vector<Source> const all = sources();
  constexpr std::size_t kBackends = decltype(hana::size(moe::registry::window_backends))::value;
  [&]<std::size_t... Number>(std::index_sequence<Number...>) {
    (register_backend<Number>(all), ...);
  }(std::make_index_sequence<kBackends>{});
  return all.size() >= kBackends;
}
bool const registered = register_all();

TEST(WindowBlock, EveryBackendHasAFile) { EXPECT_TRUE(registered); }

}  // namespace
