// SPDX-License-Identifier: Apache-2.0
// tests/unit/hopper_packed_store_test.cpp: the store of experts that are packed one after the other: where each expert's codes, scales,
// bricks and factors are, how much memory packing takes, and what it says. A packing of plain copies stands in for the kernels.
#include "moe/experts/hopper/packed_store.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "expect_error.hpp"
#include "moe/core/layer_config.hpp"
#include "moe/eplb/expert_tensors.hpp"
#include "moe/experts/common/check_weights.hpp"
#include "moe/experts/hopper/w4a16_layer.hpp"
#include "moe/experts/hopper/w4a8_layer.hpp"
#include "moe/experts/weights.hpp"
#include "moe/models/loaded_parts.hpp"
#include "moe/quantization/int4_group128.hpp"
#include "moe/quantization/mxfp4.hpp"

namespace {

using namespace moe;
using hopper::LocalShape;
using hopper::W4ExpertSizes;
using hopper::W4Packed;
using hopper::W4Part;
using hopper::W4Scheme;
using hopper::W4StagedMatrix;

constexpr W4Scheme kSchemes[] = {W4Scheme::int4,  W4Scheme::int4_zero, W4Scheme::mxfp4, W4Scheme::int4_32, W4Scheme::int4_32_zero,
                                 W4Scheme::nvfp4, W4Scheme::int8,      W4Scheme::fp8,   W4Scheme::mxfp8};

/// Of every scheme the experts apart take what they take together, without the layer's own state.
template <class Layer>
void expect_same_bytes(W4Scheme scheme, LocalShape const& s, bool gated) {
  W4ExpertSizes const each = Layer::expert_sizes(s, scheme, gated);
  std::int64_t const in_layer = (Layer::packed_bytes(s, scheme, gated) - Layer::state_bytes()) / s.num_experts;
  std::int64_t const head = hopper::has_row_factors(scheme) ? 0 : 2 * 4;  // the factors of experts are in the layer's state
  EXPECT_EQ(each.bytes(), in_layer + head) << name(scheme) << (gated ? ", gated" : "");
  for (int i = 0; i < 2; ++i) EXPECT_EQ(each.bricks[i] % 16, 0) << name(scheme);
}
TEST(PackedExperts, TakeTheBytesOfALayer) {
  for (bool gated : {true, false}) {
    for (W4Scheme scheme : kSchemes) expect_same_bytes<hopper::W4A16Layer>(scheme, {6, 256, 96, 2}, gated);
    for (W4Scheme scheme : {W4Scheme::mxfp4, W4Scheme::int4, W4Scheme::int4_zero, W4Scheme::int4_32, W4Scheme::int4_32_zero}) {
      expect_same_bytes<hopper::W4A8Layer>(scheme, {6, 192, 192, 2}, gated);
    }
  }
}
TEST(PackedExperts, PlacesOfAnExpert) {
  std::vector<std::uint8_t> bytes(1000);
  std::vector<float> floats(100);
  W4Packed const all{{bytes.data(), bytes.data() + 500}, {floats.data(), floats.data() + 50}};
  W4Packed const third = all.from(3, {{64, 32}, {7, 1}});
  EXPECT_EQ(third.bricks[0], bytes.data() + 192);
  EXPECT_EQ(third.bricks[1], bytes.data() + 596);
  EXPECT_EQ(third.factor[0], floats.data() + 21);
  EXPECT_EQ(third.factor[1], floats.data() + 53);
}
TEST(PackedExperts, StagingIsAThirtySecondOfTheExperts) {
  constexpr std::int64_t kCodes = 1 << 20, kScales = (1 << 16) + 4;
  for (std::int64_t experts : {1, 7, 31, 32, 64, 128, 384, 1024}) {
    hopper::W4Staging const s = hopper::plan_w4_staging(experts, kCodes, kScales);
    EXPECT_GE(s.experts, 1);
    EXPECT_LE(s.experts, std::max<std::int64_t>(1, experts / 32));
    EXPECT_GE(s.scales, s.experts * kCodes);
    EXPECT_GE(s.scratch, s.scales + s.experts * kScales);
    EXPECT_GE(s.bytes, s.scratch + std::max<std::int64_t>(8, 4 * s.experts));
    for (std::int64_t offset : {s.scales, s.scratch}) EXPECT_EQ(offset % 256, 0);
    EXPECT_LE(s.bytes, s.experts * (kCodes + kScales) + 3 * 256);
    if (experts >= 7) {  // beside bricks of three such halves an expert, gated
      EXPECT_LT(static_cast<double>(s.bytes), 0.1 * static_cast<double>(experts) * 1.5 * (kCodes + kScales));
    }
  }
}

/// Of every scheme the parts of an expert's matrix lie one after the other, and together they are the matrix.
template <class Layer>
void expect_parts_fill(W4Scheme scheme, LocalShape const& s, bool gated) {
  W4ExpertSizes const whole = Layer::expert_sizes(s, scheme, gated);
  for (bool down : {false, true}) {
    int const i = down ? 1 : 0, features = down ? s.hidden : s.intermediate, step = W4Part::features_of_tile(!down && gated);
    std::int64_t bytes = 0, factors = 0;
    for (int first = 0; first < features; first += step) {
      W4ExpertSizes const place = moe::experts::detail::part_place<Layer>(s, scheme, gated, down, first);
      EXPECT_EQ(place.bricks[i], bytes) << name(scheme) << ", feature " << first;
      EXPECT_EQ(place.factors[i], hopper::has_row_factors(scheme) ? factors : 0) << name(scheme) << ", feature " << first;
      LocalShape part = s;
      (down ? part.hidden : part.intermediate) = std::min(step, features - first);
      bytes += Layer::expert_sizes(part, scheme, gated).bricks[i];
      factors += Layer::expert_sizes(part, scheme, gated).factors[i];
    }
    EXPECT_EQ(bytes, whole.bricks[i]) << name(scheme);
    if (hopper::has_row_factors(scheme)) {
      EXPECT_EQ(factors, whole.factors[i]) << name(scheme);
    }
  }
}
TEST(PackedExperts, PartsFillAMatrix) {
  for (bool gated : {true, false}) {
    for (W4Scheme scheme : kSchemes) expect_parts_fill<hopper::W4A16Layer>(scheme, {6, 576, 416, 2}, gated);
    for (W4Scheme scheme : {W4Scheme::mxfp4, W4Scheme::int4, W4Scheme::int4_zero, W4Scheme::int4_32, W4Scheme::int4_32_zero}) {
      expect_parts_fill<hopper::W4A8Layer>(scheme, {6, 576, 448, 2}, gated);
    }
  }
}
TEST(PackedExperts, PlacesOfAPart) {
  W4Part const up{128, 32, 160};  // the last 32 of 160 features: gate rows 128 to 159, up rows 288 to 319
  EXPECT_EQ(up.whole_row(0), 128);
  EXPECT_EQ(up.whole_row(31), 159);
  EXPECT_EQ(up.whole_row(32), 288);
  EXPECT_EQ(up.whole_row(63), 319);
  EXPECT_EQ(up.whole_place(33 * 4 + 2, 4), 289 * 4 + 2);
  EXPECT_EQ(W4Part{}.whole_place(1234, 10), 1234);
}
TEST(PackedExperts, PartsOfFewExpertsFitASixteenth) {
  constexpr int kFeatures = 14336;
  constexpr std::int64_t kMatrix = std::int64_t{2} * kFeatures * 4096 / 2, kExpert = kMatrix / 2 * 3;  // mixtral-8x7b
  for (std::int64_t experts : {1, 2, 4, 7, 8}) {
    int const features = hopper::part_features(experts, kExpert, kMatrix, kFeatures, true);
    ASSERT_GT(features, 0) << experts;
    EXPECT_EQ(features % 128, 0);
    EXPECT_LE(kMatrix / kFeatures * features, experts * kExpert / 16) << experts;
    EXPECT_GT(kMatrix / kFeatures * (features + 128), experts * kExpert / 16) << experts;
  }
  EXPECT_EQ(hopper::part_features(16, kExpert, kMatrix, kFeatures, true), 0) << "an expert in 16: whole matrices";
  EXPECT_EQ(hopper::part_features(1, kExpert, kMatrix, 100, true), 0) << "less than a tile";
  EXPECT_EQ(hopper::part_features(1, 300, 200, 256, true), 128) << "at least a tile";
}
TEST(PackedExperts, LargestExponentLeavesNaNOut) {
  std::uint8_t const bytes[] = {3, 255, 100, 99};
  EXPECT_EQ(hopper::largest_exponent(bytes, 4), 100);
  EXPECT_EQ(hopper::largest_exponent(bytes + 1, 1), 0);
}

/// Packs by copying: rows of codes in the order of the kernels' tiles, gate and up row of a feature side by side, and each row's first
/// scale as its factor.
struct CopyingLayer {
  static inline std::vector<W4StagedMatrix> calls;
  static inline int refused = -1;  // local expert
  static inline int width = 1024;
  static W4ExpertSizes expert_sizes(LocalShape const& s, W4Scheme, bool gated) {
    std::int64_t const rows13 = (gated ? 2 : 1) * s.intermediate;
    return {{rows13 * s.hidden / 2, s.hidden * s.intermediate / 2LL}, {rows13, s.hidden}};
  }
  static void check_sizes(LocalShape const& s, W4Scheme, int w13_group, int w2_group) {
    EXPECT_EQ(w13_group, 32);
    EXPECT_EQ(w2_group, 32);
    if (s.intermediate > width) throw Error(ErrorCode::config, text("intermediate ", s.intermediate, ", at most ", width));
  }
  static int source_row(int row, int features, bool gate_up) { return !gate_up ? row : row % 2 * features + row / 2; }
  static void pack(LocalShape const& s, W4Scheme, bool gated, W4StagedMatrix const& m, W4Packed const& to) {
    calls.push_back(m);
    if (refused >= m.first_expert && refused < m.first_expert + m.experts) throw Error(ErrorCode::unsupported, text("expert ", refused));
    int const i = m.down ? 1 : 0, features = m.part.given() ? m.part.count : m.down ? s.hidden : s.intermediate;
    int const rows = (!m.down && gated ? 2 : 1) * features, cols = m.down ? s.intermediate : s.hidden;
    for (int e = 0; e < m.experts; ++e) {
      for (int row = 0; row < rows; ++row) {
        std::int64_t const at = std::int64_t{e} * rows + source_row(row, features, !m.down && gated), into = std::int64_t{e} * rows + row;
        std::copy_n(m.codes + at * cols / 2, cols / 2, to.bricks[i] + into * cols / 2);
        to.factor[i][into] = static_cast<float const*>(m.scales)[at * cols / m.group];
      }
    }
    std::memset(m.scratch, 0xFF, static_cast<std::size_t>(hopper::W4Staging::scratch_bytes(m.experts)));
  }
};
template <class Quant>
struct CopiedStorage {
  static constexpr W4Scheme kScheme = W4Scheme::int4_32;
  static constexpr int group(std::int64_t) { return 32; }
};
struct CopyingStorages {
  static constexpr char const* kName = "copying";
  using Layer = CopyingLayer;
  template <class Quant>
  using Of = CopiedStorage<Quant>;
};
struct Config : LayerDefaults {
  using Act = float;
  using Weight = float;
};
using Quant = quantization::WNa16<4, 32>;
using Store = experts::detail::PackedStore<CopyingStorages, Config, Quant, space::host>;
using Reference = experts::WeightStore<Config, Quant>;

constexpr std::int64_t kHidden = 64, kIntermediate = 32;

std::vector<float> numbers(int seed, std::int64_t n) {
  std::vector<float> v(static_cast<std::size_t>(n));
  for (std::size_t i = 0; i < v.size(); ++i)
    v[i] = static_cast<float>((i * 37 + i / 61 + static_cast<std::size_t>(seed) * 101) % 64) / 64.0F - 0.5F;
  return v;
}
std::vector<float> w13_of(int e, std::int64_t h = kHidden, std::int64_t i = kIntermediate) { return numbers(2 * e, 2 * i * h); }
std::vector<float> w2_of(int e, std::int64_t h = kHidden, std::int64_t i = kIntermediate) { return numbers(2 * e + 1, h * i); }

/// Every expert's bricks and factors are made of the codes and scales of that expert.
void expect_experts(Store& store, std::vector<int> const& experts, std::int64_t h = kHidden, std::int64_t inter = kIntermediate) {
  auto const n = static_cast<std::int64_t>(experts.size());
  Reference want(n, h, inter, true);
  for (std::int64_t l = 0; l < n; ++l) {
    int const e = experts[static_cast<std::size_t>(l)];
    want.set_expert(l, w13_of(e, h, inter).data(), w2_of(e, h, inter).data());
  }
  auto const codes = want.view();
  auto const tensors = eplb::expert_tensors(store);
  ASSERT_EQ(tensors.size(), 4U);
  for (std::int64_t l = 0; l < n; ++l) {
    for (std::size_t i = 0; i < 2; ++i) {
      auto const& m = i == 0 ? codes.w13 : codes.w2;
      std::int64_t const bytes = m.cols / 2, scales = m.scales.extent(1) / m.rows;
      std::byte const* const bricks = tensors[i].data + l * tensors[i].stride;
      std::byte const* const factors = tensors[i + 2].data + l * tensors[i + 2].stride;
      int wrong = 0;
      for (std::int64_t row = 0; row < m.rows; ++row) {
        std::int64_t const source = CopyingLayer::source_row(static_cast<int>(row), static_cast<int>(inter), i == 0);
        bool const same =
            std::memcmp(bricks + row * bytes, m.codes.data_handle() + (l * m.rows + source) * bytes, static_cast<std::size_t>(bytes)) == 0;
        wrong += !same || std::memcmp(factors + row * 4, row_ptr(m.scales, l) + source * scales, sizeof(float)) != 0;
      }
      EXPECT_EQ(wrong, 0) << "rows of expert " << l << ", " << tensors[i].name;
    }
  }
}

TEST(PackedStore, PacksEachExpertInItsPlace) {
  Store store(5, kHidden, kIntermediate, true);
  EXPECT_EQ(store.view().unset_expert, 0);
  for (int e : {3, 0, 4, 1, 2}) store.set_expert(e, w13_of(e).data(), w2_of(e).data());
  EXPECT_EQ(store.view().unset_expert, -1);
  expect_experts(store, {0, 1, 2, 3, 4});
  store.set_expert(2, w13_of(9).data(), w2_of(9).data());  // an expert that is replaced
  expect_experts(store, {0, 1, 9, 3, 4});
  EXPECT_EQ(store.bytes(), 5U * (3 * kHidden * kIntermediate / 2 + 4 * (2 * kIntermediate + kHidden)));
}
/// Experts of one call pass the staging memory in groups, each matrix of a group in one call of the kernels.
TEST(PackedStore, ManyExpertsOfOneCall) {
  constexpr int kExperts = 100;  // three at once
  Reference all(kExperts, kHidden, kIntermediate, true);
  for (int e = 0; e < kExperts; ++e) all.set_expert(e, w13_of(e).data(), w2_of(e).data());
  auto const v = all.view();
  Store store(kExperts, kHidden, kIntermediate, true);
  CopyingLayer::calls.clear();
  auto const n = store.counts();
  store.pack(0, 1, {v.w13.codes.data_handle(), v.w2.codes.data_handle(), v.w13.scales.data_handle(), v.w2.scales.data_handle()});
  store.pack(1, kExperts - 1,
             {v.w13.codes.data_handle() + n.w13, v.w2.codes.data_handle() + n.w2, v.w13.scales.data_handle() + n.w13_scales,
              v.w2.scales.data_handle() + n.w2_scales});
  std::vector<int> experts(kExperts);
  std::iota(experts.begin(), experts.end(), 0);
  expect_experts(store, experts);
  ASSERT_EQ(CopyingLayer::calls.size(), 2U + 2U * 33U);
  EXPECT_EQ(CopyingLayer::calls[2].experts, 3);
  EXPECT_EQ(CopyingLayer::calls[2].first_expert, 1);
  EXPECT_TRUE(CopyingLayer::calls[3].down);
  EXPECT_EQ(CopyingLayer::calls.back().first_expert, 97);
  EXPECT_EQ(CopyingLayer::calls[2].codes, CopyingLayer::calls[3].codes) << "both matrices pass the same memory";
  EXPECT_LT(static_cast<double>(store.staging_bytes()), 0.1 * static_cast<double>(store.bytes()));
}
/// Matrices of few experts pass in parts: gate and up rows of 128 features and more, 256 rows of w2 and more.
TEST(PackedStore, FewExpertsPassInParts) {
  constexpr std::int64_t kH = 576, kI = 288;
  for (int experts : {1, 3, 6}) {
    Store store(experts, kH, kI, true);
    CopyingLayer::calls.clear();
    std::vector<int> order;
    for (int e = 0; e < experts; ++e) {
      store.set_expert(e, w13_of(e, kH, kI).data(), w2_of(e, kH, kI).data());
      order.push_back(e);
    }
    expect_experts(store, order, kH, kI);
    if (experts > 1) continue;
    ASSERT_EQ(CopyingLayer::calls.size(), 6U);
    EXPECT_EQ(CopyingLayer::calls[1].part.first, 128);
    EXPECT_EQ(CopyingLayer::calls[2].part.count, 32);
    EXPECT_EQ(CopyingLayer::calls[5].part.first, 512);
    EXPECT_EQ(CopyingLayer::calls[5].part.count, 64);
  }
  EXPECT_LT(Store(6, kH, kI, true).staging_bytes(), Store(100, kH, kI, true).staging_bytes());
}
TEST(PackedStore, ViewIsPackedForTheseExpertsAlone) {
  Store store(2, kHidden, kIntermediate, true);
  for (int e : {0, 1}) store.set_expert(e, w13_of(e).data(), w2_of(e).data());
  std::vector<float> const bias = numbers(5, 2 * kIntermediate);
  for (int e : {0, 1}) store.set_bias(e, bias.data(), bias.data());
  auto const v = store.view();
  EXPECT_EQ(v.w13.codes.data_handle(), nullptr);
  EXPECT_EQ(v.w13.codes.extent(0), 2);
  EXPECT_STREQ(v.packed.policy, "copying");
  EXPECT_EQ(v.w2.bias.extent(0), 2);
  experts::check_weights<Quant>(v, kHidden, kIntermediate, true, "copying");
  moe_test::expect_error(ErrorCode::argument, "packed for the experts copying, these are hopper_w4a8",
                         [&] { experts::check_weights<Quant>(v, kHidden, kIntermediate, true, "hopper_w4a8"); });
  moe_test::expect_error(ErrorCode::argument, "packed for the experts copying, these are others, which read codes and scales",
                         [&] { experts::check_weights<Quant>(v, kHidden, kIntermediate, true); });
  moe_test::expect_error(ErrorCode::argument, "w13 rows is 64, expected 32",
                         [&] { experts::check_weights<Quant>(v, kHidden, kIntermediate, false, "copying"); });
  Store moved = std::move(store);
  EXPECT_EQ(moved.view().packed.bricks[0], v.packed.bricks[0]);
}
TEST(PackedStore, Refusals) {
  Store store(3, kHidden, kIntermediate, true);
  moe_test::expect_error(ErrorCode::argument, "local expert 3 is out of range [0, 3)",
                         [&] { store.set_expert(3, w13_of(0).data(), w2_of(0).data()); });
  moe_test::expect_error(ErrorCode::argument, "local expert 4 is out of range [0, 3)", [&] { store.pack(2, 3, {}); });
  moe_test::expect_error(ErrorCode::argument, "w13 is a null pointer",
                         [&] { store.set_expert(0, static_cast<float const*>(nullptr), w2_of(0).data()); });
  moe_test::expect_error(ErrorCode::config, "needs hidden to be a multiple of 32, got 65", [] { Store(3, 65, kIntermediate, true); });
  CopyingLayer::width = 16;
  moe_test::expect_error(ErrorCode::config, "intermediate 32, at most 16", [] { Store(3, kHidden, kIntermediate, true); });
  CopyingLayer::width = 1024;
  CopyingLayer::refused = 1;
  moe_test::expect_error(ErrorCode::unsupported, "expert 1", [&] { store.set_expert(1, w13_of(0).data(), w2_of(0).data()); });
  CopyingLayer::refused = -1;
  store.set_expert(0, w13_of(0).data(), w2_of(0).data());
  EXPECT_EQ(store.view().unset_expert, 1) << "an expert that was refused is not set";
}

/// A loader of read_into(): expert e of the definition above, read by several threads.
struct Loader {
  using Arrays = io::ExpertArrays<Quant::WeightCode<float>, float>;
  Reference const& all;
  mutable std::vector<std::int64_t> progress{};
  std::int64_t expert_bytes() const { return 10; }
  template <class ArraysOf>
  void read_all(std::span<int const> experts, int, ArraysOf const& arrays, io::LoadProgress const&) const {
    auto const v = all.view();
    for (std::size_t l = 0; l < experts.size(); ++l) {
      Arrays const to = arrays(static_cast<std::int64_t>(l));
      auto const copy = [&](auto const& m, auto* codes, float* scales) {
        std::int64_t const n = m.codes.extent(1) * m.codes.extent(2);
        std::copy_n(m.codes.data_handle() + experts[l] * n, n, codes);
        std::copy_n(row_ptr(m.scales, experts[l]), m.scales.extent(1), scales);
      };
      copy(v.w13, to.w13, to.w13_scales);
      copy(v.w2, to.w2, to.w2_scales);
    }
  }
};
TEST(PackedStore, IsFilledByALoader) {
  Reference all(40, kHidden, kIntermediate, true);
  for (int e = 0; e < 40; ++e) all.set_expert(e, w13_of(e).data(), w2_of(e).data());
  Loader const loader{all};
  for (int threads : {1, 3, 64}) {
    std::vector<int> experts;
    for (int l = 0; l < 19; ++l) experts.push_back(l * 7 % 40);
    Store store(19, kHidden, kIntermediate, true);
    std::vector<std::int64_t> done;
    models::read_into<space::host>(store, loader, experts, threads, [&](std::int64_t d, std::int64_t total) {
      EXPECT_EQ(total, 190);
      done.push_back(d);
    });
    EXPECT_EQ(store.view().unset_expert, -1);
    expect_experts(store, experts);
    ASSERT_FALSE(done.empty());
    EXPECT_EQ(done.back(), 190);
    EXPECT_TRUE(std::is_sorted(done.begin(), done.end()));
  }
}

}  // namespace
