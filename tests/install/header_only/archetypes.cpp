// SPDX-License-Identifier: Apache-2.0
// tests/install/header_only/archetypes.cpp: a layer of the installed archetypes, with a router of the user's own.
#include <moe/archetypes.hpp>

struct MyRouter : moe::archetypes::ArchetypeRouter<> {
  static constexpr char const* kName = "mine";
  using ArchetypeRouter::ArchetypeRouter;
};
using Layer = moe::ModularKernel<moe::archetypes::Tiny, MyRouter, moe::archetypes::ArchetypeQuantization<>,
                                 moe::archetypes::ArchetypeBackend<>, moe::archetypes::ArchetypeExperts<>>;

int main() {
  moe::comm::Self<> self;
  Layer layer(self, {}, {.max_tokens_per_rank = 1, .placement = moe::ExpertPlacement(4, 1)});
  float const hidden[64] = {1.0F}, logits[4] = {};
  float output[64] = {};
  layer.forward(moe::make_rows<64>(hidden, 1, 64), moe::make_rows(logits, 1, 4), moe::make_rows<64>(output, 1, 64));
  return output[0] == 1.0F ? 0 : 1;
}
