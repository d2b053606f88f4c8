// SPDX-License-Identifier: Apache-2.0
// tests/gpu/eplb_one_gpu.hpp: layers on one GPU whose experts move in every mode, with and without graphs.
#pragma once

#include "moe/backends/no_expert_parallel.hpp"
#include "moe/comm/self.hpp"
#include "tests/gpu/eplb_device_serving.hpp"

namespace moe_test {

/// Of: the layers, as EplbFixedLayer.
template <class Of, class Quant, class Experts, class Backend = backends::NoExpertParallel<space::cuda>>
void on_one_gpu() {
  comm::Self<space::cuda> tokens, weights;
  eplb::SelfGroup group;
  for (MoveMode mode : {MoveMode::pause, MoveMode::stepwise, MoveMode::background}) {
    for (bool graphs : {false, true}) {
      expect_same_while_moving<Quant, Backend, Experts>(tokens, weights, group, mode, graphs, Of{});
    }
  }
}

}  // namespace moe_test
