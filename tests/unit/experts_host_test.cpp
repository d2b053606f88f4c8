// SPDX-License-Identifier: Apache-2.0
// tests/unit/experts_host_test.cpp: the host experts against the definition in float64: both formats, all activations, quantised
// weights, biases, weights on the input, absent experts, poisoned padding (docs/semantics/experts.md cases X3-X6, X8-X10, X14, X19, X20).
#include "moe/experts/onednn.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "expect_close.hpp"
#include "moe/activation/activation.hpp"
#include "moe/experts/reference.hpp"
#include "moe/quantization/fp8_block128.hpp"
#include "moe/quantization/int8_per_token.hpp"
#include "moe/quantization/none.hpp"
#include "numbers.hpp"

using namespace moe;
using moe_test::expect_close;
using moe_test::normal;

namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

template <class ActType, class WeightType>
struct TestConfig : LayerDefaults {
  using Act = ActType;
  using Weight = WeightType;
  using Activation = activation::Any;
};

/// One problem: weights, rows and routing, for any experts policy.
template <class Config, class Quant>
struct Problem {
  std::int64_t rows, hidden, intermediate, experts;
  int k;
  activation::Any act;
  bool biased = false;
  bool on_input = false;

  Shape<Config> shape() const { return Shape<Config>({hidden, intermediate, static_cast<int>(experts), k, on_input}); }
  experts::WeightStore<Config, Quant> weights(Quant const& quant) const {
    std::int64_t const wide = (act.gated() ? 2 : 1) * intermediate;
    experts::WeightStore<Config, Quant> store(experts, hidden, intermediate, act.gated(), quant);
    for (std::int64_t e = 0; e < experts; ++e) {
      store.set_expert(e, normal(10 + e, wide * hidden, 1.0F / std::sqrt(static_cast<float>(hidden))).data(),
                       normal(500 + e, hidden * intermediate, 1.0F / std::sqrt(static_cast<float>(intermediate))).data());
      if (biased) {
        store.set_bias(e, normal(900 + e, wide, 0.3F).data(), normal(1300 + e, hidden, 0.3F).data());
      }
    }
    return store;
  }
  std::vector<typename Config::Act> input() const {
    std::vector<float> const wide = normal(7, rows * hidden);
    std::vector<typename Config::Act> x(wide.size());
    for (std::size_t i = 0; i < x.size(); ++i) {
      x[i] = from_float<typename Config::Act>(wide[i]);
    }
    return x;
  }
  std::vector<std::int32_t> ids() const {
    std::mt19937 gen(3);
    std::vector<std::int32_t> v(static_cast<std::size_t>(rows * k));
    for (auto& id : v) {
      id = static_cast<std::int32_t>(gen() % static_cast<unsigned>(experts + 1)) - 1;
    }  // duplicates and -1 included
    return v;
  }
};

/// Runs a policy in the standard format on a poisoned output.
template <class Policy, class Config, class Quant>
std::vector<float> run_standard(Problem<Config, Quant> const& p, Quant const& quant = {}) {
  Arena<space::host> arena;
  auto const store = p.weights(quant);
  typename Policy::template Kernel<Config, Quant, ActivationFormat::standard> kernel(p.shape(), store.view(), p.rows, quant, p.act, {},
                                                                                     arena);
  using Payload = typename Quant::template Payload<typename Config::Act>;
  std::int64_t const cols = Quant::payload_cols(p.hidden);
  std::int64_t const scale_cols = Quant::scale_cols(p.hidden);
  std::vector<Payload> codes(static_cast<std::size_t>(p.rows * cols));
  std::vector<typename Quant::Scale> scales(static_cast<std::size_t>(p.rows * scale_cols));
  auto const x = p.input();
  for (std::int64_t r = 0; r < p.rows; ++r) {
    quant.template quantize_row<typename Config::Act>(x.data() + r * p.hidden, p.hidden, codes.data() + r * cols,
                                                      scales.data() + r * scale_cols);
  }
  auto const ids = p.ids();
  std::vector<float> const w = normal(11, static_cast<std::int64_t>(ids.size()));
  std::vector<float> y(static_cast<std::size_t>(p.rows * p.hidden), kNan);
  kernel.apply({make_rows<dynamic, Payload const>(codes.data(), p.rows, cols),
                make_rows<dynamic, typename Quant::Scale const>(scales.data(), p.rows, scale_cols), make_rows(ids.data(), p.rows, p.k),
                make_rows(w.data(), p.rows, p.k)},
               make_rows(y.data(), p.rows, p.hidden), HostStream{});
  return y;
}

/// Runs a policy in the batched format: rows_of(e) = (7 e) mod (C + 1) valid rows; the other rows are NaN. Returns the valid rows.
template <class Policy, class Config, class Quant>
std::vector<float> run_batched(Problem<Config, Quant> const& p) {
  Quant const quant;
  Arena<space::host> arena;
  auto const store = p.weights(quant);
  std::int64_t const capacity = p.rows;
  typename Policy::template Kernel<Config, Quant, ActivationFormat::batched> kernel(p.shape(), store.view(), capacity, quant, p.act, {},
                                                                                    arena);
  using Act = typename Config::Act;
  std::vector<Act> x(static_cast<std::size_t>(p.experts * capacity * p.hidden), from_float<Act>(kNan));
  std::vector<std::int32_t> counts;
  for (std::int64_t e = 0; e < p.experts; ++e) {
    counts.push_back(static_cast<std::int32_t>(7 * e % (capacity + 1)));
    auto const rows = normal(40 + e, counts.back() * p.hidden);
    for (std::size_t i = 0; i < rows.size(); ++i) {
      x[static_cast<std::size_t>(e * capacity * p.hidden) + i] = from_float<Act>(rows[i]);
    }
  }
  std::vector<float> scales;
  std::vector<float> y(static_cast<std::size_t>(p.experts * capacity * p.hidden), kNan);
  kernel.apply(
      {make_blocks<dynamic, Act const>(x.data(), p.experts, capacity, p.hidden),
       make_blocks<dynamic, float const>(scales.data(), p.experts, capacity, 0), make_vector<std::int32_t const>(counts.data(), p.experts)},
      make_blocks(y.data(), p.experts, capacity, p.hidden), HostStream{});
  std::vector<float> valid;
  for (std::int64_t e = 0; e < p.experts; ++e) {
    for (std::int64_t i = 0; i < counts[static_cast<std::size_t>(e)] * p.hidden; ++i) {
      valid.push_back(y[static_cast<std::size_t>(e * capacity * p.hidden + i)]);
    }
  }
  return valid;
}

using F32 = TestConfig<float, float>;
using Oracle = experts::Reference<double>;

TEST(HostExperts, X3_StandardFloat) {
  for (std::int64_t rows : {0, 1, 2, 33, 150}) {
    Problem<F32, quantization::None> const p{rows, 96, 40, 8, 2, {}};
    auto const want = run_standard<Oracle>(p);
    expect_close(run_standard<experts::Reference<>>(p), want, 2e-6F);
    expect_close(run_standard<experts::OneDnn>(p), want, 2e-6F);
  }
}

TEST(HostExperts, X3_BlocksThatDoNotDivide) {
  Problem<F32, quantization::None> const p{70, 2048, 328, 3, 2, {}};  // several column blocks with a remainder, two row panels
  expect_close(run_standard<experts::OneDnn>(p), run_standard<Oracle>(p), 2e-6F);
}

TEST(HostExperts, X3_BatchedFloatWithPoisonedPadding) {
  Problem<F32, quantization::None> const p{19, 64, 48, 5, 2, {}};
  auto const want = run_batched<Oracle>(p);
  EXPECT_FALSE(want.empty());
  expect_close(run_batched<experts::Reference<>>(p), want, 2e-6F);
  expect_close(run_batched<experts::OneDnn>(p), want, 2e-6F);
}

TEST(HostExperts, X3_Bf16WeightsAndRows) {
  Problem<TestConfig<bf16, bf16>, quantization::None> const p{33, 128, 64, 8, 4, {}};
  expect_close(run_standard<experts::OneDnn>(p), run_standard<Oracle>(p), 2e-6F);
}

TEST(HostExperts, X3_QuantisedSchemes) {
  Problem<F32, quantization::Fp8Block<128>> const fp8{21, 256, 128, 4, 2, {}};
  expect_close(run_standard<experts::OneDnn>(fp8), run_standard<Oracle>(fp8), 2e-2F);  // a requantised value may move by one code
  Problem<F32, quantization::Int8PerToken> const int8{21, 256, 128, 4, 2, {}};
  expect_close(run_standard<experts::OneDnn>(int8), run_standard<Oracle>(int8), 1e-2F);
}

TEST(HostExperts, EveryActivation) {
  activation::Constants limited;
  limited.limit = 1.0F;  // so that it binds
  for (int i = 0; i < activation::kKinds; ++i) {
    Problem<F32, quantization::None> const p{17, 32, 24, 4, 2, {static_cast<activation::Kind>(i), limited}, true};
    expect_close(run_standard<experts::OneDnn>(p), run_standard<Oracle>(p), 4e-6F);
  }
}

// The bias is added before the activation (w13) and before the router weight (w2).
TEST(HostExperts, X9_BiasIsWeighted) {
  Problem<F32, quantization::None> p{4, 8, 8, 1, 1, {}, true};
  auto const biased = run_standard<Oracle>(p);
  p.biased = false;
  auto const plain = run_standard<Oracle>(p);
  EXPECT_NE(biased, plain);
  p.biased = true;
  expect_close(run_standard<experts::OneDnn>(p), biased, 2e-6F);
}

TEST(HostExperts, X8_WeightOnInput) {
  Problem<F32, quantization::None> p{23, 64, 32, 4, 2, {}};
  auto const on_output = run_standard<Oracle>(p);
  p.on_input = true;
  auto const on_input = run_standard<Oracle>(p);
  EXPECT_NE(on_input, on_output);
  expect_close(run_standard<experts::OneDnn>(p), on_input, 4e-6F);
}

TEST(HostExperts, X20_RowAloneEqualsRowInBatch) {
  Problem<F32, quantization::None> p{40, 64, 48, 4, 2, {}};
  auto const batch = run_standard<experts::Reference<>>(p);
  p.rows = 1;
  auto const alone = run_standard<experts::Reference<>>(p);
  for (std::size_t i = 0; i < alone.size(); ++i) {
    ASSERT_EQ(alone[i], batch[i]) << i;
  }
}

TEST(HostExperts, X12_WrongWeightsAreRefused) {
  Arena<space::host> arena;
  Problem<F32, quantization::None> const p{4, 16, 8, 2, 1, {}};
  auto const store = p.weights({});
  Shape<F32> const wrong({24, 8, 2, 1, false});
  using Kernel = experts::OneDnn::Kernel<F32, quantization::None, ActivationFormat::standard>;
  try {
    Kernel kernel(wrong, store.view(), 4, {}, p.act, {}, arena);
    FAIL() << "accepted weights of another width";
  } catch (Error const& e) {
    EXPECT_EQ(e.code(), ErrorCode::argument);
    EXPECT_NE(std::string(e.what()).find("expected 24"), std::string::npos) << e.what();
  }
}

}  // namespace
