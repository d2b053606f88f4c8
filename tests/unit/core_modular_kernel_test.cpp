// SPDX-License-Identifier: Apache-2.0
// tests/unit/core_modular_kernel_test.cpp: a composition of archetypes: contracts, rules, arguments, the state after a refused call.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "../archetypes.hpp"
#include "../expect_error.hpp"

namespace {

using namespace moe;
using namespace moe_test;

static_assert(LayerConfig<Tiny>);
static_assert(Router<ArchetypeRouter<>>);
static_assert(Quantization<ArchetypeQuantization<>>);
static_assert(Activation<activation::Silu> && Activation<activation::Any>);
static_assert(PrepareAndFinalize<ArchetypeBackend<>>);
static_assert(ExchangeOf<ArchetypeBackend<>::Exchange<Tiny, ArchetypeQuantization<>, float>, Tiny>);
static_assert(Experts<ArchetypeExperts<>>);
static_assert(Communicator<comm::Self<>>);

using Layer = ModularKernel<Tiny, ArchetypeRouter<>, ArchetypeQuantization<>, ArchetypeBackend<>, ArchetypeExperts<>>;

template <class Q = ArchetypeQuantization<>, class B = ArchetypeBackend<>, class E = ArchetypeExperts<>, class R = ArchetypeRouter<>,
          class C = Tiny>
constexpr char const* reason() {
  return Composition<C, R, Q, B, E>::reason();
}
struct OnDevice : ExpertsFacts {
  static constexpr bool kOnDevice = true;
};
struct NoActivation : ExpertsFacts {
  static constexpr bool kActivation = false;
};
struct LargeTile : ExpertsFacts {
  static constexpr int kSharedMemory = 228 * 1024;
};

// The predicates of the compile-time checks also work at run time and give the sentence of the first broken rule.
TEST(Rules, RunTimeReasonIsTheSentence) {
  EXPECT_EQ(reason(), nullptr);
  using E = ArchetypeExperts<OnDevice>;
  EXPECT_STREQ((reason<ArchetypeQuantization<>, ArchetypeBackend<>, E>()), rules::SameSpace::kSentence);
  using Batched = ArchetypeBackend<ActivationFormat::batched>;
  EXPECT_STREQ((reason<ArchetypeQuantization<>, Batched>()), rules::ActivationFormatMatches::kSentence);
  EXPECT_STREQ((reason<ArchetypeQuantization<48>>()), rules::QuantizationFitsShape::kSentence);
  EXPECT_STREQ((reason<ArchetypeQuantization<>, ArchetypeBackend<>, ArchetypeExperts<NoActivation>>()),
               rules::ExpertsSupportActivation::kSentence);
  EXPECT_STREQ((reason<ArchetypeQuantization<>, ArchetypeBackend<>, ArchetypeExperts<LargeTile>>()), rules::SharedMemoryFits::kSentence);
}

class LayerTest : public testing::Test {
 protected:
  static Layer::Params params() { return {.max_tokens_per_rank = 8, .placement = ExpertPlacement(4, 1), .router = {}}; }
  Rows<float const, 64> hidden(std::int64_t rows) { return make_rows<64>(static_cast<float const*>(x.data()), rows, 64); }
  Rows<float const> logits(std::int64_t rows, std::int64_t width = 4) {
    return make_rows(static_cast<float const*>(z.data()), rows, width);
  }
  Rows<float, 64> output(std::int64_t rows) { return make_rows<64>(y.data(), rows, 64); }

  LayerTest() { std::iota(x.begin(), x.end(), 0.0F); }
  std::vector<float> x = std::vector<float>(16 * 64);
  std::vector<float> y = std::vector<float>(16 * 64, -1.0F);
  std::vector<float> z = std::vector<float>(16 * 5);
  comm::Self<> self;
  Layer layer{self, {}, params()};
};

TEST_F(LayerTest, IdentityExpertsReturnTheInput) {
  layer.forward(hidden(5), logits(5), output(5));
  for (std::size_t i = 0; i < 5 * 64; ++i) {
    ASSERT_FLOAT_EQ(y[i], x[i]);
  }
  EXPECT_EQ(y[5 * 64], -1.0F) << "wrote past the last row";
  EXPECT_EQ(layer.topk_ids()(3, 1), 0);
  EXPECT_FLOAT_EQ(layer.topk_weights()(3, 1), 0.5F);
}

TEST_F(LayerTest, G1_ZeroTokens) {
  layer.forward(hidden(0), logits(0), output(0));
  EXPECT_EQ(y[0], -1.0F);
}

TEST_F(LayerTest, WrongShapesAreRefusedBeforeAnyWorkAndTellThePeers) {
  expect_error(ErrorCode::capacity, "9 rows exceed max_tokens_per_rank 8", [&] { layer.forward(hidden(9), logits(9), output(9)); });
  expect_error(ErrorCode::argument, "router_logits", [&] { layer.forward(hidden(3), logits(3, 5), output(3)); });
  expect_error(ErrorCode::argument, "router_logits", [&] { layer.forward(hidden(3), logits(2), output(3)); });
  expect_error(ErrorCode::argument, "output: rows", [&] { layer.forward(hidden(3), logits(3), output(4)); });
  expect_error(ErrorCode::argument, "null",
               [&] { layer.forward(make_rows<64>(static_cast<float const*>(nullptr), 3, 64), logits(3), output(3)); });
  std::int32_t const count = 2;  // this backend does not set kTakesRowCount, so its row count comes from the host
  expect_error(ErrorCode::unsupported, "num_rows", [&] { layer.forward(hidden(3), logits(3), output(3), {.num_rows = &count}); });
  EXPECT_EQ(layer.exchange().abandoned, 6);
  EXPECT_EQ(y[0], -1.0F);
  layer.forward(hidden(3), logits(3), output(3));
  EXPECT_FLOAT_EQ(y[64], x[64]);
}

TEST_F(LayerTest, OutputIsTheInputOrApartFromIt) {
  std::vector<float> const was = x;
  // Rows of 64 floats that begin `at` floats behind those of hidden and lie `stride` floats apart.
  auto const forward = [&](std::int64_t rows, std::int64_t at, std::int64_t stride) {
    layer.forward(make_strided_rows<64>(static_cast<float const*>(x.data() + 256), rows, 64, 128), logits(rows),
                  make_strided_rows<64>(x.data() + 256 + at, rows, 64, stride));
  };
  forward(3, 0, 128);
  EXPECT_EQ(x, was) << "identity experts, in place";
  forward(3, 64, 128);  // the other half of each row's memory
  EXPECT_EQ(x[256 + 64], was[256]);
  forward(3, -192, 64);  // right before it
  forward(1, 0, 999);    // one row has no stride
  forward(0, 1, 64);
  int const before = layer.exchange().abandoned;
  struct Overlapping {
    std::int64_t rows, at, stride;
  };
  for (Overlapping const& r :
       {Overlapping{3, 0, 64}, {3, 128, 128}, {3, 1, 128}, {3, -1, 128}, {1, 63, 128}, {1, -63, 64}, {3, -191, 64}, {3, 64, 65}}) {
    SCOPED_TRACE(text(r.rows, " rows at ", r.at, ", ", r.stride, " apart"));
    expect_error(ErrorCode::argument, text("output: it begins ", 4 * r.at, " bytes from hidden_states, with rows ", 4 * r.stride),
                 [&] { forward(r.rows, r.at, r.stride); });
  }
  EXPECT_EQ(layer.exchange().abandoned, before + 8);
  std::vector<float> neighbours(17 * 64);  // 8 rows and 8 rows, the most of a call; 9 rows of each overlap
  expect_error(ErrorCode::capacity, "9 rows exceed max_tokens_per_rank 8", [&] {
    layer.forward(make_rows<64>(static_cast<float const*>(neighbours.data()), 9, 64), logits(9),
                  make_rows<64>(neighbours.data() + 512, 9, 64));
  });
}

TEST_F(LayerTest, OutputIsApartFromTheRoutingAndTheOptions) {
  // Rows of one matrix: 64 floats of output, then 4 logits or 2 ids and 2 weights. `at` moves the second into the first.
  std::vector<float> matrix(3 * 80, 0.5F);
  auto const forward = [&](std::int64_t at) {
    layer.forward(hidden(3), make_strided_rows(static_cast<float const*>(matrix.data() + at), 3, 4, 80),
                  make_strided_rows<64>(matrix.data(), 3, 64, 80));
  };
  std::vector<std::int64_t> ids_memory{0, 1, 2, 3, 1, 0};
  ids_memory.resize(3 * 64);
  auto const forward_routed = [&](std::int64_t weights_at, float* out) {
    for (std::int64_t t = 0; t < 3; ++t) std::fill_n(matrix.data() + t * 80 + weights_at, 2, 0.5F);
    layer.forward_routed(hidden(3), make_rows(static_cast<std::int64_t const*>(ids_memory.data()), 3, 2),
                         make_strided_rows(static_cast<float const*>(matrix.data() + weights_at), 3, 2, 80),
                         make_strided_rows<64>(out, 3, 64, 80));
  };
  forward(64);
  forward_routed(66, matrix.data());
  int const before = layer.exchange().abandoned;
  std::string const sentence = ", expected memory that the call does not read";
  expect_error(ErrorCode::argument, "output: its memory overlaps that of router_logits" + sentence, [&] { forward(63); });
  expect_error(ErrorCode::argument, "output: its memory overlaps that of topk_weights" + sentence,
               [&] { forward_routed(63, matrix.data()); });
  expect_error(ErrorCode::argument, "output: its memory overlaps that of topk_ids" + sentence,
               [&] { forward_routed(66, reinterpret_cast<float*>(ids_memory.data() + 5) + 1); });  // the upper half of the last id
  expect_error(ErrorCode::argument, "output: its memory overlaps that of token_ids" + sentence,
               [&] { layer.forward(hidden(3), logits(3), output(3), {.token_ids = reinterpret_cast<std::int64_t const*>(y.data())}); });
  EXPECT_EQ(layer.exchange().abandoned, before + 4);
  EXPECT_EQ(y[0], -1.0F);
}

TEST_F(LayerTest, RowsOfAnotherWidthAreNoStride) {
  expect_error(ErrorCode::argument, "make_rows<64>: rows of 128 elements, expected 64. Fix: make_strided_rows<64>(data, rows, 64, stride)",
               [&] { make_rows<64>(x.data(), 8, 128); });
  expect_error(ErrorCode::argument, "rows of 128 elements, expected 64", [&] { make_strided_rows<64>(x.data(), 8, 128, 128); });
  EXPECT_EQ(make_strided_rows<64>(x.data(), 8, 64, 128).stride(0), 128);
  EXPECT_EQ(make_rows(x.data(), 8, 128).stride(0), 128);
}

TEST_F(LayerTest, ContradictionsAreRefusedAtConstruction) {
  auto p = params();
  p.shape.hidden = 128;
  expect_error(ErrorCode::config, "the layer's type fixes it to 64", [&] { Layer l(self, {}, p); });
  p = params();
  p.router.topk = 3;
  expect_error(ErrorCode::config, "top_k", [&] { Layer l(self, {}, p); });
  p = params();
  p.router.num_experts = 5;
  expect_error(ErrorCode::config, "num_experts", [&] { Layer l(self, {}, p); });
}

struct StrictRouter : ArchetypeRouter<> {
  struct Params {
    int num_experts = 0;
    int topk = 2;
  };
  explicit StrictRouter(Params const& p) : ArchetypeRouter<>({p.num_experts, p.topk}) {
    if (p.num_experts < 1) throw Error(ErrorCode::config, "num_experts: 0 is below 1");
  }
};
struct AnyExperts : Tiny {  // a fixed number would be the default of the router's
  static constexpr int num_experts = dynamic;
};
TEST_F(LayerTest, MissingRouterParametersAreNamed) {
  using Strict = ModularKernel<AnyExperts, StrictRouter, ArchetypeQuantization<>, ArchetypeBackend<>, ArchetypeExperts<>>;
  expect_error(ErrorCode::config, ".router is missing in the layer's parameters, or leaves num_experts at 0",
               [&] { Strict l(self, {}, {.shape = {.num_experts = 4}, .max_tokens_per_rank = 8, .placement = ExpertPlacement(4, 1)}); });
}

TEST_F(LayerTest, LogitsNeedNotBeConst) {
  layer.forward(hidden(2), make_rows(z.data(), 2, 4), output(2));
  EXPECT_FLOAT_EQ(y[64], x[64]);
  layer.wait();
  layer.check();
}

static_assert(!std::is_move_constructible_v<Layer> && !std::is_copy_constructible_v<Layer>);

struct Dynamic : LayerDefaults {
  using Activation = activation::Silu;
};
TEST(Shape, DynamicDimensionsAreCheckedAtConstruction) {
  Shape<Dynamic> const s({128, 64, 8, 2, false});
  EXPECT_EQ(s.hidden(), 128);
  expect_error(ErrorCode::config, "intermediate: 0 is out of range [1, 16777216]", [] { Shape<Dynamic>({128, 0, 8, 2, false}); });
  expect_error(ErrorCode::config, "top_k: 33 exceeds the bound 32", [] { Shape<Dynamic>({128, 64, 64, 33, false}); });
}

TEST(Arena, PiecesAreAlignedAndSealEndsIt) {
  Arena<space::host> arena;
  auto* a = arena.take<char>(3);
  auto* b = arena.take<double>(1 << 18);
  auto* c = arena.take_filled<std::uint8_t>(5, 0xAB);
  for (void* p : {static_cast<void*>(a), static_cast<void*>(b), static_cast<void*>(c)}) {
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(p) % Arena<space::host>::kAlign, 0U);
  }
  EXPECT_EQ(c[4], 0xAB);
  EXPECT_EQ(arena.take<int>(0), nullptr);
  arena.seal();
  expect_error(ErrorCode::state, "after construction", [&] { arena.take<int>(1); });
}

}  // namespace
