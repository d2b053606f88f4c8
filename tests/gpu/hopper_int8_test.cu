// SPDX-License-Identifier: Apache-2.0
// tests/gpu/hopper_int8_test.cu: the Hopper layer in int8, bit for bit: sums of products past what float32 holds exactly, codes of the
// intermediate by the rule, in rows of a warp and of a warpgroup, infinities in it, and a scale that is given.
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
/// Weight row i begins with i mod 127 − 127, then come H / 2 times 127, ⌊i / 127⌋ zeros and −127: their sum is i, and partial sums of the
/// products reach 127² · H / 2 before they cancel. The second product copies H features from `first` on, so the output shows their codes.
class Int8Exact {
 public:
  explicit Int8Exact(int tokens, int hidden = 16384, int inter = 64, int first = 0)
      : tokens_(tokens),
        hidden_(hidden),
        inter_(inter),
        first_(first),
        x_(at(tokens) * at(hidden)),
        w13_(at(inter) * at(hidden)),
        w2_(at(hidden) * at(inter)),
        out_(at(tokens) * at(hidden) * 2),
        x_scales_(at(tokens)),
        w13_scales_(at(inter)),
        w2_scales_(at(hidden)),
        weights_(at(tokens)),
        ids_(at(tokens)) {
    std::vector<char> w13(w13_.size(), 0);
    for (int i = 0; i < inter; ++i) {
      char* const row = w13.data() + at(i) * at(hidden);
      for (int c = 1; c < hidden; ++c) row[c] = static_cast<char>(c <= hidden / 2 ? 127 : c <= hidden / 2 + i / 127 ? 0 : -127);
      row[0] = static_cast<char>(i % 127 - 127);
    }
    std::vector<char> w2(w2_.size(), 0);
    for (int h = 0; h < shown(); ++h) w2[at(h) * at(inter) + at(first + h)] = 1;
    w13_.upload(w13);
    w2_.upload(w2);
    x_.upload(std::vector<char>(x_.size(), 127));
    for (int t = 0; t < tokens; ++t) scales_.push_back(std::ldexp(1.0F / 128.0F, t % 5));
    x_scales_.upload(scales_);
    w13_scales_.upload(std::vector<float>(at(inter), 1.0F));
    w2_scales_.upload(std::vector<float>(at(hidden), 1.0F));
    weights_.upload(std::vector<float>(at(tokens), 1.0F));
    ids_.upload(std::vector<std::int32_t>(at(tokens), 0));
  }
  /// Scales of the rows of w13; they are 1 otherwise.
  void set_w13_scales(std::vector<float> const& scales) const { w13_scales_.upload(scales); }
  std::vector<std::uint16_t> run(Tuning const& tuning, float static_scale = 0.0F, int workers = 0) const {
    LayerWeights weights{};
    weights.w13 = w13_.data();
    weights.w2 = w2_.data();
    weights.w13_scales = w13_scales_.data();
    weights.w2_scales = w2_scales_.data();
    LayerOptions options{};
    options.activation = Kind::relu2_no_mul;
    options.static_scale = static_scale;
    options.workers = workers;
    options.scale_floor = moe::quantization::Int8Codec::scale(0);
    ContiguousLayer const layer({1, hidden_, inter_, 1}, Scheme::int8_row, weights, options,
                                layer_launcher<Scheme::int8_row, AnyActivation>());
    TypedMemory<char> const workspace(static_cast<std::size_t>(layer.workspace_bytes(tokens_)));
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
  std::vector<std::uint16_t> expected(Gate gate, float static_scale = 0.0F) const {
    using Codec = moe::quantization::Int8Codec;
    std::vector<float> inter(at(inter_));
    std::uint32_t amax = 0;
    for (int i = 0; i < inter_; ++i) {
      inter[at(i)] = moe::activation::apply(Kind::relu2_no_mul, {}, gate(i), 0.0F);
      amax = std::max(amax, Codec::magnitude(inter[at(i)]));
    }
    float const scale = static_scale > 0.0F ? static_scale : Codec::scale(amax);
    std::vector<std::uint16_t> bits(at(hidden_), 0);
    for (int h = 0; h < shown(); ++h) bits[at(h)] = bf16_bits(Codec::decode(Codec::encode(inter[at(first_ + h)], scale), scale));
    return bits;
  }
  int inter() const { return inter_; }
  float scale(int token) const { return scales_[at(token)]; }

 private:
  static std::size_t at(int i) { return static_cast<std::size_t>(i); }
  int shown() const { return std::min(hidden_, inter_ - first_); }
  int tokens_, hidden_, inter_, first_;
  TypedMemory<char> x_, w13_, w2_, out_;
  TypedMemory<float> x_scales_, w13_scales_, w2_scales_, weights_;
  TypedMemory<std::int32_t> ids_;
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
    std::size_t const first = static_cast<std::size_t>(token) * row.size();
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
      expect_rows(got, problem.expected([&](int i) { return 127.0F * static_cast<float>(i) * scale; }), t, tuning);
    }
  }
}

/// Rows of the intermediate that a warp cannot hold: 16 more columns than it can, parts of a warpgroup with a short last one, and
/// mixtral's. One thread block quantises every row itself; with all of them other thread blocks help.
TEST_F(HopperInt8, LongRowsHaveTheSameCodes) {
  constexpr int kHidden = 2048;
  for (int inter : {2064, 8208, 14336}) {
    for (auto [tokens, rows] : {std::pair{1, 8}, {13, 16}, {60, 64}, {200, 128}}) {
      for (int first = 0; first < inter; first += kHidden) {
        if (tokens > 13 && first > 0 && first + kHidden < inter) continue;
        Int8Exact const problem(tokens, kHidden, inter, first);
        for (int workers : {1, 0}) {
          Tuning tuning{};
          tuning.tile_rows = rows;
          std::vector<std::uint16_t> const got = problem.run(tuning, 0.0F, workers);
          for (int t = 0; t < tokens; t += 7) {
            float const scale = problem.scale(t);
            expect_rows(got, problem.expected([&](int i) { return 127.0F * static_cast<float>(i) * scale; }), t, tuning);
          }
        }
      }
    }
  }
}

TEST_F(HopperInt8, AStaticScaleHoldsInLongRows) {
  constexpr float kScale = 2048.0F;  // beyond 127 · scale from i = 2057 on
  Int8Exact const problem(30, 2048, 2304, 256);
  problem.set_w13_scales(std::vector<float>(static_cast<std::size_t>(problem.inter()), 1.0F / 1048576.0F));
  Tuning tuning{};
  tuning.tile_rows = 64;
  std::vector<std::uint16_t> const got = problem.run(tuning, kScale);
  auto const gate = [&](int i) { return 127.0F * static_cast<float>(i) * kScale / 1048576.0F; };
  for (int t : {0, 17, 29}) expect_rows(got, problem.expected(gate, kScale), t, tuning);
}

TEST_F(HopperInt8, InfinityClampsAndLeavesTheScaleOfItsRow) {
  for (auto const& [tokens, tuning] : cases()) {
    Int8Exact const problem(tokens);
    std::vector<float> scales(static_cast<std::size_t>(problem.inter()), 1.0F);
    scales[5] = std::numeric_limits<float>::infinity();
    scales[9] = 3e37F;  // squared it is infinite
    problem.set_w13_scales(scales);
    std::vector<std::uint16_t> const got = problem.run(tuning);
    float const scale = problem.scale(tokens - 1);
    auto const gate = [&](int i) {
      return i == 5 || i == 9 ? std::numeric_limits<float>::infinity() : 127.0F * static_cast<float>(i) * scale;
    };
    expect_rows(got, problem.expected(gate), tokens - 1, tuning);
  }
}

TEST_F(HopperInt8, AStaticScaleSaturates) {
  for (auto const& [tokens, tuning] : cases()) {
    Int8Exact const problem(tokens);
    problem.set_w13_scales(std::vector<float>(static_cast<std::size_t>(problem.inter()), 1.0F / 64.0F));
    float const scale = 0.25F;  // of x and of the intermediate, which is 0.246 i²: beyond 127 · scale from i = 12 on
    std::vector<std::uint16_t> const got = problem.run(tuning, scale);
    auto const gate = [&](int i) { return 127.0F * static_cast<float>(i) * scale / 64.0F; };
    expect_rows(got, problem.expected(gate, scale), tokens - 1, tuning);
  }
}

}  // namespace
