// SPDX-License-Identifier: Apache-2.0
// models/qwen.hpp: Qwen1.5-MoE, Qwen2-MoE, Qwen3-MoE and Qwen3-Next.
#pragma once

#include "moe/models/model_defaults.hpp"
#include "moe/routing/routers.hpp"

namespace moe::models {

/// Qwen1.5-MoE-A2.7B
struct Qwen1_5_MoE_A2_7B : ModelDefaults {
  static constexpr char const* kName = "Qwen1.5-MoE-A2.7B";
  using Router = routing::SoftmaxTopK<routing::Renormalize::no>;
  static constexpr int hidden = 2048;
  static constexpr int intermediate = 1408;
  static constexpr int num_experts = 60;
  static constexpr int topk = 4;
  static constexpr int num_layers = 24;
  static constexpr int num_shared_experts = 1;
  static constexpr int shared_intermediate = 5632;
  static constexpr bool shared_sigmoid_gate = true;
};

/// Qwen2-57B-A14B
struct Qwen2_57B_A14B : Qwen1_5_MoE_A2_7B {
  static constexpr char const* kName = "Qwen2-57B-A14B";
  static constexpr int hidden = 3584;
  static constexpr int intermediate = 2560;
  static constexpr int num_experts = 64;
  static constexpr int topk = 8;
  static constexpr int num_layers = 28;
  static constexpr int shared_intermediate = 20480;
};

/// Qwen3-30B-A3B
struct Qwen3_30B_A3B : ModelDefaults {
  static constexpr char const* kName = "Qwen3-30B-A3B";
  using Router = routing::SoftmaxTopK<routing::Renormalize::yes>;
  static constexpr int hidden = 2048;
  static constexpr int intermediate = 768;
  static constexpr int num_experts = 128;
  static constexpr int topk = 8;
  static constexpr int num_layers = 48;
};

/// Qwen3-235B-A22B
struct Qwen3_235B_A22B : Qwen3_30B_A3B {
  static constexpr char const* kName = "Qwen3-235B-A22B";
  static constexpr int hidden = 4096;
  static constexpr int intermediate = 1536;
  static constexpr int num_layers = 94;
};

/// Qwen3-Coder-480B-A35B
struct Qwen3_Coder_480B_A35B : Qwen3_30B_A3B {
  static constexpr char const* kName = "Qwen3-Coder-480B-A35B";
  static constexpr int hidden = 6144;
  static constexpr int intermediate = 2560;
  static constexpr int num_experts = 160;
  static constexpr int num_layers = 62;
};

/// Qwen3-Next-80B-A3B
struct Qwen3_Next_80B_A3B : Qwen3_30B_A3B {
  static constexpr char const* kName = "Qwen3-Next-80B-A3B";
  static constexpr int hidden = 2048;
  static constexpr int intermediate = 512;
  static constexpr int num_experts = 512;
  static constexpr int topk = 10;
  static constexpr int num_layers = 48;
  static constexpr int num_shared_experts = 1;
  static constexpr int shared_intermediate = 512;
  static constexpr bool shared_sigmoid_gate = true;
};

}  // namespace moe::models
