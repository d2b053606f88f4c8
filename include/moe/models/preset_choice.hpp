// SPDX-License-Identifier: Apache-2.0
// models/preset_choice.hpp: the quantisation and the backends that a library of a model's preset takes by default, with the reason of each
// choice. Experts follow from the quantisation and from the format that the backend delivers (models/preset_cuda.hpp), the schedule from
// what was measured for the pair (layer/schedule_choice.hpp).
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "moe/layer/schedule_choice.hpp"
#include "moe/quantization/fp8_block128.hpp"
#include "moe/quantization/mxfp4.hpp"
#include "moe/quantization/none.hpp"

namespace moe::models {

/// What a layer is called for: few tokens, one of each sequence, or whole prompts.
enum class Phase : std::uint8_t { prefill, decode };

/// The tokens a rank for which a preset's schedule is chosen: decode where docs/choose.md takes low_latency, prefill where it does not.
constexpr TokenRange tokens_of(Phase phase) { return phase == Phase::decode ? TokenRange{8, 256} : TokenRange{512, 8192}; }

/// Names of backends, the preferred one first.
using BackendOrder = std::array<std::string_view, 4>;

/// A model whose experts one H200 holds (139 GiB): nothing is exchanged.
template <class Quant>
struct OneGpu {
  using Quantization = Quant;
  static constexpr BackendOrder kDecode{"no_expert_parallel", "low_latency", "all_to_all_v", "high_throughput"};
  static constexpr BackendOrder kPrefill{"no_expert_parallel", "high_throughput", "all_to_all_v", "low_latency"};
};
/// A model that needs several. Decode: low_latency with hopper_masked; prefill: high_throughput with hopper_contiguous. "Flash" in fp8
/// (docs/log/layers.md), on two H200, low_latency, high_throughput and all_to_all_v: 181, 198 and 223 us for 8 tokens a rank, 237, 239 and
/// 286 for 128, 607, 511 and 581 for 1024; on four 248 us with low_latency for 128 (all_to_all_v 306), 3368 us with high_throughput for
/// 8192 (all_to_all_v 3640).
template <class Quant>
struct SeveralGpus {
  using Quantization = Quant;
  static constexpr BackendOrder kDecode{"low_latency", "all_to_all_v", "high_throughput", "no_expert_parallel"};
  static constexpr BackendOrder kPrefill{"high_throughput", "all_to_all_v", "low_latency", "no_expert_parallel"};
};

/// The choice for Model. Not specialised, as for a model of the user's own: no quantisation, several GPUs. Sizes are of the routed experts
/// of all layers. "By the shape of" names a measured model whose sizes are close, where the model itself was not measured.
///
/// Times are of the experts of one layer on one GPU, with hopper_contiguous unless hopper_w4a16 is named. The tables that they are from:
///   (H100)                    docs/log/hopper.md, "Presets"; test headers.docs compares each time with it
///   with a ratio to a floor   docs/log/hopper.md, "bf16" and "fp8, 128×128 weight blocks" (one H200)
///   hopper_w4a16              docs/log/w4.md, "Times, before 0.2.0", of DeepSeek-V4 and Kimi-K3 "DeepSeek-V4, Kimi-K3" (one H200)
///   a pair                    dispatch and combine of 128 tokens a rank: docs/log/exchange.md, "LowLatency, HighThroughput" (four H200
///                             unless two are named)
template <class Model>
struct PresetChoice : SeveralGpus<quantization::None> {};

struct Mixtral_8x7B;
struct Mixtral_8x22B;
struct Qwen1_5_MoE_A2_7B;
struct Qwen2_57B_A14B;
struct Qwen3_30B_A3B;
struct Qwen3_235B_A22B;
struct Qwen3_Coder_480B_A35B;
struct Qwen3_Next_80B_A3B;
struct DeepSeek_V2_Lite;
struct DeepSeek_V2;
struct DeepSeek_V3;
struct DeepSeek_V4_Flash;
struct DeepSeek_V4_Pro;
struct Kimi_K2;
struct Kimi_K3;
struct GLM_4_5;
struct GLM_4_5_Air;
struct GptOss_20B;
struct GptOss_120B;
struct Llama4_Scout;
struct Llama4_Maverick;
struct OLMoE_1B_7B;
struct MiniMax_M2;
struct Phi3_5_MoE;
struct Granite3_1B_A400M;
struct Granite3_3B_A800M;
struct Ernie4_5_21B_A3B;
struct Ernie4_5_300B_A47B;
struct Hunyuan_A13B;
struct LongCat_Flash;
struct Grok_1;
struct Dbrx;
struct Jamba1_5_Mini;
struct Jamba1_5_Large;

/// 90 GB in bf16. Experts 677 us for 64 tokens (1.07 of the floor), 16901 us for 16384 (1.03): hopper_contiguous for both phases.
template <>
struct PresetChoice<Mixtral_8x7B> : OneGpu<quantization::None> {};
/// 270 GB in bf16. Experts 1608 us for 64 tokens, 29514 for 16384 (H100).
template <>
struct PresetChoice<Mixtral_8x22B> : SeveralGpus<quantization::None> {};
/// 25 GB in bf16. Experts 342 us for 64 tokens, 2084 for 16384 (H100).
template <>
struct PresetChoice<Qwen1_5_MoE_A2_7B> : OneGpu<quantization::None> {};
/// 99 GB in bf16. Experts 1157 us for 64 tokens, 11658 for 16384 (H100).
template <>
struct PresetChoice<Qwen2_57B_A14B> : OneGpu<quantization::None> {};
/// 58 GB in bf16. Experts 289 us for 64 tokens (1.09 of the floor), 2109 us for 16384 (1.20): hopper_contiguous for both phases.
template <>
struct PresetChoice<Qwen3_30B_A3B> : OneGpu<quantization::None> {};
/// 454 GB in bf16. Experts 1092 us for 64 tokens (1.03 of the floor), 7462 us for 16384 (1.06), with all experts on one GPU.
template <>
struct PresetChoice<Qwen3_235B_A22B> : SeveralGpus<quantization::None> {};
/// 937 GB in bf16. Experts 4728 us for 64 tokens, 20084 for 16384 (H100).
template <>
struct PresetChoice<Qwen3_Coder_480B_A35B> : SeveralGpus<quantization::None> {};
/// 155 GB in bf16. Experts 759 us for 64 tokens, 2587 for 16384 (H100).
template <>
struct PresetChoice<Qwen3_Next_80B_A3B> : SeveralGpus<quantization::None> {};
/// 29 GB in bf16. Experts 373 us for 64 tokens, 3026 for 16384 (H100).
template <>
struct PresetChoice<DeepSeek_V2_Lite> : OneGpu<quantization::None> {};
/// 445 GB in bf16. Experts 2219 us for 64 tokens, 7769 for 16384 (H100).
template <>
struct PresetChoice<DeepSeek_V2> : SeveralGpus<quantization::None> {};
/// 654 GB in fp8 blocks, as released. 63.2 us a pair with low_latency; experts of one rank of eight 286 us for 64 tokens (1.06 of the
/// floor), 1545 us for 16384 (1.39).
template <>
struct PresetChoice<DeepSeek_V3> : SeveralGpus<quantization::Fp8Block<>> {};
/// 147 GB, mxfp4 experts as released. Experts 724 us for 64 tokens, 8859 us for 16384 (hopper_w4a16), all on one GPU; exchange 34.8 us a
/// pair (4096, 6 of 256).
template <>
struct PresetChoice<DeepSeek_V4_Flash> : SeveralGpus<quantization::Mxfp4W4A16<>> {};
/// 822 GB, mxfp4 experts as released. Experts 2220 us for 64 tokens, 21931 us for 16384 (hopper_w4a16), all on one GPU. Exchange by the
/// shape of "Pro".
template <>
struct PresetChoice<DeepSeek_V4_Pro> : SeveralGpus<quantization::Mxfp4W4A16<>> {};
/// 1015 GB in fp8 blocks, as released. Experts 4057 us for 64 tokens, 14730 for 16384 (H100).
template <>
struct PresetChoice<Kimi_K2> : SeveralGpus<quantization::Fp8Block<>> {};
/// 1447 GB, mxfp4 as released. Experts 3149 us for 64 tokens, 40040 us for 16384 (hopper_w4a16), all on one GPU; exchange 45.4 us a pair
/// on two H200 (3584, 16 of 896).
template <>
struct PresetChoice<Kimi_K3> : SeveralGpus<quantization::Mxfp4W4A16<>> {};
/// 672 GB in bf16. Experts 2368 us for 64 tokens, 10479 for 16384 (H100).
template <>
struct PresetChoice<GLM_4_5> : SeveralGpus<quantization::None> {};
/// 199 GB in bf16. Experts 1423 us for 64 tokens, 7683 for 16384 (H100).
template <>
struct PresetChoice<GLM_4_5_Air> : SeveralGpus<quantization::None> {};
/// 10 GB, mxfp4 as released. Experts 145 us for 64 tokens, 1790 us for 4096 (hopper_w4a16).
template <>
struct PresetChoice<GptOss_20B> : OneGpu<quantization::Mxfp4W4A16<>> {};
/// 61 GB, mxfp4 as released. Experts 436 us for 64 tokens, in bf16 1286; 1949 us for 4096, in bf16 1855 (hopper_w4a16).
template <>
struct PresetChoice<GptOss_120B> : OneGpu<quantization::Mxfp4W4A16<>> {};
/// 193 GB in bf16. Experts 1302 us for 64 tokens, 6128 for 16384 (H100).
template <>
struct PresetChoice<Llama4_Scout> : SeveralGpus<quantization::None> {};
/// 773 GB in bf16. Experts 4081 us for 64 tokens, 12426 for 16384 (H100).
template <>
struct PresetChoice<Llama4_Maverick> : SeveralGpus<quantization::None> {};
/// 13 GB in bf16. Experts 277 us for 64 tokens, 2985 for 16384 (H100).
template <>
struct PresetChoice<OLMoE_1B_7B> : OneGpu<quantization::None> {};
/// 225 GB in fp8 blocks, as released. Experts 1021 us for 64 tokens, 4402 for 16384 (H100).
template <>
struct PresetChoice<MiniMax_M2> : SeveralGpus<quantization::Fp8Block<>> {};
/// 81 GB in bf16. Experts 831 us for 64 tokens, 7891 for 16384 (H100).
template <>
struct PresetChoice<Phi3_5_MoE> : OneGpu<quantization::None> {};
/// 2.4 GB in bf16. Experts 51.7 us for 64 tokens, 932 for 16384 (H100).
template <>
struct PresetChoice<Granite3_1B_A400M> : OneGpu<quantization::None> {};
/// 5.9 GB in bf16. Experts 81.0 us for 64 tokens, 1342 for 16384 (H100).
template <>
struct PresetChoice<Granite3_3B_A800M> : OneGpu<quantization::None> {};
/// 41 GB in bf16. Experts 503 us for 64 tokens, 3845 for 16384 (H100).
template <>
struct PresetChoice<Ernie4_5_21B_A3B> : OneGpu<quantization::None> {};
/// 575 GB in bf16. Experts 3667 us for 64 tokens, 36013 for 16384 (H100).
template <>
struct PresetChoice<Ernie4_5_300B_A47B> : SeveralGpus<quantization::None> {};
/// 155 GB in bf16. Experts 1582 us for 64 tokens, 16108 for 16384 (H100).
template <>
struct PresetChoice<Hunyuan_A13B> : SeveralGpus<quantization::None> {};
/// 1082 GB in bf16. Experts of one rank of two 4866 us for 64 tokens, 14246 for 16384 (H100).
template <>
struct PresetChoice<LongCat_Flash> : SeveralGpus<quantization::None> {};
/// 618 GB in bf16. Experts 3195 us for 64 tokens, 59495 for 16384 (H100).
template <>
struct PresetChoice<Grok_1> : SeveralGpus<quantization::None> {};
/// 254 GB in bf16. Experts 2078 us for 64 tokens, 39483 for 16384 (H100).
template <>
struct PresetChoice<Dbrx> : SeveralGpus<quantization::None> {};
/// 90 GB in bf16. Experts 1836 us for 64 tokens, 18118 for 16384 (H100).
template <>
struct PresetChoice<Jamba1_5_Mini> : OneGpu<quantization::None> {};
/// 696 GB in bf16. Experts 6262 us for 64 tokens, 59916 for 16384 (H100).
template <>
struct PresetChoice<Jamba1_5_Large> : SeveralGpus<quantization::None> {};

}  // namespace moe::models
