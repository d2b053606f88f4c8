// SPDX-License-Identifier: Apache-2.0
// tests/gpu/comm_exchange_self_test.cu: Naive, AllGatherReduceScatter and AllToAllV on the device over the communicator of one rank: the
// kernels of the exchanges between GPUs, where there is one GPU and no NCCL.
#include "moe/comm/self.hpp"
#include "moe/quantization/fp8_group128.hpp"
#include "tests/comm_exchange_harness.cuh"

namespace {

using namespace moe_test;
using moe::ErrorCode;
using Self = moe::comm::Self<moe::space::cuda>;

template <class Backend>
class SelfExchange : public testing::Test {
 public:
  Self comm;
};
using Backends = testing::Types<moe::backends::Naive<Self>, moe::backends::AllGatherReduceScatter<Self>, moe::backends::AllToAllV<Self>>;
TYPED_TEST_SUITE(SelfExchange, Backends);

TYPED_TEST(SelfExchange, T1_T2_T19_RoundTrips) {
  for (Sizes sizes : {Sizes::exact, Sizes::fixed}) {
    for (moe::PlacementStrategy strategy : {moe::PlacementStrategy::linear, moe::PlacementStrategy::round_robin}) {
      DeviceHarness<TypeParam> h(this->comm,
                                 {.hidden = 20, .num_experts = 9, .k = 4, .max_tokens = 40, .strategy = strategy, .sizes = sizes});
      for (int round = 0; round < 6; ++round) {
        std::int64_t const rows = round == 0 ? 0 : random_rows(0, round, 40);
        auto b = random_batch<float>(0, round, rows, 20, 4, 9);
        for (std::size_t i = 0; round == 3 && i < b.ids.size(); ++i) b.ids[i] = i % 8 < 4 ? -1 : b.ids[i - i % 4];
        h.check(b, moe::text("round ", round, sizes == Sizes::fixed ? ", fixed" : ", exact"));
      }
    }
  }
}

TYPED_TEST(SelfExchange, T6_QuantisedRows) {
  using moe::bf16;
  using Quant = moe::quantization::Fp8Group<>;
  for (Sizes sizes : {Sizes::exact, Sizes::fixed}) {
    DeviceHarness<TypeParam, bf16, Quant, bf16> h(this->comm, {.hidden = 256, .max_tokens = 16, .sizes = sizes});
    auto b = random_batch<bf16>(0, 1, 16, 256, 3, 7);
    auto const out = h.forward(b);
    std::vector<std::uint8_t> codes(256);
    std::vector<float> scales(2), row(256);
    for (std::int64_t t = 0; t < b.rows; ++t) {
      Quant const quant{};
      typename Quant::Payload<bf16> payload[256];
      quant.quantize_row<bf16>(b.x.data() + t * 256, 256, payload, scales.data());
      quant.dequantize_row<bf16>(payload, scales.data(), 256, row.data());
      for (std::int64_t i = 0; i < 256; ++i)
        b.x[static_cast<std::size_t>(t * 256 + i)] = moe::from_float<bf16>(row[static_cast<std::size_t>(i)]);
    }
    double error = 0, norm = 0;
    for (std::int64_t t = 0; t < b.rows; ++t) {
      for (std::int64_t i = 0; i < 256; ++i) {
        double const want = b.expected(t, i, 7);
        error += std::pow(moe::to_float(out[static_cast<std::size_t>(t * 256 + i)]) - want, 2);
        norm += want * want;
      }
    }
    EXPECT_LT(std::sqrt(error / norm), 4e-3);  // two roundings to bf16
  }
}

TYPED_TEST(SelfExchange, T4_T12_T21_Refusals) {
  for (Sizes sizes : {Sizes::exact, Sizes::fixed}) {
    DeviceHarness<TypeParam> h(this->comm, {.sizes = sizes});
    auto const good = random_batch<float>(0, 1, 8, 32, 3, 7);
    expect_error(ErrorCode::capacity, [&] { h.forward(random_batch<float>(0, 1, 9, 32, 3, 7)); });
    expect_error(ErrorCode::state, [&] { h.exchange().finalize(h.output(8), h.stream()); });
    auto const in = h.upload(good);
    h.run_experts(h.exchange().prepare(in, h.stream()));
    expect_error(ErrorCode::state, [&] { h.exchange().prepare(in, h.stream()); });
    expect_error(ErrorCode::argument, [&] { h.exchange().finalize(h.output(7), h.stream()); });
    h.check(good, "after the refusals");
  }
}

TYPED_TEST(SelfExchange, T9_GraphReplays) {
  DeviceHarness<TypeParam> h(this->comm, {.sizes = Sizes::fixed});
  expect_graph_replays(h, 0);
}

}  // namespace
