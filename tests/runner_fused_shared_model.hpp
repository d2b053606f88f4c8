// SPDX-License-Identifier: Apache-2.0
// tests/runner_fused_shared_model.hpp: what tests of shared experts as further experts of a layer compare with, in either space.
#pragma once

#include <cstdint>
#include <vector>

#include "runner_grid_model.hpp"

namespace moe_test::grid {

inline constexpr int kFused = 2;  ///< shared experts: experts kExperts, kExperts + 1 of the model
inline constexpr float kFusedWeight = 0.75F;

/// The model's block on one rank in the host space, with the shared experts as a sum beside the layer.
inline std::vector<float> fused_beside(Model const& m, std::vector<float> const& x) {
  struct HostFused : RunnerDefaults {
    using Gate = runner::gate::Linear<float>;
    using Shared = runner::shared::Separate<experts::Reference<float>>;
  };
  using R = Runner<HostLayer<backends::NoExpertParallel<>>, HostFused>;
  ExpertPlacement const placement(kExperts, 1);
  HostStore const store = experts_of<HostStore>(m, placement, 0, 0, 1);
  HostStore shared(kFused, m.hidden, kIntermediate, true);
  for (int i = 0; i < kFused; ++i) {
    std::vector<float> w2 = m.w2(kExperts + i);
    for (float& w : w2) w *= kFusedWeight;
    shared.set_expert(i, m.w13(kExperts + i).data(), w2.data());
  }
  std::vector<float> const gate = bf16_numbers(1, kExperts * m.hidden);
  typename R::Params p{.layer = {.shape = {.hidden = m.hidden, .intermediate = kIntermediate, .num_experts = kExperts, .topk = kTopK},
                                 .max_tokens_per_rank = kMost,
                                 .placement = placement,
                                 .router = {.num_experts = kExperts, .topk = kTopK}}};
  p.gate.weight = make_rows(gate.data(), kExperts, m.hidden);
  auto const view = shared.view();
  p.shared.count = kFused;
  p.shared.intermediate = kIntermediate;
  p.shared.weights.w13 = view.w13;
  p.shared.weights.w2 = view.w2;
  comm::Self<> self;
  R runner(self, store.view(), p);
  std::vector<float> out(x.size());
  auto const rows = static_cast<std::int64_t>(x.size()) / m.hidden;
  runner.forward(make_rows(x.data(), rows, m.hidden), make_rows(out.data(), rows, m.hidden));
  return out;
}

}  // namespace moe_test::grid
