// SPDX-License-Identifier: Apache-2.0
// tests/unit/io_layer_weights_test.cpp: one layer's weights from every layout, stored form and shard, and errors in files.
#include "moe/io/layer_weights.hpp"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "at.hpp"
#include "expect_error.hpp"
#include "moe/io/safetensors_writer.hpp"
#include "moe/parallel/placement.hpp"
#include "temporary_directory.hpp"

namespace {

namespace fs = std::filesystem;
using moe::ErrorCode;
using moe_test::at;
using moe_test::expect_error;
using moe_test::TemporaryDirectory;
using namespace moe::io;

constexpr std::int64_t kE = 4, kH = 12, kI = 6;
/// A different small value at every position; exact in bf16.
float value(std::int64_t tensor, std::int64_t e, std::int64_t i, std::int64_t j) {
  return static_cast<float>((tensor * 61 + e * 37 + i * 13 + j * 5) % 251 - 125);
}
float gate(std::int64_t e, std::int64_t i, std::int64_t h) { return value(1, e, i, h); }
float up(std::int64_t e, std::int64_t i, std::int64_t h) { return value(2, e, i, h); }
float down(std::int64_t e, std::int64_t h, std::int64_t i) { return value(3, e, h, i); }

struct Tensor {
  std::vector<std::int64_t> shape;
  std::vector<float> data;
};
template <class F>
Tensor tensor(std::vector<std::int64_t> shape, F f) {
  Tensor t{shape, {}};
  std::int64_t n = 1;
  for (std::int64_t d : shape) n *= d;
  std::int64_t const cols = shape.back(), rows = shape.size() > 1 ? shape[shape.size() - 2] : 1;
  for (std::int64_t k = 0; k < n; ++k) t.data.push_back(f(k / (rows * cols), k / cols % rows, k % cols));
  return t;
}
using Tensors = std::map<std::string, Tensor>;

std::string const kRoot = "model.layers.1.mlp.";

Tensors router() {
  return {{kRoot + "gate.weight", tensor({kE, kH}, [](auto, auto i, auto j) { return value(4, 0, i, j); })}};
}
Tensors per_expert(char const* g = "gate_proj", char const* u = "up_proj", char const* d = "down_proj") {
  Tensors t = router();
  for (std::int64_t e = 0; e < kE; ++e) {
    std::string const base = kRoot + "experts." + std::to_string(e) + ".";
    t[base + g + ".weight"] = tensor({kI, kH}, [&](auto, auto i, auto j) { return gate(e, i, j); });
    t[base + u + ".weight"] = tensor({kI, kH}, [&](auto, auto i, auto j) { return up(e, i, j); });
    t[base + d + ".weight"] = tensor({kH, kI}, [&](auto, auto i, auto j) { return down(e, i, j); });
  }
  return t;
}
float gate_up(std::int64_t e, std::int64_t row, std::int64_t h) { return row < kI ? gate(e, row, h) : up(e, row - kI, h); }
Tensors fused() {
  Tensors t = router();
  t[kRoot + "experts.gate_up_proj"] = tensor({kE, 2 * kI, kH}, gate_up);
  t[kRoot + "experts.down_proj"] = tensor({kE, kH, kI}, down);
  return t;
}
Tensors transposed() {
  Tensors t = router();
  t[kRoot + "experts.gate_up_proj"] = tensor({kE, kH, 2 * kI}, [](auto e, auto h, auto row) { return gate_up(e, row, h); });
  t[kRoot + "experts.down_proj"] = tensor({kE, kI, kH}, [](auto e, auto i, auto h) { return down(e, h, i); });
  return t;
}
Tensors interleaved() {
  Tensors t = router();
  t[kRoot + "experts.gate_up_proj"] =
      tensor({kE, kH, 2 * kI}, [](auto e, auto h, auto row) { return row % 2 == 0 ? gate(e, row / 2, h) : up(e, row / 2, h); });
  t[kRoot + "experts.down_proj"] = tensor({kE, kI, kH}, [](auto e, auto i, auto h) { return down(e, h, i); });
  return t;
}
Tensors stacked() {
  Tensors t = router();
  t[kRoot + "experts.mlp.w1"] = tensor({kE * kI, kH}, [](auto, auto r, auto h) { return gate(r / kI, r % kI, h); });
  t[kRoot + "experts.mlp.v1"] = tensor({kE * kI, kH}, [](auto, auto r, auto h) { return up(r / kI, r % kI, h); });
  t[kRoot + "experts.mlp.w2"] = tensor({kE * kI, kH}, [](auto, auto r, auto h) { return down(r / kI, h, r % kI); });
  return t;
}
/// Inkling: stacked, rows of gate and up in turns.
Tensors interleaved_rows() {
  Tensors t = router();
  t[kRoot + "experts.w13_weight"] =
      tensor({kE, 2 * kI, kH}, [](auto e, auto row, auto h) { return row % 2 == 0 ? gate(e, row / 2, h) : up(e, row / 2, h); });
  t[kRoot + "experts.w2_weight"] = tensor({kE, kH, kI}, down);
  return t;
}
/// Step-3.7: stacked, each projection in a tensor of its own beside the router.
Tensors apart() {
  Tensors t = router();
  t[kRoot + "gate_proj.weight"] = tensor({kE, kI, kH}, gate);
  t[kRoot + "up_proj.weight"] = tensor({kE, kI, kH}, up);
  t[kRoot + "down_proj.weight"] = tensor({kE, kH, kI}, down);
  return t;
}
/// Aria: transposed, with names of its own.
Tensors aria() {
  Tensors t = transposed();
  t[kRoot + "experts.fc1.weight"] = t[kRoot + "experts.gate_up_proj"];
  t[kRoot + "experts.fc2.weight"] = t[kRoot + "experts.down_proj"];
  t.erase(kRoot + "experts.gate_up_proj");
  t.erase(kRoot + "experts.down_proj");
  return t;
}
Tensors granite() {
  Tensors t = router();
  t[kRoot + "input_linear.weight"] = tensor({kE, 2 * kI, kH}, gate_up);
  t[kRoot + "output_linear.weight"] = tensor({kE, kH, kI}, down);
  return t;
}

LayerDescription description(WeightLayout layout = WeightLayout::automatic) {
  LayerDescription d;
  d.hidden = kH;
  d.intermediate = kI;
  d.router.num_experts = kE;
  d.router.topk = 2;
  d.router.renorm = moe::routing::Renorm::sum;
  d.layout = layout;
  return d;
}
/// The tensors as a file in memory.
class Store {
 public:
  explicit Store(Tensors const& tensors) {
    SafetensorsWriter writer;
    for (auto const& [name, t] : tensors) writer.add<float>(name, t.shape, t.data);
    writer.write(directory_.path() / "model.safetensors");
    store_ = std::make_unique<TensorStore>(directory_.path());
  }
  TensorStore const& operator*() const { return *store_; }
  TensorStore const* operator->() const { return store_.get(); }

 private:
  TemporaryDirectory directory_;
  std::unique_ptr<TensorStore> store_;
};
template <class T = float>
HostLayerWeights<T> load(Tensors const& tensors, LayerDescription const& d = description(), LoadOptions const& options = {}) {
  Store const store(tensors);
  return LayerLoader::from_checkpoint(*store, d, 1).load<T>(options);
}

void expect_canonical(HostLayerWeights<float> const& w) {
  ASSERT_EQ(w.w13.size(), at(kE * 2 * kI * kH));
  ASSERT_EQ(w.w2.size(), at(kE * kH * kI));
  for (std::int64_t e = 0; e < kE; ++e) {
    for (std::int64_t h = 0; h < kH; ++h) {
      for (std::int64_t r = 0; r < 2 * kI; ++r)
        ASSERT_EQ(w.w13[at((e * 2 * kI + r) * kH + h)], gate_up(e, r, h)) << e << ' ' << r << ' ' << h;
      for (std::int64_t i = 0; i < kI; ++i) ASSERT_EQ(w.w2[at((e * kH + h) * kI + i)], down(e, h, i)) << e << ' ' << h << ' ' << i;
    }
  }
}

TEST(LayerWeights, M4_AllLayoutsGiveIdenticalTensors) {
  expect_canonical(load(per_expert()));
  expect_canonical(load(per_expert("w1", "w3", "w2")));
  expect_canonical(load(per_expert("linear", "linear_v", "linear_1")));
  expect_canonical(load(fused()));
  expect_canonical(load(transposed()));
  expect_canonical(load(granite()));
  expect_canonical(load(fused(), description(WeightLayout::fused)));
  expect_canonical(load(transposed(), description(WeightLayout::fused_transposed)));
  expect_canonical(load(interleaved(), description(WeightLayout::fused_transposed_interleaved)));
  expect_canonical(load(stacked(), description(WeightLayout::stacked)));
  expect_canonical(load(interleaved_rows()));
  expect_canonical(load(apart()));
  expect_canonical(load(aria(), description(WeightLayout::fused_transposed)));
}

TEST(LayerWeights, StackedLayoutsNameWhatIsMissingOrMisshapen) {
  for (char const* shard : {"up_proj.weight", "down_proj.weight"}) {
    Tensors t = apart();
    t.erase(kRoot + shard);
    expect_error(ErrorCode::argument, "missing expert weights: layer 1, all experts, shard " + std::string(shard), [&] { load(t); });
    t[kRoot + shard] = tensor({kE, kI, kH + 1}, up);
    expect_error(ErrorCode::argument, shard, [&] { load(t); });
  }
  Tensors t = interleaved_rows();
  t.erase(kRoot + "experts.w2_weight");
  expect_error(ErrorCode::argument, "all experts, shard experts.w2_weight", [&] { load(t); });
  t[kRoot + "experts.w2_weight"] = tensor({kE, kI, kH}, up);
  expect_error(ErrorCode::argument, "experts.w2_weight", [&] { load(t); });
}

TEST(LayerWeights, Invariant1_Bf16IsKeptBitForBit) {
  auto const w = load<moe::bf16>(transposed());
  for (std::int64_t r = 0; r < 2 * kI; ++r) EXPECT_EQ(moe::to_float(w.w13[at(r * kH + 3)]), gate_up(0, r, 3));
}

TEST(LayerWeights, ExpertsComeInTheOrderAskedFor) {
  LoadOptions const options{.experts = std::vector<int>{3, 1}};
  auto const w = load(fused(), description(), options);
  EXPECT_EQ(w.experts, (std::vector<int>{3, 1}));
  EXPECT_EQ(w.w13[0], gate(3, 0, 0));
  EXPECT_EQ(w.w13[at(2 * kI * kH)], gate(1, 0, 0));
  EXPECT_TRUE(load(fused(), description(), {.experts = std::vector<int>{}}).w13.empty());
  expect_error(ErrorCode::argument, "expert 4 is out of range [0, 4)",
               [] { load(fused(), description(), {.experts = std::vector<int>{4}}); });
}

/// With replicas, every expert slot gets its expert's weights.
TEST(LayerWeights, M7_ReplicasAreLoadedIntoEveryExpertSlot) {
  std::vector<std::int32_t> const map{3, 1, 0, 0, 0, 2};
  auto const placement = moe::ExpertPlacement::from_physical_to_logical(map, kE, 3);
  for (int rank = 0; rank < 3; ++rank) {
    LoadOptions options;
    options.experts.emplace();
    for (std::int32_t slot : placement.local_to_physical(rank)) options.experts->push_back(placement.logical(slot));
    for (auto const& [tensors, layout] : {std::pair{fused(), WeightLayout::automatic}, std::pair{per_expert(), WeightLayout::automatic},
                                          std::pair{stacked(), WeightLayout::stacked}}) {
      auto const w = load(tensors, description(layout), options);
      ASSERT_EQ(w.w13.size(), at(2 * 2 * kI * kH));
      for (std::int64_t slot = 0; slot < 2; ++slot) {
        std::int32_t const e = map[at(2 * rank + slot)];
        for (std::int64_t h = 0; h < kH; ++h) {
          for (std::int64_t r = 0; r < 2 * kI; ++r) ASSERT_EQ(w.w13[at((slot * 2 * kI + r) * kH + h)], gate_up(e, r, h));
          for (std::int64_t i = 0; i < kI; ++i) ASSERT_EQ(w.w2[at((slot * kH + h) * kI + i)], down(e, h, i));
        }
      }
    }
  }
}

TEST(LayerWeights, TensorParallelTakesRowsAndColumns) {
  for (auto const& [tensors, layout] : {std::pair{per_expert(), WeightLayout::automatic}, std::pair{stacked(), WeightLayout::stacked}}) {
    for (int rank : {0, 1}) {
      auto const w = load(tensors, description(layout), {.tp_rank = rank, .tp_size = 2});
      std::int64_t const part = kI / 2, first = rank * part;
      ASSERT_EQ(w.intermediate, part);
      for (std::int64_t e = 0; e < kE; ++e) {
        for (std::int64_t h = 0; h < kH; ++h) {
          for (std::int64_t i = 0; i < part; ++i) {
            ASSERT_EQ(w.w13[at((e * 2 * part + i) * kH + h)], gate(e, first + i, h));
            ASSERT_EQ(w.w13[at((e * 2 * part + part + i) * kH + h)], up(e, first + i, h));
            ASSERT_EQ(w.w2[at((e * kH + h) * part + i)], down(e, h, first + i));
          }
        }
      }
    }
  }
  expect_error(ErrorCode::config, "tp_size 4 does not divide the intermediate sizes 6",
               [] { load(fused(), description(), {.tp_size = 4}); });
  expect_error(ErrorCode::argument, "tp_rank 2 is out of range [0, 2)", [] { load(fused(), description(), {.tp_rank = 2, .tp_size = 2}); });
}

TEST(LayerWeights, BiasesFollowTheirRows) {
  Tensors t = interleaved();
  t[kRoot + "gate.bias"] = tensor({kE}, [](auto, auto, auto j) { return static_cast<float>(j); });
  t[kRoot + "experts.gate_up_proj_bias"] = tensor({kE, 2 * kI}, [](auto, auto e, auto r) { return static_cast<float>(100 * e + r); });
  t[kRoot + "experts.down_proj_bias"] = tensor({kE, kH}, [](auto, auto e, auto h) { return static_cast<float>(1000 * e + h); });
  LayerDescription d = description(WeightLayout::fused_transposed_interleaved);
  d.expert_bias = d.router_bias = true;
  auto const w = load(t, d);
  EXPECT_EQ(w.router_bias, (std::vector<float>{0, 1, 2, 3}));
  EXPECT_EQ(w.w13_bias[at(2 * kI + 1)], 102.0F) << "gate 1 of expert 1 was at column 2";
  EXPECT_EQ(w.w13_bias[at(2 * kI + kI)], 101.0F) << "up 0 of expert 1 was at column 1";
  EXPECT_EQ(w.w2_bias[at(kH + 5)], 1005.0F);
  auto const second = load(t, d, {.tp_rank = 1, .tp_size = 2});
  EXPECT_EQ(second.w13_bias[0], 6.0F) << "gate 3 of expert 0";
  EXPECT_TRUE(std::ranges::all_of(second.w2_bias, [](float b) { return b == 0.0F; })) << "only one partition adds the down bias";
  t.erase(kRoot + "experts.down_proj_bias");
  expect_error(ErrorCode::argument, "missing expert weights: layer 1, expert 0, shard bias", [&] { load(t, d); });
}

TEST(LayerWeights, OneExpertWithBiases) {
  Tensors t = interleaved();
  t[kRoot + "experts.gate_up_proj_bias"] = tensor({kE, 2 * kI}, [](auto, auto, auto r) { return static_cast<float>(r); });
  t[kRoot + "experts.down_proj_bias"] = tensor({kE, kH}, [](auto, auto, auto h) { return static_cast<float>(h); });
  for (auto& [name, some] : t) {
    some.shape[0] = 1;
    some.data.resize(some.data.size() / at(kE));
  }
  LayerDescription d = description(WeightLayout::fused_transposed_interleaved);
  d.expert_bias = true;
  d.router.num_experts = d.router.topk = 1;
  auto const w = load(t, d);
  EXPECT_EQ(w.w13_bias[1], 2.0F) << "gate 1 was at column 2";
  EXPECT_EQ(w.w2_bias[5], 5.0F);
}

TEST(LayerWeights, SharedExpertsThatTheConfigurationDoesNotHave) {
  Tensors t = per_expert();
  t[kRoot + "shared_experts.up_proj.weight"] = tensor({kI, kH}, up);
  expect_error(ErrorCode::config, "layer 1: the configuration has no shared experts, but", [&] { load(t); });
}

TEST(LayerWeights, M3_MissingExpert) {
  Tensors t = per_expert();
  t.erase(kRoot + "experts.2.up_proj.weight");
  expect_error(ErrorCode::argument,
               "missing expert weights: layer 1, expert 2, shard up_proj ('model.layers.1.mlp.experts.2.up_proj.weight' in '",
               [&] { load(t); });
  EXPECT_NO_THROW(load(t, description(), {.experts = std::vector<int>{0, 1, 3}})) << "a remote expert is not needed";
  t = fused();
  t.erase(kRoot + "experts.down_proj");
  expect_error(ErrorCode::argument, "missing expert weights: layer 1, all experts, shard experts.down_proj", [&] { load(t); });
  expect_error(ErrorCode::argument, "missing expert weights: layer 1, no expert tensors under 'model.layers.1.mlp.'",
               [&] { load(router()); });
  expect_error(ErrorCode::argument, "layer 1: no router weight under 'model.layers.1.'", [&] { load({{"x", tensor({1}, gate)}}); });
}

TEST(LayerWeights, M3_WrongShapeNamesBoth) {
  Tensors t = per_expert();
  t[kRoot + "experts.3.down_proj.weight"] = tensor({kI, kH}, down);
  expect_error(ErrorCode::argument, "shape [6, 12], expected [12, 6]", [&] { load(t); });
  t = router();
  t[kRoot + "gate.weight"] = tensor({kE + 1, kH}, gate);
  expect_error(ErrorCode::argument, "shape [5, 12], expected [4, 12]", [&] { load(t); });
  t = fused();
  t[kRoot + "experts.gate_up_proj"] = tensor({kE, 2 * kI, kH + 1}, gate_up);
  expect_error(ErrorCode::argument, "shapes [4, 12, 13] and [4, 12, 6], expected [4, 12, 12] and [4, 12, 6] or both transposed",
               [&] { load(t); });
  expect_error(ErrorCode::argument, "shape [4, 6, 12], expected [4, 12, 6]", [&] { load(transposed(), description(WeightLayout::fused)); });
}

TEST(LayerWeights, ShapesAreCheckedBeforeMemoryIsTaken) {
  constexpr std::int64_t kAbsurd = std::int64_t{1} << 40;
  LayerDescription d = description();
  d.intermediate = kAbsurd;
  expect_error(ErrorCode::argument, "shape [6, 12], expected [1099511627776, 12]", [&] { load(per_expert(), d); });
  expect_error(ErrorCode::argument, "shape [6, 12], expected [1099511627776, 12]", [&] { load(per_expert(), d, {.tp_size = 2}); });
  d = description();
  d.hidden = kAbsurd;
  expect_error(ErrorCode::argument, "shape [4, 12], expected [4, 1099511627776]", [&] { load(per_expert(), d); });
  d = description();
  d.intermediate = kAbsurd;
  Tensors packed = per_expert();
  packed.erase(kRoot + "experts.0.gate_proj.weight");
  packed[kRoot + "experts.0.gate_proj.weight_packed"] = tensor({kI, kH / 2}, gate);
  expect_error(ErrorCode::argument, "shape [6, 6] is too small for a weight [1099511627776, 12]", [&] { load(packed, d); });
  d = description();
  d.shared = {.count = 1, .intermediate = kAbsurd};
  Tensors t = per_expert();
  for (char const* name : {"gate_proj", "up_proj"}) t[kRoot + "shared_experts." + name + ".weight"] = tensor({4, kH}, gate);
  t[kRoot + "shared_experts.down_proj.weight"] = tensor({kH, 4}, down);
  expect_error(ErrorCode::argument, "shape [4, 12], expected [1099511627776, 12]", [&] { load(t, d); });
}

TEST(LayerWeights, M3_ExtraExpert) {
  Tensors t = per_expert();
  t[kRoot + "experts.4.up_proj.weight"] = tensor({kI, kH}, up);
  expect_error(ErrorCode::argument, "unexpected expert weights: layer 1, expert 4", [&] { load(t); });
}

TEST(LayerWeights, M12_SelectionBiasIsSqueezed) {
  LayerDescription d = description();
  d.correction_bias = true;
  for (auto const& [name, shape] : {std::pair{"moe_statics.e_score_correction_bias", std::vector<std::int64_t>{1, kE}},
                                    std::pair{"gate.e_score_correction_bias", std::vector<std::int64_t>{kE}},
                                    std::pair{"expert_bias", std::vector<std::int64_t>{kE}}}) {
    Tensors t = per_expert();
    t[kRoot + name] = tensor(shape, [](auto, auto, auto j) { return static_cast<float>(j) + 0.5F; });
    EXPECT_EQ(load(t, d).correction_bias, (std::vector<float>{0.5F, 1.5F, 2.5F, 3.5F})) << name;
    t[kRoot + name] = tensor({1, kE + 1}, gate);
    expect_error(ErrorCode::argument, "shape [1, 5], expected [4]", [&] { load(t, d); });
  }
  expect_error(ErrorCode::argument, "(the selection bias) is missing", [&] { load(per_expert(), d); });
}

TEST(LayerWeights, ARouterThatReadsTheLayerBeforeIsRefused) {
  LayerDescription d = description();
  d.router_input = RouterInput::mlp;
  Tensors t = per_expert();
  t[kRoot + "gate.router_states_scale"] = tensor({8}, gate);
  expect_error(ErrorCode::unsupported, "layer 1: its router adds the router states of layer 0", [&] { load(t, d); });
}

TEST(LayerWeights, SharedExpertsOfAnyName) {
  for (auto const& [base, g, u, dn] :
       {std::array{"shared_expert.", "gate_proj", "up_proj", "down_proj"}, std::array{"shared_experts.", "w1", "w3", "w2"},
        std::array{"shared_mlp.", "gate_proj", "up_proj", "down_proj"}}) {
    Tensors t = per_expert();
    LayerDescription d = description();
    d.shared = {.count = 1, .intermediate = 4, .gate = SharedGate::sigmoid};
    t[kRoot + base + g + ".weight"] = tensor({4, kH}, [](auto, auto i, auto j) { return gate(9, i, j); });
    t[kRoot + base + u + ".weight"] = tensor({4, kH}, [](auto, auto i, auto j) { return up(9, i, j); });
    t[kRoot + base + dn + ".weight"] = tensor({kH, 4}, [](auto, auto i, auto j) { return down(9, i, j); });
    expect_error(ErrorCode::argument, "'model.layers.1.mlp.shared_expert_gate.weight' is missing", [&] { load(t, d); });
    t[kRoot + "shared_expert_gate.weight"] = tensor({1, kH}, gate);
    auto const w = load(t, d);
    EXPECT_EQ(w.shared.intermediate, 4);
    EXPECT_EQ(w.shared.w13[at(5 * kH + 2)], up(9, 1, 2));
    EXPECT_EQ(w.shared.w2[at(3 * 4 + 1)], down(9, 3, 1));
    EXPECT_EQ(w.shared.gate.size(), at(kH));
    EXPECT_TRUE(load(t, d, {.shared = false}).shared.w13.empty());
  }
  LayerDescription d = description();
  d.shared = {.count = 1, .intermediate = 4};
  expect_error(ErrorCode::argument, "missing expert weights: layer 1, shared expert 0", [&] { load(per_expert(), d); });
}

TEST(LayerWeights, ShardsAreMappedOnlyWhenNeeded) {
  TemporaryDirectory const dir;
  Tensors const all = per_expert();
  nlohmann::json map;
  for (std::string shard : {"a", "b", "c"}) {
    SafetensorsWriter writer;
    for (auto const& [name, t] : all) {
      // Expert 3 alone lies in shard c; the others' down projections in b.
      bool const c = name.find("experts.3.") != std::string::npos, b = !c && name.find("down_proj") != std::string::npos;
      if ((c ? "c" : b ? "b" : "a") != shard) continue;
      writer.add<float>(name, t.shape, t.data);
      map[name] = shard + ".safetensors";
    }
    writer.write(dir.path() / (shard + ".safetensors"));
  }
  std::ofstream(dir.path() / "model.safetensors.index.json") << nlohmann::json{{"weight_map", map}};
  {
    TensorStore const store(dir.path());
    auto const w = LayerLoader::from_checkpoint(store, description(), 1).load<float>({.experts = std::vector<int>{0, 1}});
    EXPECT_EQ(store.shards_open(), 2U);
    EXPECT_EQ(store.bytes_read(), at((2 * 3 * kI * kH + kE * kH) * 4)) << "two experts and the router";
  }
  {
    TensorStore const store(dir.path());
    expect_canonical(LayerLoader::from_checkpoint(store, description(), 1).load<float>());
    EXPECT_EQ(store.shards_open(), 3U);
  }
  fs::remove(dir.path() / "c.safetensors");
  TensorStore const store(dir.path());
  expect_error(ErrorCode::argument, "cannot open", [&] { LayerLoader::from_checkpoint(store, description(), 1).load<float>(); });
  EXPECT_NO_THROW(LayerLoader::from_checkpoint(store, description(), 1).load<float>({.experts = std::vector<int>{0}}));
}

TEST(TensorStore, MalformedIndexes) {
  TemporaryDirectory const dir;
  auto const refusal = [&](std::string const& index) {
    std::ofstream(dir.path() / "model.safetensors.index.json") << index;
    return expect_error(ErrorCode::argument, [&] { TensorStore store(dir.path()); });
  };
  expect_error(ErrorCode::argument, "0 other .safetensors files, expected 1", [&] { TensorStore store(dir.path()); });
  expect_error(ErrorCode::argument, "No such file", [&] { TensorStore store(dir.path() / "none"); });
  EXPECT_HAS(refusal("{"), "is not valid JSON at byte 2");
  EXPECT_HAS(refusal("{}"), "'weight_map' is missing");
  EXPECT_HAS(refusal(R"({"weight_map": {"a": 7}})"), "entry of tensor 'a' is not a file name");
  EXPECT_HAS(refusal(R"({"weight_map": {"a": "../../etc/passwd"}})"), "is not a plain file name");
  EXPECT_HAS(refusal(R"({"weight_map": {"a": ".."}})"), "is not a plain file name");
  std::ofstream(dir.path() / "model.safetensors.index.json") << R"({"weight_map": {"a": "s.safetensors"}})";
  SafetensorsWriter writer;
  writer.add<float>("b", {1}, std::vector<float>{1});
  writer.write(dir.path() / "s.safetensors");
  TensorStore const store(dir.path());
  expect_error(ErrorCode::argument, "tensor 'a' is missing in '", [&] { (void)store.find("a"); });
  EXPECT_FALSE(store.find("b")) << "what the index does not list is not there";
}

// Stored forms

/// A per-expert file whose expert 0 is e4m3 with the given scales; dequantised value of code c is its table value times the scale.
struct Fp8File {
  std::int64_t h = 160, i = 192;
  TemporaryDirectory dir;
  SafetensorsWriter writer;
  std::vector<std::uint8_t> codes = std::vector<std::uint8_t>(static_cast<std::size_t>(160 * 192));
  LayerDescription d = description();
  Fp8File() {
    d.hidden = h;
    d.intermediate = i;
    d.router.num_experts = 1;
    d.router.topk = 1;
    for (std::size_t k = 0; k < codes.size(); ++k) codes[k] = static_cast<std::uint8_t>((k * 7) % 0x7F | (k % 3 == 0 ? 0x80U : 0U));
    writer.add<float>(kRoot + "gate.weight", {1, h}, std::vector<float>(at(h)));
  }
  void add(std::string const& projection, std::int64_t n, std::int64_t k, std::string const& scale, std::vector<std::int64_t> shape,
           std::vector<float> scales) {
    std::string const base = kRoot + "experts.0." + projection;
    writer.add_bytes(base + ".weight", FileDType::f8_e4m3, {n, k}, std::as_bytes(std::span(codes)));
    writer.add<float>(base + scale, std::move(shape), std::move(scales));
  }
  HostLayerWeights<float> load(LoadOptions const& options = {}) {
    writer.write(dir.path() / "model.safetensors");
    TensorStore const store(dir.path());
    return LayerLoader::from_checkpoint(store, d, 1).load<float>(options);
  }
  float code(std::int64_t k) const { return kE4m3Values[codes[at(k)]]; }
};

TEST(StoredForms, M6_Fp8BlockChannelAndTensorScales) {
  Fp8File f;
  f.add("gate_proj", f.i, f.h, ".weight_scale_inv", {2, 2}, {0.5F, 2.0F, 4.0F, 8.0F});
  std::vector<float> rows(at(f.i));
  for (std::size_t r = 0; r < rows.size(); ++r) rows[r] = static_cast<float>(r + 1);
  f.add("up_proj", f.i, f.h, ".weight_scale", {f.i, 1}, rows);
  f.add("down_proj", f.h, f.i, ".weight_scale", {1}, {0.25F});
  auto const w = f.load();
  float const block[2][2] = {{0.5F, 2.0F}, {4.0F, 8.0F}};
  for (std::int64_t r = 0; r < f.i; ++r) {
    for (std::int64_t c = 0; c < f.h; ++c) {
      ASSERT_EQ(w.w13[at(r * f.h + c)], f.code(r * f.h + c) * block[r / 128][c / 128]) << r << ' ' << c;
      ASSERT_EQ(w.w13[at((f.i + r) * f.h + c)], f.code(r * f.h + c) * rows[at(r)]);
    }
  }
  for (std::size_t k = 0; k < w.w2.size(); ++k) ASSERT_EQ(w.w2[k], f.code(static_cast<std::int64_t>(k)) * 0.25F);
  // A partition that is not a multiple of the block takes the scales of the whole weight.
  auto const part = f.load({.tp_rank = 1, .tp_size = 2});
  EXPECT_EQ(part.w13[0], w.w13[at(96 * f.h)]);
  EXPECT_EQ(part.w13[at(40 * f.h + 130)], w.w13[at(136 * f.h + 130)]);
}

TEST(StoredForms, Fp8ErrorsAreNamed) {
  {
    Fp8File f;
    f.add("gate_proj", f.i, f.h, ".weight_scale_inv", {3, 2}, std::vector<float>(6, 1.0F));
    f.add("up_proj", f.i, f.h, ".weight_scale", {1}, {1.0F});
    f.add("down_proj", f.h, f.i, ".weight_scale", {1}, {1.0F});
    expect_error(ErrorCode::argument, "shape [3, 2], expected [1], [192, 1], [192, groups] or [2, 2]", [&] { f.load(); });
  }
  {
    Fp8File f;
    f.codes[777] = 0xFF;
    for (char const* p : {"gate_proj", "up_proj"}) f.add(p, f.i, f.h, ".weight_scale", {1}, {1.0F});
    f.add("down_proj", f.h, f.i, ".weight_scale", {1}, {1.0F});
    expect_error(ErrorCode::argument, "NaN code at row 4, column 137", [&] { f.load(); });
  }
  {
    Fp8File f;
    for (char const* p : {"gate_proj", "up_proj"}) f.add(p, f.i, f.h, ".other", {1}, {1.0F});
    f.add("down_proj", f.h, f.i, ".other", {1}, {1.0F});
    expect_error(ErrorCode::argument, "an e4m3 weight needs 'model.layers.1.mlp.experts.0.gate_proj.weight_scale_inv' or",
                 [&] { f.load(); });
  }
}

TEST(StoredForms, PackedInt4) {
  Fp8File f;  // for its shapes
  auto const add = [&](char const* projection, std::int64_t n, std::int64_t k) {
    std::string const base = kRoot + "experts.0." + projection;
    std::vector<std::int32_t> words(at(n * k / 8));
    for (std::int64_t e = 0; e < n * k; ++e)
      words[at(e / 8)] |= static_cast<std::int32_t>(static_cast<std::uint32_t>((e * 5 + 3) % 16) << (4 * (e % 8)));
    std::vector<float> scales(at(n * k / 32));
    for (std::size_t s = 0; s < scales.size(); ++s) scales[s] = static_cast<float>(s % 7 + 1);
    f.writer.add<std::int32_t>(base + ".weight_packed", {n, k / 8}, words);
    f.writer.add<float>(base + ".weight_scale", {n, k / 32}, scales);
    f.writer.add<std::int64_t>(base + ".weight_shape", {2}, std::vector<std::int64_t>{n, k});
  };
  add("gate_proj", f.i, f.h);
  add("up_proj", f.i, f.h);
  add("down_proj", f.h, f.i);
  auto const w = f.load();
  for (std::int64_t e = 0; e < f.i * f.h; ++e) {
    std::int64_t const row = e / f.h, col = e % f.h, scale = (row * (f.h / 32) + col / 32) % 7 + 1;
    ASSERT_EQ(w.w13[at(e)], static_cast<float>(((e * 5 + 3) % 16 - 8) * scale)) << e;
  }
}

/// gpt-oss in both released forms: mxfp4 blocks, and bf16 tensors of the same values [E, in, out], gate and up interleaved. Every value is
/// representable in the format, so the results must be equal.
TEST(StoredForms, M5_GptOssBlocksAreTheBf16Release) {
  constexpr std::int64_t kWide = 64, kNarrow = 32;
  constexpr float kE2m1[] = {0, .5F, 1, 1.5F, 2, 3, 4, 6, -0.0F, -.5F, -1, -1.5F, -2, -3, -4, -6};
  LayerDescription d = description(WeightLayout::fused_transposed_interleaved);
  d.hidden = kWide;
  d.intermediate = kNarrow;
  TemporaryDirectory blocks_at, bf16_at;
  SafetensorsWriter blocks, bf16;
  auto const add = [&](std::string const& name, std::int64_t out, std::int64_t in) {
    std::vector<std::uint8_t> codes, exponents;
    std::vector<moe::bf16> turned(at(kE * out * in));
    for (std::int64_t k = 0; k < kE * out * in; k += 2) {
      codes.push_back(static_cast<std::uint8_t>((k * 7 / 2 + k / 64) % 256));
      if (k % 32 == 0) exponents.push_back(static_cast<std::uint8_t>(120 + k / 32 % 9));
      for (std::int64_t lane : {0, 1}) {
        std::int64_t const at_k = k + lane, e = at_k / (out * in), row = at_k / in % out, col = at_k % in;
        float const value = std::ldexp(kE2m1[codes.back() >> (4 * lane) & 15], exponents.back() - 127);
        turned[at((e * in + col) * out + row)] = moe::from_float<moe::bf16>(value);
      }
    }
    blocks.add<std::uint8_t>(kRoot + "experts." + name + "_blocks", {kE, out, in / 32, 16}, codes);
    blocks.add<std::uint8_t>(kRoot + "experts." + name + "_scales", {kE, out, in / 32}, exponents);
    bf16.add<moe::bf16>(kRoot + "experts." + name, {kE, in, out}, turned);
  };
  add("gate_up_proj", 2 * kNarrow, kWide);
  add("down_proj", kWide, kNarrow);
  for (auto const& [writer, at_path] : {std::pair{&blocks, &blocks_at}, std::pair{&bf16, &bf16_at}}) {
    writer->add<float>(kRoot + "router.weight", {kE, kWide}, std::vector<float>(at(kE * kWide)));
    writer->write(at_path->path() / "model.safetensors");
  }
  TensorStore const quantised(blocks_at.path()), wide(bf16_at.path());
  auto const a = LayerLoader::from_checkpoint(quantised, d, 1).load<float>();
  auto const b = LayerLoader::from_checkpoint(wide, d, 1).load<float>();
  EXPECT_EQ(a.w13, b.w13);
  EXPECT_EQ(a.w2, b.w2);
  EXPECT_TRUE(std::ranges::any_of(a.w13, [](float v) { return v != 0.0F; }));
}

TEST(StoredForms, UnknownPackingsAreRefused) {
  Tensors t = per_expert();
  t.erase(kRoot + "experts.0.gate_proj.weight");
  t[kRoot + "experts.0.gate_proj.qweight"] = tensor({2, 2}, gate);
  expect_error(ErrorCode::config, "experts.0.gate_proj.qweight' in '", [&] { load(t); });
  expect_error(ErrorCode::config, "the configuration's quant_method is none, expected gptq or awq", [&] { load(t); });
}

TEST(LayerWeights, ProgressCountsToTheEnd) {
  std::vector<std::pair<std::int64_t, std::int64_t>> seen;
  load(per_expert(), description(), {.progress = [&](std::int64_t done, std::int64_t total) { seen.emplace_back(done, total); }});
  ASSERT_EQ(seen.size(), at(kE));
  EXPECT_EQ(seen.back().first, seen.back().second);
  EXPECT_EQ(seen.back().second, kE * 3 * kI * kH * 4);
}

TEST(LayerWeights, RouterConfigPointsIntoTheWeights) {
  Tensors t = per_expert();
  LayerDescription d = description();
  d.correction_bias = true;
  t[kRoot + "gate.e_score_correction_bias"] = tensor({kE}, gate);
  auto const w = load(t, d);
  auto const r = router_config(w);
  EXPECT_EQ(r.correction_bias, w.correction_bias.data());
  EXPECT_EQ(r.hash_table, nullptr);
  EXPECT_EQ(r.num_experts, kE);
}

}  // namespace
