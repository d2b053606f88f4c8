// SPDX-License-Identifier: Apache-2.0
// models/catalog.hpp: every model that this library has constants for. A new model is one struct, one name here and one entry of
// models/preset_choice.hpp (docs/contributing.md).
#pragma once

#include <boost/hana/for_each.hpp>
#include <boost/hana/tuple.hpp>
#include <boost/hana/type.hpp>

#include "moe/models/dbrx.hpp"
#include "moe/models/deepseek.hpp"
#include "moe/models/ernie.hpp"
#include "moe/models/glm.hpp"
#include "moe/models/gpt_oss.hpp"
#include "moe/models/granite.hpp"
#include "moe/models/grok.hpp"
#include "moe/models/hunyuan.hpp"
#include "moe/models/jamba.hpp"
#include "moe/models/kimi.hpp"
#include "moe/models/llama4.hpp"
#include "moe/models/longcat.hpp"
#include "moe/models/minimax.hpp"
#include "moe/models/mixtral.hpp"
#include "moe/models/olmoe.hpp"
#include "moe/models/phi.hpp"
#include "moe/models/qwen.hpp"

namespace moe::models {

/// The models as hana::type values, in the order of their families: hana::for_each(catalog, [](auto type) { using M = typename
/// decltype(type)::type; … }).
inline constexpr auto catalog =
    boost::hana::tuple_t<Mixtral_8x7B, Mixtral_8x22B, Qwen1_5_MoE_A2_7B, Qwen2_57B_A14B, Qwen3_30B_A3B, Qwen3_235B_A22B,
                         Qwen3_Coder_480B_A35B, Qwen3_Next_80B_A3B, DeepSeek_V2_Lite, DeepSeek_V2, DeepSeek_V3, DeepSeek_V4_Flash,
                         DeepSeek_V4_Pro, Kimi_K2, Kimi_K3, GLM_4_5, GLM_4_5_Air, GptOss_20B, GptOss_120B, Llama4_Scout, Llama4_Maverick,
                         OLMoE_1B_7B, MiniMax_M2, Phi3_5_MoE, Granite3_1B_A400M, Granite3_3B_A800M, Ernie4_5_21B_A3B, Ernie4_5_300B_A47B,
                         Hunyuan_A13B, LongCat_Flash, Grok_1, Dbrx, Jamba1_5_Mini, Jamba1_5_Large>;

}  // namespace moe::models
