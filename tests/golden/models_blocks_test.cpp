// SPDX-License-Identifier: Apache-2.0
// tests/golden/models_blocks_test.cpp: the router and the activation of a preset reproduce the block files of its family that are here.
//
// A preset gives its types and constants; the file gives its dimensions, scaling factor and bias.
#include <gtest/gtest.h>

#include <algorithm>
#include <boost/hana/for_each.hpp>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <iterator>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "block_definition.hpp"
#include "golden_dir.hpp"
#include "moe/core/config_defaults.hpp"
#include "moe/models/catalog.hpp"

namespace {

using namespace moe;
using moe_test::read;

enum class In : std::uint8_t {
  test_data,  ///< a file of the family is in tests/data
  whole_set,  ///< only the whole set of the reference data has one
};
/// The block files that a preset's types describe: a prefix of their names, and a substring that marks another model's file.
struct FilesOf {
  std::string_view preset, prefix, without = "-";
  In in = In::test_data;
};
constexpr FilesOf kFiles[] = {
    {"Mixtral-8x7B", "mixtral_", "gelu"},
    {"Mixtral-8x22B", "mixtral_", "gelu"},
    {"Qwen1.5-MoE-A2.7B", "qwen2_moe_"},
    {"Qwen2-57B-A14B", "qwen2_moe_"},
    {"Qwen3-30B-A3B", "qwen3_moe_", "nonorm"},
    {"Qwen3-235B-A22B", "qwen3_moe_", "nonorm"},
    {"Qwen3-Coder-480B-A35B", "qwen3_moe_", "nonorm"},
    {"Qwen3-Next-80B-A3B", "qwen3_next_"},
    {"DeepSeek-V2-Lite", "deepseek_v2_greedy"},
    {"DeepSeek-V2", "deepseek_v2_grouplimited"},
    {"DeepSeek-V3", "deepseek_v3_", "nonorm"},
    {"DeepSeek-V4-Flash", "deepseek_v4_", "hash", In::whole_set},
    {"DeepSeek-V4-Pro", "deepseek_v4_", "hash", In::whole_set},
    {"Kimi-K2", "glm4_moe_"},  // the same block
    {"Kimi-K3", "kimi_k3_"},
    {"GLM-4.5", "glm4_moe_"},
    {"GLM-4.5-Air", "glm4_moe_"},
    {"gpt-oss-20b", "gpt_oss_"},
    {"gpt-oss-120b", "gpt_oss_"},
    {"Llama-4-Scout", "llama4_e8k1", "-", In::whole_set},
    {"Llama-4-Maverick", "llama4_e8k1", "-", In::whole_set},
    {"OLMoE-1B-7B", "olmoe_"},
    {"MiniMax-M2", "minimax_m2_", "-", In::whole_set},
    {"Phi-3.5-MoE", "phimoe_"},
    {"Granite-3.0-1b-a400m", "granitemoe_", "swa", In::whole_set},
    {"Granite-3.0-3b-a800m", "granitemoe_", "swa", In::whole_set},
    {"ERNIE-4.5-21B-A3B", "ernie4_5_moe_", "-", In::whole_set},
    {"ERNIE-4.5-300B-A47B", "ernie4_5_moe_", "-", In::whole_set},
    {"Hunyuan-A13B", "hunyuan_v1_moe_", "-", In::whole_set},
    {"LongCat-Flash", "longcat_flash_", "-", In::whole_set},
    {"Grok-1", "grok_1_"},
    {"DBRX", "dbrx_", "nonorm", In::whole_set},
    {"Jamba-1.5-Mini", "jamba_", "-", In::whole_set},
    {"Jamba-1.5-Large", "jamba_", "-", In::whole_set},
};

/// The preset's Params with the file's dimensions, factor and bias.
template <class M>
typename M::Router::Params params_for(io::HostLayerWeights<float> const& w) {
  routing::RouterConfig const r = io::router_config(w);
  auto p = default_router_params<M, typename M::Router::Params>();
  EXPECT_EQ(p.num_experts, M::num_experts);
  EXPECT_EQ(p.topk, M::topk);
  p.num_experts = r.num_experts;
  p.topk = r.topk;
  if constexpr (requires { p.num_expert_group; }) p.num_expert_group = r.num_expert_group, p.topk_group = r.topk_group;
  if constexpr (requires { p.num_zero_experts; }) p.num_zero_experts = r.num_zero_experts;
  if constexpr (requires { p.routed_scaling_factor; }) p.routed_scaling_factor = r.routed_scaling_factor;
  if constexpr (requires { p.correction_bias; }) p.correction_bias = r.correction_bias;
  if constexpr (requires { p.router_jitter_noise; }) {
    if (std::abs(p.router_jitter_noise - r.sparsemixer_eps) > 1e-9F) p.router_jitter_noise = r.sparsemixer_eps;
  }
  return p;
}

template <class M>
void check(std::filesystem::path const& path) {
  SCOPED_TRACE(M::kName);
  SCOPED_TRACE(path.stem().string());
  io::TensorStore const store(path);
  auto w = io::load_block<float>(store);
  io::LayerDescription& d = w.description;

  typename M::Activation activation = default_activation<M>();
  EXPECT_EQ(d.activation.kind, M::Activation::kKind);
  EXPECT_EQ(d.activation.constants.limit < HUGE_VALF, M::activation_limit > 0.0F);
  if (d.activation.constants.limit < HUGE_VALF) activation.constants.limit = d.activation.constants.limit;  // a file may have another one
  d.activation.constants = activation.constants;
  EXPECT_EQ(d.weight_on == io::WeightOn::expert_input, default_shape<M>().weight_on_input);

  typename M::Router const router(params_for<M>(w));
  auto const hidden = read<float>(store, "hidden"), logits = read<float>(store, "router_logits"), expected = read<float>(store, "expected");
  std::int64_t const rows = static_cast<std::int64_t>(hidden.size()) / d.hidden;
  auto const h = static_cast<std::size_t>(d.hidden), k = static_cast<std::size_t>(d.router.topk);
  std::vector<std::int32_t> ids(static_cast<std::size_t>(rows) * k);
  std::vector<float> weights(ids.size());
  router.select(routing::RouteArgs<float>{.logits = make_rows(logits.data(), rows, router.num_logits()),
                                          .num_valid_rows = rows,
                                          .topk_ids = make_rows(ids.data(), rows, router.topk()),
                                          .topk_weights = make_rows(weights.data(), rows, router.topk())});
  double const bound = moe_test::max_abs(expected) * 1e-5;
  for (std::size_t t = 0; t < static_cast<std::size_t>(rows); ++t) {
    moe_test::Row const x(hidden.begin() + static_cast<std::ptrdiff_t>(t * h), hidden.begin() + static_cast<std::ptrdiff_t>((t + 1) * h));
    moe_test::Row const y = moe_test::block_output(w, x, ids.data() + t * k, weights.data() + t * k, k, nullptr);
    for (std::size_t i = 0; i < h; ++i) ASSERT_NEAR(y[i], expected[t * h + i], bound) << "token " << t << ", column " << i;
  }
}

/// The block files of a preset's family, of those that are here.
std::vector<std::filesystem::path> files_of(std::string_view preset) {
  std::vector<std::filesystem::path> out;
  for (FilesOf const& of : kFiles) {
    if (of.preset != preset) continue;
    for (std::filesystem::path const& path : moe_test::golden_blocks()) {
      std::string const stem = path.stem().string();
      if (stem.starts_with(of.prefix) && stem.find(of.without) == std::string::npos) out.push_back(path);
    }
  }
  return out;
}

TEST(Presets, ReproduceTheBlockFilesOfTheirFamilies) {
  boost::hana::for_each(models::catalog, [&](auto type) {
    using M = typename decltype(type)::type;
    for (std::filesystem::path const& path : files_of(M::kName)) check<M>(path);
  });
}

// Presets whose files only the whole set has are named where it is not here.
TEST(Presets, EveryOneHasABlockFile) {
  bool const whole_set = moe_test::golden_dir() != std::filesystem::path(MOE_TEST_DATA);
  std::set<std::string_view> names;
  std::string left;
  boost::hana::for_each(models::catalog, [&](auto type) { names.insert(decltype(type)::type::kName); });
  for (std::string_view const name : names) {
    auto const of = std::ranges::find(kFiles, name, &FilesOf::preset);
    if (of == std::end(kFiles)) {
      ADD_FAILURE() << name << " is in the catalogue, and kFiles does not say which block files are of its family";
    } else if (of->in == In::whole_set && !whole_set) {
      EXPECT_TRUE(files_of(name).empty()) << name << " has a file in tests/data: leave out In::whole_set";
      left += (left.empty() ? "" : ", ") + std::string(name);
    } else {
      EXPECT_FALSE(files_of(name).empty()) << "no block file in " << moe_test::golden_dir() << " for " << name;
    }
  }
  for (FilesOf const& of : kFiles) EXPECT_TRUE(names.contains(of.preset)) << of.preset << " is not in the catalogue";
  if (!left.empty()) GTEST_SKIP() << "the whole set of the reference data is not here, so not compared: " << left;
}

}  // namespace
