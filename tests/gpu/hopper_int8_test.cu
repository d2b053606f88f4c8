// SPDX-License-Identifier: Apache-2.0
// tests/gpu/hopper_int8_test.cu: the Hopper layer in int8, bit for bit: sums of products past what float32 holds exactly, codes of the
// intermediate by the rule, infinities in it, and a scale that is given.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "hopper_reference.cuh"
#include "moe/experts/hopper/contiguous_layer.hpp"
#include "moe/quantization/int8_per_token.hpp"
#include "on_hopper.hpp"

namespace {

using namespace moe::hopper;
using namespace moe_test;
using moe::activation::Kind;

std::uint16_t bf16_bits(float v) { return __bfloat16_as_ushort(__float2bfloat16_rn(v)); }

/// One expert without a gate, activation relu², whose first products are known: 127 i for feature i, times the scales. x is 127 everywhere.
/// Weight row i begins with i − 127, then come H / 2 times 127 and H / 2 − 1 times −127: their sum is i, and partial sums of the products
/// reach 127² · H / 2 before they cancel. The second product is the identity on features, so the output shows every code.
class Int8Exact {
 public:
  static constexpr int kHidden = 16384;
  static constexpr int kInter = 64;

  explicit Int8Exact(int tokens)
      : tokens_(tokens),
        x_(at(tokens) * kHidden),
        w13_(at(kInter) * kHidden),
        w2_(at(kHidden) * kInter),
        out_(at(tokens) * kHidden * 2),
        x_scales_(at(tokens)),
        w13_scales_(at(kInter)),
        w2_scales_(at(kHidden)),
        weights_(at(tokens)),
        ids_(at(tokens)) {
    std::vector<char> w13(w13_.size(), 0);
    for (int i = 0; i < kInter; ++i) {
      char* const row = w13.data() + at(i) * kHidden;
      for (int c = 1; c < kHidden; ++c) row[c] = static_cast<char>(c <= kHidden / 2 ? 127 : -127);
      row[0] = static_cast<char>(i - 127);
    }
    std::vector<char> w2(w2_.size(), 0);
    for (int i = 0; i < kInter; ++i) w2[at(i) * kInter + at(i)] = 1;
    w13_.upload(w13);
    w2_.upload(w2);
    x_.upload(std::vector<char>(x_.size(), 127));
    for (int t = 0; t < tokens; ++t) scales_.push_back(std::ldexp(1.0F / 128.0F, t % 5));
    x_scales_.upload(scales_);
    w13_scales_.upload(std::vector<float>(at(kInter), 1.0F));
    w2_scales_.upload(std::vector<float>(at(kHidden), 1.0F));
    weights_.upload(std::vector<float>(at(tokens), 1.0F));
    ids_.upload(std::vector<std::int32_t>(at(tokens), 0));
  }
  /// Scales of the rows of w13; they are 1 otherwise.
  void set_w13_scales(std::vector<float> const& scales) const { w13_scales_.upload(scales); }
  std::vector<std::uint16_t> run(Tuning const& tuning, float static_scale = 0.0F) const {
    LayerWeights weights{};
    weights.w13 = w13_.data();
    weights.w2 = w2_.data();
    weights.w13_scales = w13_scales_.data();
    weights.w2_scales = w2_scales_.data();
    LayerOptions options{};
    options.activation = Kind::relu2_no_mul;
    options.static_scale = static_scale;
    options.scale_floor = moe::quantization::Int8Unit::scale(0);
    ContiguousLayer const layer({1, kHidden, kInter, 1}, Scheme::int8_row, weights, options,
                                layer_launcher<Scheme::int8_row, AnyActivation>());
    DeviceArray<char> const workspace(static_cast<std::size_t>(layer.workspace_bytes(tokens_)));
    workspace.fill_bytes(0xFF);
    out_.fill_bytes(0xFF);
    LayerCall call{};
    call.x = x_.data();
    call.x_scales = static_scale > 0.0F ? nullptr : x_scales_.data();
    call.topk_ids = ids_.data();
    call.topk_weights = weights_.data();
    call.out = out_.data();
    call.max_tokens = tokens_;
    layer.forward(call, tuning, workspace.data(), nullptr);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    std::vector<char> const bytes = out_.download();
    std::vector<std::uint16_t> bits(bytes.size() / 2);
    std::memcpy(bits.data(), bytes.data(), bytes.size());
    return bits;
  }
  /// What the definition gives for a row whose first products are `gate(i)`.
  template <class Gate>
  static std::vector<std::uint16_t> expected(Gate gate, float static_scale = 0.0F) {
    using Unit = moe::quantization::Int8Unit;
    std::vector<float> inter(kInter);
    std::uint32_t amax = 0;
    for (int i = 0; i < kInter; ++i) {
      inter[at(i)] = moe::activation::apply(Kind::relu2_no_mul, {}, gate(i), 0.0F);
      amax = std::max(amax, Unit::magnitude(inter[at(i)]));
    }
    float const scale = static_scale > 0.0F ? static_scale : Unit::scale(amax);
    std::vector<std::uint16_t> bits(kHidden, 0);
    for (int i = 0; i < kInter; ++i) bits[at(i)] = bf16_bits(Unit::decode(Unit::encode(inter[at(i)], scale), scale));
    return bits;
  }
  float scale(int token) const { return scales_[at(token)]; }

 private:
  static std::size_t at(int i) { return static_cast<std::size_t>(i); }
  int tokens_;
  DeviceArray<char> x_, w13_, w2_, out_;
  DeviceArray<float> x_scales_, w13_scales_, w2_scales_, weights_;
  DeviceArray<std::int32_t> ids_;
  std::vector<float> scales_;
};

class HopperInt8 : public testing::Test {
 protected:
  void SetUp() override {
    if (!on_hopper()) GTEST_SKIP() << "needs compute capability 9.0";
  }
  /// Tokens of every kernel, and what tuning takes them there.
  static std::vector<std::pair<int, Tuning>> cases() {
    std::vector<std::pair<int, Tuning>> all;
    for (auto [tokens, rows] : {std::pair{1, 8}, {5, 8}, {16, 16}, {40, 64}, {64, 64}, {90, 96}, {127, 128}, {300, 128}}) {
      for (int splits : {1, 16}) {  // parts of K are summed as integers
        Tuning t{};
        t.tile_rows = rows;
        t.max_splits = splits;
        all.emplace_back(tokens, t);
      }
    }
    return all;
  }
  static void expect_rows(std::vector<std::uint16_t> const& got, std::vector<std::uint16_t> const& row, int token, Tuning const& tuning) {
    std::size_t const first = static_cast<std::size_t>(token) * Int8Exact::kHidden;
    for (std::size_t h = 0; h < row.size(); ++h) {
      ASSERT_EQ(got[first + h], row[h]) << "token " << token << " column " << h << ", " << tuning;
    }
  }
};

TEST_F(HopperInt8, SumsAreExactAndCodesAreThoseOfTheRule) {
  for (auto const& [tokens, tuning] : cases()) {
    Int8Exact const problem(tokens);
    std::vector<std::uint16_t> const got = problem.run(tuning);
    for (int t : {0, tokens / 2, tokens - 1}) {
      float const scale = problem.scale(t);
      expect_rows(got, Int8Exact::expected([&](int i) { return 127.0F * static_cast<float>(i) * scale; }), t, tuning);
    }
  }
}

TEST_F(HopperInt8, InfinityClampsAndLeavesTheScaleOfItsRow) {
  for (auto const& [tokens, tuning] : cases()) {
    Int8Exact const problem(tokens);
    std::vector<float> scales(Int8Exact::kInter, 1.0F);
    scales[5] = std::numeric_limits<float>::infinity();
    scales[9] = 3e37F;  // squared it is infinite
    problem.set_w13_scales(scales);
    std::vector<std::uint16_t> const got = problem.run(tuning);
    float const scale = problem.scale(tokens - 1);
    auto const gate = [&](int i) {
      return i == 5 || i == 9 ? std::numeric_limits<float>::infinity() : 127.0F * static_cast<float>(i) * scale;
    };
    expect_rows(got, Int8Exact::expected(gate), tokens - 1, tuning);
  }
}

TEST_F(HopperInt8, AStaticScaleSaturates) {
  for (auto const& [tokens, tuning] : cases()) {
    Int8Exact const problem(tokens);
    problem.set_w13_scales(std::vector<float>(Int8Exact::kInter, 1.0F / 64.0F));
    float const scale = 0.25F;  // of x and of the intermediate, which is 0.246 i²: beyond 127 · scale from i = 12 on
    std::vector<std::uint16_t> const got = problem.run(tuning, scale);
    auto const gate = [&](int i) { return 127.0F * static_cast<float>(i) * scale / 64.0F; };
    expect_rows(got, Int8Exact::expected(gate, scale), tokens - 1, tuning);
  }
}

}  // namespace
