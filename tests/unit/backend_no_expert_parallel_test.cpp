// SPDX-License-Identifier: Apache-2.0
// tests/unit/backend_no_expert_parallel_test.cpp: the exchange of one rank, and its communicator.
#include "moe/backends/no_expert_parallel.hpp"

#include <gtest/gtest.h>

#include <array>
#include <limits>
#include <random>
#include <vector>

#include "expect_error.hpp"
#include "moe/core/contract/concepts.hpp"
#include "moe/quantization/fp8_group128.hpp"
#include "moe/quantization/none.hpp"

namespace {

using moe::ErrorCode;
using moe::kNoExpert;
using moe_test::expect_error;
using Quant = moe::quantization::None;
using Backend = moe::backends::NoExpertParallel<>;

struct AnyActivation {};
template <class T>
struct Config : moe::LayerDefaults {
  using Act = T;
  using Activation = AnyActivation;
};

static_assert(moe::Communicator<moe::comm::Self<>>);
static_assert(moe::PrepareAndFinalize<Backend>);
static_assert(moe::PrepareAndFinalize<moe::backends::NoExpertParallel<moe::space::cuda>>);
static_assert(moe::ExchangeOf<Backend::Exchange<Config<float>, Quant, float>, Config<float>>);

/// A layer's exchange and the arrays of one call.
template <class Act, class Q = Quant>
struct Fixture {
  using Exchange = Backend::Exchange<Config<Act>, Q, float>;

  Fixture(std::int64_t hidden, int num_experts, int topk, std::int64_t max_tokens)
      : hidden_size(hidden),
        k(topk),
        exchange(comm, moe::Shape<Config<Act>>({hidden, 8, num_experts, topk}), max_tokens, moe::ExpertPlacement(num_experts, 1), Q{}, {},
                 arena) {
    arena.seal();
  }
  void resize(std::int64_t m) {
    rows = m;
    x.resize(static_cast<std::size_t>(m * hidden_size));
    out.assign(static_cast<std::size_t>(m * hidden_size), moe::from_float<Act>(-7.0F));
    ids.resize(static_cast<std::size_t>(m * k));
    weights.resize(static_cast<std::size_t>(m * k));
  }
  auto prepare() {
    return exchange.prepare({moe::make_rows(static_cast<Act const*>(x.data()), rows, hidden_size),
                             moe::make_rows(static_cast<std::int32_t const*>(ids.data()), rows, k),
                             moe::make_rows(static_cast<float const*>(weights.data()), rows, k)},
                            {});
  }
  auto finalize() { exchange.finalize(moe::make_rows(out.data(), rows, hidden_size), {}); }

  std::int64_t hidden_size;
  std::int64_t k;
  std::int64_t rows = 0;
  moe::comm::Self<> comm;
  moe::Arena<moe::space::host> arena;
  Exchange exchange;
  std::vector<Act> x, out;
  std::vector<std::int32_t> ids;
  std::vector<float> weights;
};

TEST(NoExpertParallel, T1_IdentityExperts) {
  Fixture<moe::bf16> f(96, 6, 3, 40);
  std::mt19937 gen(1);
  std::uniform_real_distribution<float> value(-2, 2);
  for (int m : {40, 0, 1, 17}) {
    f.resize(m);
    for (auto& v : f.x) v = moe::from_float<moe::bf16>(value(gen));
    for (auto& v : f.weights) v = value(gen);
    for (auto& v : f.ids) v = static_cast<std::int32_t>(gen() % 7) - 1;
    auto const tokens = f.prepare();
    ASSERT_EQ(tokens.rows.extent(0), m);
    ASSERT_EQ(tokens.scales.extent(1), 0);
    auto y = f.exchange.expert_output();
    std::vector<float> expected;
    for (std::int64_t t = 0; t < m; ++t) {
      float sum = 0;
      for (std::int64_t j = 0; j < 3; ++j) sum += tokens.topk_ids(t, j) >= 0 ? tokens.topk_weights(t, j) : 0;
      for (std::int64_t h = 0; h < 96; ++h) {
        y(t, h) = sum * moe::to_float(tokens.rows(t, h));
        expected.push_back(moe::to_float(moe::from_float<moe::bf16>(sum * moe::to_float(f.x[static_cast<std::size_t>(t * 96 + h)]))));
      }
    }
    f.finalize();
    for (std::size_t i = 0; i < expected.size(); ++i) ASSERT_EQ(moe::to_float(f.out[i]), expected[i]) << i;
  }
}

TEST(NoExpertParallel, T4_CapacityThenNextCall) {
  Fixture<float> f(16, 4, 2, 3);
  f.resize(4);
  expect_error(ErrorCode::capacity, [&] { f.prepare(); });
  f.resize(3);
  f.prepare();
  f.exchange.expert_output()(2, 15) = 5;
  f.finalize();
  EXPECT_EQ(f.out.back(), 5);
}

TEST(NoExpertParallel, T6_QuantisedRowsAreThoseOfTheScheme) {
  using Fp8 = moe::quantization::Fp8Group<>;
  Fixture<float, Fp8> f(300, 4, 2, 5);
  f.resize(5);
  for (std::size_t i = 0; i < f.x.size(); ++i) f.x[i] = static_cast<float>(i % 97) - 40.25F;
  auto const tokens = f.prepare();
  ASSERT_EQ(tokens.rows.extent(1), Fp8::payload_cols(300));
  ASSERT_EQ(tokens.scales.extent(1), Fp8::scale_cols(300));
  std::vector<Fp8::Payload<float>> codes(static_cast<std::size_t>(Fp8::payload_cols(300)));
  std::vector<Fp8::Scale> scales(static_cast<std::size_t>(Fp8::scale_cols(300)));
  for (std::int64_t t = 0; t < 5; ++t) {
    Fp8{}.quantize_row<float>(f.x.data() + t * 300, 300, codes.data(), scales.data());
    EXPECT_EQ(std::memcmp(codes.data(), moe::row_ptr(tokens.rows, t), codes.size() * sizeof(codes[0])), 0);
    EXPECT_EQ(std::memcmp(scales.data(), moe::row_ptr(tokens.scales, t), scales.size() * sizeof(scales[0])), 0);
  }
}

TEST(NoExpertParallel, T12_WrongShapes) {
  Fixture<float> f(16, 4, 2, 3);
  f.resize(2);
  auto const hidden = moe::make_rows(static_cast<float const*>(f.x.data()), 2, 16);
  auto const ids = moe::make_rows(static_cast<std::int32_t const*>(f.ids.data()), 2, 2);
  auto const weights = moe::make_rows(static_cast<float const*>(f.weights.data()), 2, 2);
  auto refused = [&](auto h, auto i, auto w) { expect_error(ErrorCode::argument, [&] { f.exchange.prepare({h, i, w}, {}); }); };
  refused(moe::make_strided_rows(hidden.data_handle(), 2, 15, 16), ids, weights);
  refused(hidden, moe::make_rows(ids.data_handle(), 2, 1), weights);
  refused(hidden, moe::make_rows(ids.data_handle(), 1, 2), weights);
  refused(hidden, ids, moe::make_rows(weights.data_handle(), 2, 1));
  refused(moe::make_rows(static_cast<float const*>(nullptr), 2, 16), ids, weights);
  expect_error(ErrorCode::state, [&] { f.finalize(); });  // a refused prepare must not count
}

TEST(NoExpertParallel, T21_CallOrder) {
  Fixture<float> f(16, 4, 2, 3);
  f.resize(1);
  expect_error(ErrorCode::state, [&] { f.finalize(); });
  f.prepare();
  expect_error(ErrorCode::state, [&] { f.prepare(); });
  f.finalize();
  expect_error(ErrorCode::state, [&] { f.finalize(); });
  f.prepare();
  f.exchange.abandon({});
  f.prepare();
  f.finalize();
}

TEST(NoExpertParallel, T26_OutputOfOtherRows) {
  Fixture<float> f(16, 4, 2, 3);
  f.resize(2);
  f.prepare();
  expect_error(ErrorCode::argument, [&] { f.exchange.finalize(moe::make_rows(f.out.data(), 1, 16), {}); });
  f.finalize();
}

TEST(NoExpertParallel, StridedRowsInAndOut) {
  Fixture<float> f(4, 4, 1, 3);
  f.resize(3);
  std::vector<float> x(30), out(30, -7.0F);
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i);
  auto const tokens = f.exchange.prepare({moe::make_strided_rows(static_cast<float const*>(x.data()), 3, 4, 10),
                                          moe::make_rows(static_cast<std::int32_t const*>(f.ids.data()), 3, 1),
                                          moe::make_rows(static_cast<float const*>(f.weights.data()), 3, 1)},
                                         {});
  auto y = f.exchange.expert_output();
  for (int t = 0; t < 3; ++t) {
    for (int h = 0; h < 4; ++h) y(t, h) = tokens.rows(t, h);
  }
  f.exchange.finalize(moe::make_strided_rows(out.data(), 3, 4, 10), {});
  for (std::size_t i = 0; i < out.size(); ++i) EXPECT_EQ(out[i], i % 10 < 4 && i < 24 ? static_cast<float>(i) : -7.0F) << i;
}

TEST(NoExpertParallel, PlacementOfSeveralRanksIsRefused) {
  moe::comm::Self<> comm;
  moe::Arena<moe::space::host> arena;
  using Exchange = Fixture<float>::Exchange;
  moe::Shape<Config<float>> const shape({16, 8, 4, 2});
  expect_error(ErrorCode::config, [&] { Exchange(comm, shape, 3, moe::ExpertPlacement(4, 2), Quant{}, {}, arena); });
  expect_error(ErrorCode::config, [&] { Exchange(comm, shape, -1, moe::ExpertPlacement(4, 1), Quant{}, {}, arena); });
}

TEST(Self, CopiesAndSums) {
  moe::comm::Self<> comm;
  std::array<float, 3> const in{1, 2, 3};
  std::array<float, 3> out{};
  std::int64_t const bytes = 8, offset = 4, count = 2, skip = 1;
  comm.all_gather(in.data(), 12, out.data(), {});
  EXPECT_EQ(out, in);
  out = {};
  comm.all_gather_v(in.data(), 8, out.data(), &bytes, &offset, {});
  EXPECT_EQ(out, (std::array<float, 3>{0, 1, 2}));
  out = {};
  std::int64_t const zero = 0;
  comm.all_to_all_v(in.data(), &bytes, &offset, out.data(), &bytes, &zero, {});
  EXPECT_EQ(out, (std::array<float, 3>{2, 3, 0}));
  out = {};
  comm.reduce_scatter_v(in.data(), &count, &skip, out.data(), {});
  EXPECT_EQ(out, (std::array<float, 3>{2, 3, 0}));
  comm.all_reduce(in.data(), 3, out.data(), {});
  EXPECT_EQ(out, in);
}

}  // namespace
