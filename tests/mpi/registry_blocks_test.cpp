// SPDX-License-Identifier: Apache-2.0
// tests/mpi/registry_blocks_test.cpp: every block file and every MoE layer of the reference checkpoints, through every host composition
// over a communicator without quantisation, both placements. Those over windows are in registry_window_blocks_test.cpp.
#include "registry_blocks.hpp"

namespace {

using namespace moe_test;

bool register_all() {
  using Config = moe::registry::RuntimeLayer<float, float>;
  std::vector<Source> const all = sources();
  auto const legal =
      moe::registry::legal_compositions<Config>(hana::tuple_t<None>, moe::registry::host_backends, moe::registry::host_experts);
  hana::for_each(legal, [&](auto triple) {
    using Backend = typename decltype(+triple[hana::size_c<1>])::type;
    using Experts = typename decltype(+triple[hana::size_c<2>])::type;
    std::string const suite = moe::text("Block_", Backend::kName, "_", Experts::kName);
    for (auto strategy : {moe::PlacementStrategy::linear, moe::PlacementStrategy::round_robin}) {
      if (std::is_same_v<typename Backend::Comm, moe::comm::Self<>> && strategy != moe::PlacementStrategy::linear) continue;
      for (Source const& source : all) {
        testing::RegisterTest(suite.c_str(), moe::text(source.name, "_", moe::name(strategy)).c_str(), nullptr, nullptr, __FILE__, __LINE__,
                              [=]() -> testing::Test* { return new BlockTest<Backend, Experts>(source, strategy); });
      }
    }
  });
  return !all.empty();
}
bool const registered = register_all();

TEST(Block, ThereAreFilesOfEveryFamilyThatIsCovered) {
  EXPECT_TRUE(registered);
  for (char const* family : {"mixtral", "qwen2_moe", "qwen3_moe", "qwen3_next", "olmoe", "deepseek_v2", "deepseek_v3",
                             "qwen3_moe_tiny_layer", "deepseek_v3_tiny_layer", "aria_e8k3", "aria_tiny_layer"}) {
    auto const all = sources();
    EXPECT_TRUE(std::any_of(all.begin(), all.end(), [&](Source const& s) { return s.name.starts_with(family); })) << family;
  }
}

}  // namespace
