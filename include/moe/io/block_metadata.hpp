// SPDX-License-Identifier: Apache-2.0
// io/block_metadata.hpp: the description of a block file (one MoE block with its weights and inputs) from the file's metadata.
//
// The semantics come from the metadata fields, never from model_type, so a model type that the library does not know runs if its semantics
// are known. An unknown key or value is an error that names it.
#pragma once

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <utility>

#include "moe/core/error.hpp"
#include "moe/io/hf_config.hpp"
#include "moe/io/layer_description.hpp"
#include "moe/io/one_line.hpp"

namespace moe::io {

using Metadata = std::map<std::string, std::string, std::less<>>;

namespace detail {

/// Reads the fields of a metadata map and remembers which it has read.
class MetadataReader {
 public:
  MetadataReader(Metadata const& map, std::string_view label) : map_(map), label_(label) {}

  /// The value, or "none" where the key is absent.
  std::string_view get(std::string_view key) {
    seen_.insert(std::string(key));
    auto const at = map_.find(key);
    return at == map_.end() ? std::string_view("none") : std::string_view(at->second);
  }
  bool present(std::string_view key) { return get(key) != "none"; }
  /// The value; E_CONFIG if the key is absent.
  std::string_view required(std::string_view key) {
    std::string_view const value = get(key);
    if (map_.find(key) == map_.end()) throw Error(ErrorCode::config, one_line("'", label_, "': metadata field '", key, "' is missing"));
    return value;
  }
  std::int64_t integer(std::string_view key, std::int64_t low, std::int64_t high = kMaxConfigValue) {
    std::string_view const value = required(key);
    std::int64_t n = 0;
    auto const [end, error] = std::from_chars(value.data(), value.data() + value.size(), n);
    if (error != std::errc() || end != value.data() + value.size() || n < low || n > high) {
      throw Error(ErrorCode::config, one_line("'", label_, "': metadata field '", key, "' is '", value.substr(0, 60),
                                              "', expected an integer in [", low, ", ", high, "]"));
    }
    return n;
  }
  float number(std::string_view key, double low = 0.0) {
    std::string_view const value = required(key);
    double x = 0;
    auto const [end, error] = std::from_chars(value.data(), value.data() + value.size(), x);
    if (error != std::errc() || end != value.data() + value.size() || !(x >= low && x <= 1e30)) {
      throw Error(ErrorCode::config, one_line("'", label_, "': metadata field '", key, "' is '", value.substr(0, 60),
                                              "', expected a number in [", low, ", 1e30]"));
    }
    return static_cast<float>(x);
  }
  bool flag(std::string_view key) { return one_of(required(key), key, {"false", "true"}) == 1; }
  /// An optional flag: false if absent.
  bool optional_flag(std::string_view key) { return present(key) && flag(key); }
  /// The index of the value in `known`. E_UNSUPPORTED, naming key and value, if it is not in the list.
  std::size_t choice(std::string_view key, std::initializer_list<std::string_view> known) { return one_of(required(key), key, known); }
  std::size_t optional_choice(std::string_view key, std::initializer_list<std::string_view> known) { return one_of(get(key), key, known); }

  /// E_UNSUPPORTED for an unread key whose value enables something.
  void refuse_unknown() const {
    static constexpr std::array<std::string_view, 21> kInformative{"case",
                                                                   "model_type",
                                                                   "block_class",
                                                                   "num_tokens",
                                                                   "config_json",
                                                                   "in_memory_parameters",
                                                                   "module_path_in_memory",
                                                                   "parameter_names",
                                                                   "seed",
                                                                   "transformers",
                                                                   "torch",
                                                                   "device",
                                                                   "compute_dtype",
                                                                   "experts_implementation",
                                                                   "source_of_topk",
                                                                   "min_selection_gap",
                                                                   "fp64_rerun_of_the_block",
                                                                   "fp64_independent_check",
                                                                   "format",
                                                                   "norm_topk_prob_in_config",
                                                                   "topk_method"};
    static constexpr std::array<std::string_view, 6> kOff{"", "none", "false", "0", "0.0", "None"};
    for (auto const& [key, value] : map_) {
      if (seen_.contains(key) || std::ranges::find(kInformative, key) != kInformative.end() || std::ranges::find(kOff, value) != kOff.end())
        continue;
      throw Error(ErrorCode::unsupported, one_line("'", label_, "': metadata field '", key, "' = '", value.substr(0, 80),
                                                   "' is not known, so what the block computes is not known"));
    }
  }
  std::string_view label() const { return label_; }

 private:
  std::size_t one_of(std::string_view value, std::string_view key, std::initializer_list<std::string_view> known) const {
    auto const at = std::ranges::find(known, value);
    if (at == known.end()) {
      std::string list;
      for (std::string_view k : known) list += (list.empty() ? "'" : ", '") + std::string(k) + "'";
      throw Error(ErrorCode::unsupported,
                  one_line("'", label_, "': metadata field '", key, "' = '", value.substr(0, 80), "' is not known, known: ", list));
    }
    return static_cast<std::size_t>(at - known.begin());
  }

  Metadata const& map_;
  std::string_view label_;
  std::set<std::string> seen_;
};

inline ActivationChoice metadata_activation(MetadataReader& m, std::string_view limit_key) {
  using activation::Kind;
  std::string_view const act = m.required("activation");
  std::size_t const form = m.choice(
      "glu", {"act(gate)*up", "(clamp(up)+1)*clamp(gate)*sigmoid(alpha*clamp(gate))", "min(silu(gate),limit)*clamp(up,-limit,limit)",
              "silu(min(gate,limit))*clamp(up,-limit,limit)", "softcap(gate)*sigmoid(gate)*softcap(up)", "none: down(act(up(x)))",
              "none: wo(act(wi(x)))", "none: fc2(act(fc1(x)))"});
  ActivationChoice out;
  bool const limited = m.present(limit_key) && m.number(limit_key) > 0.0F;
  auto const limit = [&] {
    if (!limited) throw Error(ErrorCode::config, one_line("'", m.label(), "': glu '", m.get("glu"), "' needs '", limit_key, "'"));
    return m.number(limit_key);
  };
  auto const must_be = [&](std::string_view wanted) {
    if (act != wanted) {
      throw Error(ErrorCode::unsupported,
                  one_line("'", m.label(), "': metadata field 'activation' = '", act, "' with glu '", m.get("glu"), "', known: ", wanted));
    }
  };
  switch (form) {
    case 0: out.kind = gated_kind(act, m.label()); break;
    case 1:
      must_be("swigluoai");
      out.kind = Kind::swigluoai_halves;
      out.constants.alpha = m.number("swiglu_alpha");
      out.constants.beta = 1.0F;
      out.constants.limit = limit();
      return out;
    case 2:  // Step-3.7: no limit means no clamp
      must_be("silu");
      out.kind = limited ? Kind::swiglu_step : Kind::silu;
      if (limited) out.constants.limit = limit();
      return out;
    case 3:
      must_be("silu");
      out.kind = Kind::silu_clamped;
      out.constants.limit = limit();
      return out;
    case 4:
      must_be("silu");
      out.kind = Kind::situ;
      out.constants.situ_gate = m.number("gate_softcap");
      out.constants.situ_up = m.number("up_softcap");
      break;
    default: out.kind = ungated_kind(act, m.label()); break;
  }
  if (limited || m.present("swiglu_alpha")) {
    throw Error(ErrorCode::unsupported,
                one_line("'", m.label(), "': 'swiglu_limit' or 'swiglu_alpha' with glu '", m.get("glu"), "', which has none"));
  }
  return out;
}

}  // namespace detail

// Longer than 120 lines: the fields of a file in their order, each checked where it is read.
/// The description of a block file. E_CONFIG for a missing or invalid field, E_UNSUPPORTED for unknown semantics.
inline LayerDescription from_block_metadata(Metadata const& map, std::string_view label) {
  using namespace routing;
  detail::MetadataReader m(map, label);
  LayerDescription d;
  RouterConfig& r = d.router;
  d.model_type = m.get("model_type");
  d.hidden = m.integer("hidden_size", 1);
  d.intermediate = m.integer("intermediate_size", 1);
  r.num_experts = static_cast<int>(m.integer("num_experts", 1));
  r.topk = static_cast<int>(m.integer("top_k", 1));

  enum Family {
    softmax_topk,
    topk_softmax,
    topk_sigmoid,
    deepseek_v2,
    biased_sigmoid,
    biased_sqrtsoftplus,
    sqrtsoftplus_hash,
    biased_softmax,
    grouped_softmax,
    sparsemixer,
    gemma4,
    joint_shared_sigmoid,
    mlp_router_skip
  };
  auto const family =
      static_cast<Family>(m.choice("routing_family", {"softmax_topk", "topk_softmax", "topk_sigmoid", "deepseek_v2", "biased_sigmoid",
                                                      "biased_sqrtsoftplus", "sqrtsoftplus_hash", "biased_softmax", "grouped_softmax",
                                                      "sparsemixer", "gemma4", "joint_shared_sigmoid", "mlp_router_skip"}));
  constexpr std::array scorings{Scoring::softmax, Scoring::sigmoid, Scoring::sqrtsoftplus};
  r.scoring = scorings[m.choice("scoring_func", {"softmax", "sigmoid", "sqrtsoftplus"})];
  std::size_t const selection = m.choice("selection", {"topk_of_scores", "topk_of_logits", "table lookup by token id"});
  r.order = selection == 1 ? Order::topk_then_score : Order::score_then_topk;
  r.selection = family == sparsemixer ? Selection::sparsemixer : selection == 2 ? Selection::hash_table : Selection::topk;
  if (m.present("router_jitter_noise")) {
    if (family != sparsemixer) throw Error(ErrorCode::unsupported, one_line("'", label, "': 'router_jitter_noise' outside of sparsemixer"));
  }
  if (family == sparsemixer) r.sparsemixer_eps = m.number("router_jitter_noise");

  bool const norm = m.flag("norm_topk_prob");
  float const eps = m.present("renorm_eps") ? m.number("renorm_eps") : 0.0F;
  // The softmax over the chosen logits already sums to one.
  bool const already = r.order == Order::topk_then_score && r.scoring == Scoring::softmax;
  r.renorm_eps = eps;
  if (m.present("renorm_p")) {
    r.renorm = Renorm::p_norm;
    r.renorm_p = m.number("renorm_p", 1e-3);
    if (!norm) throw Error(ErrorCode::config, one_line("'", label, "': 'renorm_p' with norm_topk_prob false"));
  } else if (m.present("renorm_min")) {
    r.renorm = norm ? Renorm::floor : Renorm::none;
    r.renorm_eps = m.number("renorm_min");
  } else if (norm && !already) {
    r.renorm = Renorm::sum;
  }

  r.num_expert_group = static_cast<int>(m.integer("n_group", 1));
  r.topk_group = static_cast<int>(m.integer("topk_group", 1));
  std::size_t const score = m.choice("group_score", {"none", "max", "top2_sum"});
  m.choice("masked_group_fill", {"none", "-inf", "0"});
  if (r.num_expert_group == 1) {
    r.num_expert_group = r.topk_group = 0;
  } else if (score == 0) {
    throw Error(ErrorCode::config, one_line("'", label, "': n_group is ", r.num_expert_group, ", but group_score is none"));
  }
  r.group_score = score == 2 ? GroupScore::top2_sum : GroupScore::max;
  r.routed_scaling_factor = m.number("routed_scaling_factor");
  d.output_scaling_factor = m.number("output_scaling_factor");
  d.weight_on = m.choice("weight_applied_on", {"expert_output", "expert_input"}) == 0 ? WeightOn::expert_output : WeightOn::expert_input;
  d.correction_bias = m.choice("correction_bias", {"none", "selection_only"}) == 1;
  d.router_bias = m.flag("router_bias");
  d.expert_bias = m.flag("expert_bias");
  r.logit_softcap = m.present("logit_softcapping") ? m.number("logit_softcapping") : 0.0F;
  r.num_zero_experts = static_cast<int>(m.integer("num_zero_experts", 0));
  if (m.present("num_skip_experts")) {
    auto const skip = static_cast<int>(m.integer("num_skip_experts", 0));
    if (skip > 0 && r.num_zero_experts > 0) {
      throw Error(ErrorCode::unsupported,
                  one_line("'", label, "': num_zero_experts ", r.num_zero_experts, " together with num_skip_experts ", skip));
    }
    if (skip > 0) r.zero_expert_kind = ZeroExpertKind::none;
    r.num_zero_experts += skip;
  }
  d.activation = detail::metadata_activation(m, "swiglu_limit");

  d.shared.count = static_cast<int>(m.integer("shared_experts", 0));
  d.shared.intermediate = m.integer("shared_expert_intermediate_size", 0);
  constexpr std::array gates{SharedGate::none, SharedGate::sigmoid, SharedGate::routing_weight};
  d.shared.gate = gates[m.choice("shared_expert_gate", {"none", "sigmoid", "routing weight"})];
  d.shared.combination =
      m.optional_choice("shared_expert_combination", {"none", "sum", "average"}) == 2 ? Combination::average : Combination::sum;
  // Only the step form has a separate limit for the shared expert. If that is absent, the shared expert has no clamp.
  bool const own_limit = m.get("glu").starts_with("min(silu(gate)");
  d.shared.activation = own_limit ? detail::metadata_activation(m, "shared_swiglu_limit") : d.activation;
  if (m.present("shared_glu")) {
    m.choice("shared_glu", {"act(gate)*up"});
    d.shared.activation = {.kind = detail::gated_kind(m.required("activation"), label)};
  }
  if (d.shared.count > 0 && d.shared.intermediate == 0) {
    throw Error(ErrorCode::config, one_line("'", label, "': ", d.shared.count, " shared experts of intermediate size 0"));
  }
  if (family == joint_shared_sigmoid) r.num_joint_shared = d.shared.count;
  if ((family == joint_shared_sigmoid) != (d.shared.gate == SharedGate::routing_weight)) {
    throw Error(ErrorCode::unsupported, one_line("'", label, "': shared_expert_gate '", m.get("shared_expert_gate"),
                                                 "' with routing_family '", m.get("routing_family"), "'"));
  }

  d.latent = m.present("latent_size") ? m.integer("latent_size", 0) : 0;
  d.latent_in_norm = m.optional_choice("latent_input_norm", {"none", "rmsnorm(x)*(1+w)"}) == 1;
  d.latent_norm = m.optional_choice("latent_output_norm", {"none", "rmsnorm(r)*w"}) == 1;
  d.expert_norm = m.optional_choice("expert_output_norm", {"none", "rmsnorm((1+w)*y)"}) == 1;
  if (d.expert_norm) d.expert_norm_eps = m.number("expert_norm_eps");
  if (m.present("router_logit_scale")) d.router_logit_scale = m.number("router_logit_scale");
  d.post_norm = m.optional_choice("post_norm", {"none", "rmsnorm of routed+shared"}) == 1;
  d.output_bias = m.optional_choice("output_bias", {"none", "added once to every token"}) == 1;
  d.per_expert_scale = m.optional_flag("per_expert_scale");
  constexpr std::array tokens{Tokens::all, Tokens::text, Tokens::image};
  d.tokens = tokens[m.optional_choice("tokens", {"none", "text", "image"})];
  d.expert_of_id = m.optional_flag("expert_of_id");
  if (m.present("own_rows")) d.own_rows = m.integer("own_rows", 1);
  bool const scaled = m.optional_choice("router_input", {"none", "rmsnorm(x)*scale/sqrt(H)"}) == 1;
  d.router_input = scaled ? RouterInput::scaled_rms_norm : family == mlp_router_skip ? RouterInput::mlp : RouterInput::hidden;
  if (d.post_norm || d.latent_norm || d.latent_in_norm || d.router_input != RouterInput::hidden) {
    // The norm's epsilon is in the model's configuration only.
    d.rms_norm_eps = HfConfig::from_text(m.required("config_json"), std::string(label) + ":config_json").positive("rms_norm_eps");
  }

  std::string_view const layout = m.required("layout");
  d.layout = layout == "per_expert"                                                     ? WeightLayout::per_expert
             : layout == "fused [E,2I,H] gate rows first; down [E,H,I]"                 ? WeightLayout::fused
             : layout == "input_linear [E,2I,H] gate rows first; output_linear [E,H,I]" ? WeightLayout::fused
             : layout == "fused transposed [E,H,2I] gate columns first; down [E,I,H]"   ? WeightLayout::fused_transposed
             : layout == "fc1 [E,H,2I] gate columns first; fc2 [E,I,H]"                 ? WeightLayout::fused_transposed
             : layout == "fused transposed [E,H,2I], gate and up columns interleaved; down [E,I,H]"
                 ? WeightLayout::fused_transposed_interleaved
             : layout == "w13 [E,2I,H] gate and up rows interleaved; w2 [E,H,I]" ? WeightLayout::fused_interleaved
             : layout == "dbrx [E*I,H] for w1,v1,w2"                             ? WeightLayout::stacked
             : layout == "fc1, fc2 of all experts; own_rows of w2 per expert"    ? WeightLayout::common_rows
                                                                                 : WeightLayout::automatic;
  if (d.layout == WeightLayout::automatic) {
    throw Error(ErrorCode::unsupported, one_line("'", label, "': metadata field 'layout' = '", layout.substr(0, 100), "' is not known"));
  }
  (void)m.get("tensor_prefix");
  m.refuse_unknown();
  validate(d, label);
  return d;
}

}  // namespace moe::io
