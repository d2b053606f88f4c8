// SPDX-License-Identifier: Apache-2.0
// io/layer_description.hpp: everything that decides what one MoE block computes, apart from its weights, as one run-time value.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "moe/activation/activation.hpp"
#include "moe/core/error.hpp"
#include "moe/io/checkpoint_quantization.hpp"
#include "moe/io/one_line.hpp"
#include "moe/routing/row/router_config.hpp"

namespace moe::io {

/// What the router weight multiplies.
enum class WeightOn : std::uint8_t { expert_output, expert_input };
/// What multiplies the shared experts' output.
enum class SharedGate : std::uint8_t {
  none,
  sigmoid,         ///< sigmoid(v . x), v = shared_expert_gate [H]
  routing_weight,  ///< a weight per shared expert that the router computes (RouterConfig::num_joint_shared), on the down projection's input
};
/// How the routed and the shared output are joined.
enum class Combination : std::uint8_t { sum, average };
/// What the router's linear layer sees.
enum class RouterInput : std::uint8_t {
  hidden,
  scaled_rms_norm,  ///< x / rms(x) * router_scale / sqrt(H)           (Gemma-4)
  mlp,              ///< two gelu layers on a projection of x            (Zaya)
};
/// Which tokens a block is for. A layer of most models has one block, for all of them.
enum class Tokens : std::uint8_t {
  all,
  text,   ///< ERNIE-4.5-VL: the block of the text tokens
  image,  ///< ERNIE-4.5-VL: that of the image and video tokens
};
/// How the expert weights lie in the file. Once loaded they are always [out, in] with gate rows before up rows.
enum class WeightLayout : std::uint8_t {
  automatic,                     ///< found by names and shapes
  per_expert,                    ///< one tensor per expert and projection, [out, in]
  fused,                         ///< [E, 2I, H] and [E, H, I]
  fused_interleaved,             ///< the same, even rows gate, odd rows up   (Inkling)
  fused_apart,                   ///< [E, I, H] for gate and for up, [E, H, I]   (Step-3.7)
  fused_transposed,              ///< [E, H, 2I] and [E, I, H]
  fused_transposed_interleaved,  ///< the same, even columns gate, odd columns up
  stacked,                       ///< [E*I, H] for gate, up and (transposed) down   (DBRX)
  common_rows,                   ///< own_rows of w2 a tensor per expert; its other rows and w13 once for all experts   (ViTPose)
};

constexpr std::string_view name(Tokens v) { return v == Tokens::all ? "all" : v == Tokens::text ? "text" : "image"; }
constexpr std::string_view name(WeightOn v) { return v == WeightOn::expert_output ? "expert_output" : "expert_input"; }
constexpr std::string_view name(SharedGate v) {
  return v == SharedGate::none ? "none" : v == SharedGate::sigmoid ? "sigmoid" : "routing_weight";
}
constexpr std::string_view name(Combination v) { return v == Combination::sum ? "sum" : "average"; }
constexpr std::string_view name(RouterInput v) {
  return v == RouterInput::hidden ? "hidden" : v == RouterInput::mlp ? "mlp" : "scaled_rms_norm";
}
constexpr std::string_view name(WeightLayout v) {
  switch (v) {
    case WeightLayout::automatic: return "automatic";
    case WeightLayout::per_expert: return "per_expert";
    case WeightLayout::fused: return "fused";
    case WeightLayout::fused_interleaved: return "fused_interleaved";
    case WeightLayout::fused_apart: return "fused_apart";
    case WeightLayout::fused_transposed: return "fused_transposed";
    case WeightLayout::fused_transposed_interleaved: return "fused_transposed_interleaved";
    case WeightLayout::stacked: return "stacked";
    case WeightLayout::common_rows: return "common_rows";
  }
  return "?";
}

/// An activation with its constants.
struct ActivationChoice {
  activation::Kind kind = activation::Kind::silu;
  activation::Constants constants{};
  bool gated() const { return activation::gated(kind); }
};

/// The experts that every token visits.
struct SharedExperts {
  int count = 0;                  ///< 0: none
  std::int64_t intermediate = 0;  ///< total width; several shared experts are one wider one, except with SharedGate::routing_weight
  SharedGate gate = SharedGate::none;
  ActivationChoice activation{};
  Combination combination = Combination::sum;
};

/// One MoE block: y = c * sum_e w_e FFN_e(x) + shared(x), with all variations between the families: docs/semantics/block.md. The pointers
/// of `router` are null here: router_config() of io/layer_weights.hpp sets them.
struct LayerDescription {
  std::string model_type{};       ///< for reports only; does not affect the computation
  std::int64_t hidden = 0;        ///< H
  std::int64_t intermediate = 0;  ///< I of one routed expert
  std::int64_t latent = 0;        ///< width that the routed experts work on between two projections (Nemotron-H, Kimi-K3); 0: H
  bool latent_norm = false;       ///< RMSNorm of the routed sum before its projection back to H (Kimi-K3)
  bool latent_in_norm = false;    ///< RMSNorm of the experts' input after its projection (Muse-Spark)
  routing::RouterConfig router{};
  RouterInput router_input = RouterInput::hidden;
  bool router_bias = false;       ///< the router's linear layer has a bias
  bool correction_bias = false;   ///< a bias is used for selection, not for the weights
  bool per_expert_scale = false;  ///< the weights are multiplied by a scale per expert (Gemma-4)
  WeightOn weight_on = WeightOn::expert_output;
  float output_scaling_factor = 1.0F;  ///< c, on the routed sum; not in the router's weights
  ActivationChoice activation{};
  bool expert_bias = false;  ///< both projections have biases
  SharedExperts shared{};
  bool post_norm = false;     ///< the sum of routed and shared output goes through RMSNorm (A.X-K1)
  bool output_bias = false;   ///< a vector [H] is added once to every token's output (JetMoe)
  float rms_norm_eps = 0.0F;  ///< of all norms but expert_norm
  bool expert_norm = false;   ///< RMSNorm(s * y) of each expert's output y, before the router's weight (Muse-Spark): ExpertNormWeights
  float expert_norm_eps = 0.0F;
  Tokens tokens = Tokens::all;
  /// No router: a token's id is the number of its expert, which gets weight 1 (ViTPose, where it is the number of a data set).
  bool expert_of_id = false;
  std::int64_t own_rows = 0;        ///< of WeightLayout::common_rows: the last rows of w2, which each expert has for itself
  float router_logit_scale = 1.0F;  ///< the logits are multiplied by it; loading folds it into the router's weight (Muse-Spark)
  WeightLayout layout = WeightLayout::automatic;
  CheckpointQuantization quantization{};  ///< how the checkpoint stores its weights

  /// Width of the vectors that go into and come out of the routed experts.
  std::int64_t expert_hidden() const { return latent > 0 ? latent : hidden; }
  /// Rows of w13 of one expert.
  std::int64_t w13_rows() const { return (activation.gated() ? 2 : 1) * intermediate; }
};

namespace detail {

/// The gated activation that a Hugging Face activation name stands for. E_UNSUPPORTED naming an unknown one.
inline activation::Kind gated_kind(std::string_view spelled, std::string_view label) {
  using activation::Kind;
  if (spelled == "silu" || spelled == "swish") return Kind::silu;
  if (spelled == "gelu") return Kind::gelu;
  if (spelled == "gelu_pytorch_tanh" || spelled == "gelu_new") return Kind::gelu_tanh;
  throw Error(ErrorCode::unsupported,
              one_line("'", label, "': gated activation '", spelled, "' is unknown, known: silu, gelu, gelu_pytorch_tanh"));
}
/// The same for an expert without a gate.
inline activation::Kind ungated_kind(std::string_view spelled, std::string_view label) {
  using activation::Kind;
  if (spelled == "relu2") return Kind::relu2_no_mul;
  if (spelled == "relu") return Kind::relu_no_mul;
  if (spelled == "silu") return Kind::silu_no_mul;
  if (spelled == "gelu") return Kind::gelu_no_mul;
  if (spelled == "gelu_pytorch_tanh" || spelled == "gelu_new") return Kind::gelu_tanh_no_mul;
  throw Error(ErrorCode::unsupported,
              one_line("'", label, "': ungated activation '", spelled, "' is unknown, known: relu, relu2, silu, gelu, gelu_pytorch_tanh"));
}

}  // namespace detail

/// Checks that the fields are consistent with each other. E_CONFIG naming the values.
inline void validate(LayerDescription const& d, std::string_view label) {
  auto const fail = [&](std::string const& what) { throw Error(ErrorCode::config, one_line("'", label, "': ", what)); };
  routing::RouterConfig const& r = d.router;
  if (r.topk > r.num_experts + r.num_zero_experts)
    fail(one_line("top_k ", r.topk, " exceeds num_experts ", r.num_experts + r.num_zero_experts));
  if (r.num_expert_group > 1) {
    if (r.num_experts % r.num_expert_group != 0)
      fail(one_line("num_experts ", r.num_experts, " is not divisible by n_group ", r.num_expert_group));
    if (r.topk_group < 1 || r.topk_group > r.num_expert_group) {
      fail(one_line("topk_group ", r.topk_group, " is out of range [1, ", r.num_expert_group, "]"));
    }
    int const reachable = r.topk_group * (r.num_experts / r.num_expert_group);
    if (r.topk > reachable)
      fail(one_line("top_k ", r.topk, " exceeds the ", reachable, " experts of topk_group ", r.topk_group, " groups"));
  }
  if (r.selection == routing::Selection::sparsemixer && r.topk != 2) fail(one_line("sparsemixer needs top_k 2, is ", r.topk));
  if (d.shared.count > 0 && d.shared.intermediate % d.shared.count != 0 && d.shared.gate == SharedGate::routing_weight) {
    fail(one_line("the shared experts' width ", d.shared.intermediate, " is not divisible by their number ", d.shared.count));
  }
}

}  // namespace moe::io
