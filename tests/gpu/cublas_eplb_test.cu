// SPDX-License-Identifier: Apache-2.0
// tests/gpu/cublas_eplb_test.cu: experts move between the expert slots of one GPU while layers with cuBLAS's grouped products serve: with
// sizes that the host reads back, and with fixed groups, also in graphs. Other experts: eplb_runtime_hopper_test.cu.
// moe-alone: it links cuBLAS, which the tests beside it do not need
#include <gtest/gtest.h>

#include "moe/backends/collective/device/no_expert_parallel.cuh"
#include "moe/comm/self.hpp"
#include "moe/experts/cublas_grouped.cuh"
#include "moe/quantization/none.hpp"
#include "moe/routing/device/route.cuh"
#include "tests/gpu/eplb_device_serving.hpp"

namespace {

using namespace moe_test;
using Self = comm::Self<space::cuda>;

struct GroupsOf : EplbFixedLayer {
  bool fixed = false;
  template <class Params>
  void set(Params& p) const {
    EplbFixedLayer::set(p);
    p.experts.fixed_groups = fixed;
  }
};

TEST(EplbRuntime, CublasGrouped) {
  Self tokens, weights;
  eplb::SelfGroup group;
  GroupsOf read_back, fixed;
  fixed.fixed = true;
  for (MoveMode mode : {MoveMode::pause, MoveMode::stepwise, MoveMode::background}) {
    auto const serve = [&](GroupsOf const& of, bool graphs) {
      expect_same_while_moving<quantization::None, backends::NoExpertParallel<space::cuda>, experts::CublasGrouped>(tokens, weights, group,
                                                                                                                    mode, graphs, of);
    };
    serve(read_back, false);
    serve(fixed, false);
    serve(fixed, true);
  }
}

}  // namespace
