// SPDX-License-Identifier: Apache-2.0
// tests/unit/runner_shared_scheme_test.cpp: shared experts in fp8 and with 4-bit weights give the bits of a layer whose rows all choose
// them.
#include <gtest/gtest.h>

#include <vector>

#include "moe/backends/no_expert_parallel.hpp"
#include "moe/experts/reference.hpp"
#include "moe/experts/weights.hpp"
#include "moe/modular_kernel.hpp"
#include "moe/quantization/fp8_block128.hpp"
#include "moe/quantization/fp8_per_token.hpp"
#include "moe/quantization/int4_group128.hpp"
#include "moe/quantization/mxfp4.hpp"
#include "moe/quantization/none.hpp"
#include "moe/routing/any_router.hpp"
#include "moe/runner/host/primitives.hpp"
#include "moe/runner/shared_experts.hpp"
#include "numbers.hpp"

namespace {

using namespace moe;
using moe_test::numbers;
using Host = space::host;
using Experts = experts::Reference<float>;
constexpr int kRows = 5, kHidden = 128, kWidth = 128, kShared = 2;
constexpr float kSize = 0.3F;

template <class Quant>
class SharedScheme : public testing::Test {};
using Schemes = testing::Types<quantization::None, quantization::Fp8Block<>, quantization::Fp8PerToken<>, quantization::Mxfp4W4A16<>,
                               quantization::Int4Group128>;
TYPED_TEST_SUITE(SharedScheme, Schemes);

TYPED_TEST(SharedScheme, EqualsALayer) {
  using Shared = runner::shared::Separate<Experts, float, TypeParam>;
  using Part = typename Shared::template Part<Host, float>;
  using Config = typename Part::LayerConfig;
  experts::WeightStore<Config, TypeParam> store(kShared, kHidden, kWidth, true);
  for (int e = 0; e < kShared; ++e) {
    store.set_expert(e, numbers(10 + e, 2 * kWidth * kHidden, kSize).data(), numbers(20 + e, kHidden * kWidth, kSize).data());
  }
  std::vector<float> const x = numbers(1, kRows * kHidden, kSize);
  Rows<float const> const rows = make_rows(x.data(), kRows, kHidden);

  typename Shared::Params p;
  p.count = kShared;
  p.intermediate = kWidth;
  p.weights = store.view();
  Arena<Host> arena;
  Part part(p, {.hidden = kHidden, .expert_hidden = kHidden, .max_rows = kRows}, arena);
  part.run(rows, {}, {});

  using Layer = ModularKernel<Config, routing::AnyRouter, TypeParam, backends::NoExpertParallel<>, Experts>;
  comm::Self<> self;
  Layer layer(self, store.view(),
              {.shape = {.hidden = kHidden, .intermediate = kWidth, .num_experts = kShared, .topk = kShared},
               .max_tokens_per_rank = kRows,
               .placement = ExpertPlacement(kShared, 1),
               .router = {.num_experts = kShared, .topk = kShared}});
  std::vector<std::int32_t> ids;
  for (int i = 0; i < kRows * kShared; ++i) ids.push_back(i % kShared);
  std::vector<float> const ones(ids.size(), 1.0F);
  std::vector<float> want(x.size());
  layer.forward_routed(rows, make_rows(static_cast<std::int32_t const*>(ids.data()), kRows, kShared),
                       make_rows(ones.data(), kRows, kShared), make_rows(want.data(), kRows, kHidden));
  auto const got = part.output();
  for (int t = 0; t < kRows; ++t) {
    for (int h = 0; h < kHidden; ++h) ASSERT_EQ(got(t, h), want[static_cast<std::size_t>(t * kHidden + h)]) << t << ", " << h;
  }
}

}  // namespace
