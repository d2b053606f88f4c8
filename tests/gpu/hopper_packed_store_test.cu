// SPDX-License-Identifier: Apache-2.0
// tests/gpu/hopper_packed_store_test.cu: layers of experts that were packed one after the other have the bits of layers that pack all of
// their weights; their experts can be moved and replaced; what cannot be packed is refused in the same words.
#include <gtest/gtest.h>

#include <cstring>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "moe/eplb/expert_tensors.hpp"
#include "moe/experts/hopper_w4a16.hpp"
#include "moe/experts/hopper_w4a8.hpp"
#include "moe/experts/hopper_w8a16.hpp"
#include "moe/quantization/fp8_per_channel.hpp"
#include "moe/quantization/int4_fp8.hpp"
#include "moe/quantization/int4_group128.hpp"
#include "moe/quantization/int8_per_channel.hpp"
#include "moe/quantization/mxfp4.hpp"
#include "moe/quantization/mxfp4_fp8.hpp"
#include "moe/quantization/mxfp8.hpp"
#include "moe/quantization/nvfp4.hpp"
#include "on_hopper.hpp"
#include "packed_cases.cuh"

namespace {

using namespace moe_test;
using experts::HopperW4A16;
using experts::HopperW4A8;
using experts::HopperW8A16;

constexpr int kTokens = 300;

template <class T>
std::vector<T> on_host(Buffer<T, space::cuda> const& buffer) {
  std::vector<T> out(static_cast<std::size_t>(buffer.size()));
  if (!out.empty()) buffer.copy_to_host(out.data());
  return out;
}

template <class Quant, class Experts>
using StoreOfExperts = experts::StoreFor<Experts, PackedConfig, Quant>;

/// The store of these weights, with two calls of pack() and then the biases.
template <class Quant, class Experts>
StoreOfExperts<Quant, Experts> packed(Sizes const& s, RandomWeights<Quant> const& w, bool gated = true) {
  StoreOfExperts<Quant, Experts> store(s.experts, s.hidden, s.intermediate, gated);
  auto const c13 = on_host(w.c13), c2 = on_host(w.c2);
  auto const s13 = on_host(w.s13), s2 = on_host(w.s2);
  auto const n = store.counts();
  store.pack(1, s.experts - 1, {c13.data() + n.w13, c2.data() + n.w2, s13.data() + n.w13_scales, s2.data() + n.w2_scales});
  store.pack(0, 1, {c13.data(), c2.data(), s13.data(), s2.data()});
  auto const b13 = on_host(w.b13), b2 = on_host(w.b2);
  std::int64_t const rows13 = (gated ? 2 : 1) * s.intermediate;
  for (std::int64_t e = 0; e < s.experts && !b13.empty(); ++e) store.set_bias(e, b13.data() + e * rows13, b2.data() + e * s.hidden);
  return store;
}

Shape<PackedConfig> shape_of(Sizes const& s) { return Shape<PackedConfig>(LayerShape{s.hidden, s.intermediate, s.experts, s.topk}); }

template <class Quant, class Experts>
class Standard {
 public:
  template <class View>
  Standard(Sizes const& s, View const& view, activation::Any const& act)
      : kernel_(shape_of(s), view, kTokens, Quant{}, act, {}, arena_), y_(std::int64_t{kTokens} * s.hidden), hidden_(s.hidden) {}
  std::vector<bf16> operator()(RandomCall<Quant> const& call) {
    Memory<space::cuda>::fill(y_.data(), 0xFF, y_.bytes());
    kernel_.apply(call.batch, make_rows(y_.data(), call.x.count, hidden_), nullptr);
    std::vector<bf16> out = on_host(y_);
    out.resize(static_cast<std::size_t>(call.x.count * hidden_));
    return out;
  }
  std::size_t arena_bytes() const { return arena_.bytes(); }
  StandardKernel<Quant, Experts>& kernel() { return kernel_; }

 private:
  Arena<space::cuda> arena_;
  StandardKernel<Quant, Experts> kernel_;
  Buffer<bf16, space::cuda> y_;
  std::int64_t hidden_;
};

void expect_bits(std::vector<bf16> const& got, std::vector<bf16> const& want, std::string const& what) {
  ASSERT_EQ(got.size(), want.size());
  EXPECT_TRUE(std::any_of(want.begin(), want.end(), [](bf16 v) { return to_float(v) != 0.0F; })) << what;
  EXPECT_EQ(std::memcmp(got.data(), want.data(), want.size() * sizeof(bf16)), 0) << what;
}

/// 70 experts pass the staging memory two at a time.
template <class Quant, class Experts>
void same_bits_as_packing_all(Sizes const& s, activation::Any const& act = kSilu) {
  std::mt19937_64 gen(700);
  RandomWeights<Quant> const weights(s, true, gen, 0, 0.0F, act.gated());
  auto const store = packed<Quant, Experts>(s, weights, act.gated());
  Standard<Quant, Experts> all(s, weights.view, act), apart(s, store.view(), act);
  for (int tokens : {1, 9, kTokens}) {
    RandomCall<Quant> const call(s, tokens, Load::random, gen);
    expect_bits(apart(call), all(call), text(Quant::kName, ", ", tokens, " tokens"));
  }
  // The layer has no copy of what the store holds.
  EXPECT_LT(apart.arena_bytes() + store.bytes(), all.arena_bytes() + 2048) << Quant::kName;
}

class PackedStoreOnGpu : public testing::Test {
 protected:
  void SetUp() override {
    if (!on_hopper()) GTEST_SKIP() << "needs compute capability 9.0";
  }
};

TEST_F(PackedStoreOnGpu, W4A16HasTheBitsOfALayerThatPacks) {
  same_bits_as_packing_all<quantization::Mxfp4W4A16<>, HopperW4A16>({70, 256, 96, 4});
  same_bits_as_packing_all<quantization::WNa16<4, 32, true>, HopperW4A16>({70, 256, 192, 4});
  same_bits_as_packing_all<quantization::Int4Group128, HopperW4A16>({5, 256, 128, 2});
  same_bits_as_packing_all<quantization::Nvfp4W4A16, HopperW4A16>({70, 256, 96, 4});
  same_bits_as_packing_all<quantization::Mxfp4W4A16<>, HopperW4A16>({5, 256, 96, 2}, kGptOss);
  same_bits_as_packing_all<quantization::Mxfp4W4A16<>, HopperW4A16>({5, 256, 96, 2}, activation::Any{activation::Kind::relu2_no_mul});
}
TEST_F(PackedStoreOnGpu, W8A16HasTheBitsOfALayerThatPacks) {
  same_bits_as_packing_all<quantization::Int8PerChannel, HopperW8A16>({70, 256, 80, 4});
  same_bits_as_packing_all<quantization::Fp8PerChannel<>, HopperW8A16>({70, 256, 96, 4});
  same_bits_as_packing_all<quantization::Mxfp8W8A16<>, HopperW8A16>({70, 256, 96, 4});
}
TEST_F(PackedStoreOnGpu, W4A8HasTheBitsOfALayerThatPacks) {
  same_bits_as_packing_all<quantization::Mxfp4Fp8<>, HopperW4A8>({70, 192, 96, 4});
  same_bits_as_packing_all<quantization::Int4Fp8<>, HopperW4A8>({70, 256, 128, 4});
  same_bits_as_packing_all<quantization::Int4Fp8<32, true>, HopperW4A8>({70, 256, 192, 4});
}
/// Matrices of so few experts are packed in parts: w13 of 128 + 128 + 64 features, w2 of 256 + 256 + 64 rows.
TEST_F(PackedStoreOnGpu, FewExpertsInPartsHaveTheBitsOfALayerThatPacks) {
  same_bits_as_packing_all<quantization::Mxfp4W4A16<>, HopperW4A16>({2, 576, 320, 2});
  same_bits_as_packing_all<quantization::Mxfp4W4A16<>, HopperW4A16>({2, 576, 288, 2}, kGptOss);
  same_bits_as_packing_all<quantization::Nvfp4W4A16, HopperW4A16>({2, 576, 288, 2});
  same_bits_as_packing_all<quantization::WNa16<4, 32, true>, HopperW4A16>({3, 576, 320, 2});
  same_bits_as_packing_all<quantization::WNa16<4, 64>, HopperW4A16>({3, 576, 320, 2}, activation::Any{activation::Kind::relu2_no_mul});
  same_bits_as_packing_all<quantization::Int8PerChannel, HopperW8A16>({2, 576, 296, 2});
  same_bits_as_packing_all<quantization::Mxfp8W8A16<>, HopperW8A16>({2, 576, 288, 2});
  same_bits_as_packing_all<quantization::Mxfp4Fp8<>, HopperW4A8>({2, 576, 288, 2});
  same_bits_as_packing_all<quantization::Int4Fp8<32, true>, HopperW4A8>({2, 576, 320, 2});
}
/// Rows in codes, which have kernels of their own.
TEST_F(PackedStoreOnGpu, RowsInCodesHaveTheBitsOfALayerThatPacks) {
  same_bits_as_packing_all<quantization::Mxfp4<>, HopperW4A16>({5, 256, 128, 2});
}

/// Two experts change places as bytes. The bytes and outputs are those of a store that was packed in that order.
template <class Quant, class Experts>
void experts_move_as_bytes(Sizes const& s) {
  SCOPED_TRACE(Quant::kName);
  std::mt19937_64 gen(701);
  RandomWeights<Quant> const weights(s, true, gen), others(s, true, gen);
  auto store = packed<Quant, Experts>(s, weights);
  auto want = packed<Quant, Experts>(s, others);
  Standard<Quant, Experts> moved(s, store.view(), kSilu), fresh(s, want.view(), kSilu);
  RandomCall<Quant> const call(s, 40, Load::random, gen);
  std::vector<bf16> const before = moved(call), expected = fresh(call);
  EXPECT_NE(std::memcmp(before.data(), expected.data(), before.size() * sizeof(bf16)), 0);
  auto const to = eplb::expert_tensors(store), from = eplb::expert_tensors(want);
  ASSERT_EQ(to.size(), 6U) << "bricks, factors and biases";
  for (std::size_t t = 0; t < to.size(); ++t) {
    Buffer<std::byte, space::cuda> spare(to[t].bytes);
    auto const copy = [&](void* into, void const* values) {
      Memory<space::cuda>::copy_async(into, values, static_cast<std::size_t>(to[t].bytes), nullptr);
    };
    for (std::int64_t e = 0; e < s.experts; ++e) copy(to[t].data + e * to[t].stride, from[t].data + e * from[t].stride);
    copy(spare.data(), to[t].data);  // and back again, by way of another place
    copy(to[t].data, to[t].data + 3 * to[t].stride);
    copy(to[t].data, spare.data());
  }
  moved.kernel().weights_changed(nullptr);  // nothing to do
  expect_bits(moved(call), expected, "moved");

  // Expert 2 of the first weights, in the place of expert 3: its bytes are those of its own place.
  auto const c13 = on_host(weights.c13), c2 = on_host(weights.c2);
  auto const s13 = on_host(weights.s13), s2 = on_host(weights.s2);
  auto const n = store.counts();
  auto first = packed<Quant, Experts>(s, weights);
  store.pack(3, 1, {c13.data() + 2 * n.w13, c2.data() + 2 * n.w2, s13.data() + 2 * n.w13_scales, s2.data() + 2 * n.w2_scales});
  auto const own = eplb::expert_tensors(first);
  for (std::size_t t = 0; t < 4; ++t) {
    std::vector<unsigned char> a(static_cast<std::size_t>(own[t].bytes)), b(a.size());
    Memory<space::cuda>::copy_to_host(a.data(), own[t].data + 2 * own[t].stride, a.size());
    Memory<space::cuda>::copy_to_host(b.data(), to[t].data + 3 * to[t].stride, b.size());
    EXPECT_EQ(a, b) << own[t].name;
  }
}
TEST_F(PackedStoreOnGpu, ExpertsMoveAsBytes) {
  experts_move_as_bytes<quantization::Mxfp4W4A16<>, HopperW4A16>({5, 256, 96, 2});
  experts_move_as_bytes<quantization::WNa16<4, 32, true>, HopperW4A16>({5, 256, 192, 2});
  experts_move_as_bytes<quantization::Nvfp4W4A16, HopperW4A16>({5, 256, 96, 2});
  experts_move_as_bytes<quantization::Int8PerChannel, HopperW8A16>({5, 256, 80, 2});
  experts_move_as_bytes<quantization::Mxfp4Fp8<>, HopperW4A8>({5, 192, 96, 2});
  experts_move_as_bytes<quantization::Int4Fp8<32, true>, HopperW4A8>({5, 256, 192, 2});
}

/// A bad value in place `at` of expert `expert`: the store says what a layer that packs all weights says.
template <class Quant, class Experts, class T>
void same_words(Sizes const& s, Buffer<T, space::cuda> RandomWeights<Quant>::* array, int expert, T const& bad, std::int64_t at = 5) {
  SCOPED_TRACE(Quant::kName);
  std::mt19937_64 gen(702);
  RandomWeights<Quant> weights(s, false, gen);
  Buffer<T, space::cuda>& values = weights.*array;
  Memory<space::cuda>::copy_from_host(values.data() + values.size() / s.experts * expert + at, &bad, sizeof(T));
  std::string const want = refusal_message<Experts>(weights, {s.hidden, s.intermediate, s.experts, s.topk});
  EXPECT_NE(want.find(text("of expert ", expert)), std::string::npos) << want;
  std::optional<Error> const got = error_of([&] { packed<Quant, Experts>(s, weights); });
  ASSERT_TRUE(got.has_value());
  EXPECT_EQ(got->code(), ErrorCode::unsupported);
  EXPECT_EQ(got->message(), want);
}
TEST_F(PackedStoreOnGpu, RefusesInTheWordsOfALayer) {
  using quantization::ScaleZero;
  float const infinite = std::numeric_limits<float>::infinity();
  using Mxfp4 = quantization::Mxfp4W4A16<>;
  same_words<Mxfp4, HopperW4A16>({70, 256, 96, 4}, &RandomWeights<Mxfp4>::s13, 69, std::uint8_t{255});
  using Nvfp4 = quantization::Nvfp4W4A16;
  same_words<Nvfp4, HopperW4A16>({70, 256, 96, 4}, &RandomWeights<Nvfp4>::s2, 42, std::uint8_t{0x7F});
  using Zeros = quantization::WNa16<4, 32, true>;
  same_words<Zeros, HopperW4A16>({70, 256, 192, 4}, &RandomWeights<Zeros>::s2, 2, ScaleZero{1.0F, 3.5F});
  using Int8 = quantization::Int8PerChannel;
  same_words<Int8, HopperW8A16>({5, 256, 80, 2}, &RandomWeights<Int8>::s13, 0, infinite);
  using Fp8 = quantization::Fp8PerChannel<>;
  same_words<Fp8, HopperW8A16>({70, 256, 96, 4}, &RandomWeights<Fp8>::c2, 33,
                               std::bit_cast<typename RandomWeights<Fp8>::Code>(std::uint8_t{0xFF}));
  using W4A8 = quantization::Int4Fp8<>;
  same_words<W4A8, HopperW4A8>({70, 256, 128, 4}, &RandomWeights<W4A8>::s13, 8, infinite);
}
TEST_F(PackedStoreOnGpu, RefusesPartsInTheWordsOfALayer) {
  using Mxfp4 = quantization::Mxfp4W4A16<>;
  same_words<Mxfp4, HopperW4A16>({2, 576, 320, 2}, &RandomWeights<Mxfp4>::s13, 1, std::uint8_t{255}, 500 * 18 + 3);  // an up row
  using Fp8 = quantization::Fp8PerChannel<>;
  auto const nan = std::bit_cast<typename RandomWeights<Fp8>::Code>(std::uint8_t{0xFF});
  same_words<Fp8, HopperW8A16>({2, 576, 320, 2}, &RandomWeights<Fp8>::c2, 1, nan, 300 * 320 + 7);
}
/// Other experts than those it is packed for read codes, and there are none.
TEST_F(PackedStoreOnGpu, OtherExpertsRefuseIt) {
  using Quant = quantization::Mxfp4W4A16<>;
  Sizes const s{4, 256, 96, 2};
  std::mt19937_64 gen(703);
  RandomWeights<Quant> const weights(s, false, gen);
  auto const store = packed<Quant, HopperW4A16>(s, weights);
  std::optional<Error> const error = error_of([&] {
    Arena<space::cuda> arena;
    StandardKernel<Quant, experts::CudaReference> kernel(shape_of(s), store.view(), 8, Quant{}, kSilu, {}, arena);
  });
  ASSERT_TRUE(error.has_value());
  EXPECT_EQ(error->code(), ErrorCode::argument);
  EXPECT_NE(error->message().find("packed for the experts hopper_w4a16"), std::string::npos) << error->message();
}

}  // namespace
