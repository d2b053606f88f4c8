// SPDX-License-Identifier: Apache-2.0
// c/config.hpp: moe_router_config and moe_runner_config to the library's types, every name checked.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <utility>

#include "moe/c/runner.hpp"
#include "moe/c/status.hpp"
#include "moe/c/structs.hpp"
#include "moe/c/tensor.hpp"
#include "moe/routing/row/validate.hpp"

namespace moe::c {

/// Of moe_runner_config::num_threads: more than any host has, and few enough that their memory can be had.
inline constexpr int kMostThreads = 4096;

/// The value of that name. E_CONFIG with a list of the names; null: the first.
template <class Value, std::size_t N>
Value by_name(char const* what, char const* given, std::array<std::pair<std::string_view, Value>, N> const& known) {
  if (given == nullptr) return known[0].second;
  std::string names;
  for (auto const& [name, value] : known) {
    if (name == given) return value;
    names += text(names.empty() ? "" : ", ", name);
  }
  throw Error(ErrorCode::config, text(what, ": unknown name \"", given, "\"; known: ", names));
}

/// num_experts and topk: of the runner, for a router that leaves them 0.
inline routing::RouterConfig router_of(moe_router_config const& given, Device device, int num_experts, int topk) {
  using namespace routing;
  moe_router_config const c = checked("router", &given);
  auto dimension = [](char const* what, int router, int runner) {
    if (router != 0 && runner != 0 && router != runner) {
      throw Error(ErrorCode::config, text("router.", what, ": is ", router, ", the runner's is ", runner));
    }
    return router != 0 ? router : runner;
  };
  RouterConfig r;
  r.num_experts = dimension("num_experts", c.num_experts, num_experts);
  r.topk = dimension("topk", c.topk, topk);
  r.scoring = by_name<Scoring, 4>("router.scoring", c.scoring,
                                  {{{"softmax", Scoring::softmax},
                                    {"sigmoid", Scoring::sigmoid},
                                    {"sqrtsoftplus", Scoring::sqrtsoftplus},
                                    {"identity", Scoring::identity}}});
  r.order = by_name<Order, 2>("router.order", c.order,
                              {{{"score_then_topk", Order::score_then_topk}, {"topk_then_score", Order::topk_then_score}}});
  r.selection =
      by_name<Selection, 3>("router.selection", c.selection,
                            {{{"topk", Selection::topk}, {"hash_table", Selection::hash_table}, {"sparsemixer", Selection::sparsemixer}}});
  r.renorm = by_name<Renorm, 4>("router.renorm", c.renorm,
                                {{{"none", Renorm::none}, {"sum", Renorm::sum}, {"floor", Renorm::floor}, {"p_norm", Renorm::p_norm}}});
  r.renorm_eps = c.renorm_eps;
  r.renorm_p = c.renorm_p;
  r.routed_scaling_factor = c.routed_scaling_factor;
  r.num_expert_group = c.num_expert_group;
  r.topk_group = c.topk_group;
  r.group_score =
      by_name<GroupScore, 2>("router.group_score", c.group_score, {{{"max", GroupScore::max}, {"top2_sum", GroupScore::top2_sum}}});
  r.logit_softcap = c.logit_softcap;
  r.sparsemixer_eps = c.sparsemixer_eps;
  if (r.selection == Selection::sparsemixer && !(c.sparsemixer_eps >= 0.0F && std::isfinite(c.sparsemixer_eps))) {
    throw Error(ErrorCode::config, text("router.sparsemixer_eps: ", c.sparsemixer_eps, " is out of range [0, infinity)"));
  }
  if (r.selection == Selection::sparsemixer && r.renorm != Renorm::none) {
    throw Error(ErrorCode::argument, text("router.renorm: \"", c.renorm, "\" with selection sparsemixer, which needs \"none\""));
  }
  r.num_zero_experts = c.num_zero_experts;
  r.zero_expert_kind = by_name<ZeroExpertKind, 2>("router.zero_expert", c.zero_expert,
                                                  {{{"identity", ZeroExpertKind::identity}, {"none", ZeroExpertKind::none}}});
  r.degenerate = by_name<DegeneratePolicy, 2>("router.degenerate", c.degenerate,
                                              {{{"uniform_first_k", DegeneratePolicy::uniform_first_k}, {"drop", DegeneratePolicy::drop}}});
  if (c.correction_bias != nullptr) {
    r.correction_bias =
        vector_of<float>("router.correction_bias", c.correction_bias, std::int64_t{r.num_experts} + r.num_zero_experts, device);
  }
  if (c.per_expert_scale != nullptr) {
    r.per_expert_scale = vector_of<float>("router.per_expert_scale", c.per_expert_scale, r.num_experts, device);
  }
  if (c.hash_table != nullptr) {
    auto const table = rows_of<std::int64_t const>("router.hash_table", c.hash_table, device);
    if (table.extent(1) != r.topk || table.stride(0) != r.topk) {
      detail::refuse("router.hash_table", text("rows of ", table.extent(1), ", ", table.stride(0), " apart"),
                     text("contiguous [vocabulary, ", r.topk, "]"));
    }
    if (r.selection == Selection::hash_table && table.extent(0) < 1) {
      detail::refuse_shape("router.hash_table", *c.hash_table, text("[vocabulary, ", r.topk, "], at least one row"));
    }
    r.hash_table = table.data_handle();
    r.vocabulary = table.extent(0);
  }
  validate(r);
  return r;
}

inline DType dtype_of_request(moe_runner_config const& c, DLTensor const& w13) {
  if (c.dtype != nullptr) {
    return by_name<DType, 3>("dtype", c.dtype, {{{"float32", DType::f32}, {"bfloat16", DType::bf16}, {"float16", DType::f16}}});
  }
  if (c.quantization != nullptr && std::string_view(c.quantization) != "none") return DType::bf16;
  if (same(w13.dtype, dl_type<float>())) return DType::f32;
  if (same(w13.dtype, dl_type<bf16>())) return DType::bf16;
  if (same(w13.dtype, dl_type<f16>())) return DType::f16;
  detail::refuse("w13", text("dtype is ", describe(w13.dtype)), "float32, bfloat16 or float16 without a quantization");
}

/// The activations of moe.h. E_CONFIG for swigluoai: that name is of weights whose gate and up rows alternate, which no layer here reads.
inline activation::Any activation_of(moe_runner_config const& c) {
  if (c.activation != nullptr && name(activation::Kind::swigluoai) == c.activation) {
    throw Error(
        ErrorCode::config,
        "activation: swigluoai is of a w13 whose gate and up rows alternate, and w13 here has the gate rows first; put the even rows "
        "of w13, of its scales and of its bias before the odd ones, and give swigluoai_halves with activation_limit 7");
  }
  std::array<std::pair<std::string_view, activation::Kind>, activation::kKinds - 1> kinds;
  for (std::size_t i = 0, n = 0; i < activation::kKinds; ++i) {
    auto const kind = static_cast<activation::Kind>(i);
    if (kind != activation::Kind::swigluoai) kinds[n++] = {name(kind), kind};
  }
  activation::Any a{.kind = by_name("activation", c.activation, kinds)};
  for (auto const& [what, value] : {std::pair("activation_alpha", c.activation_alpha), std::pair("activation_beta", c.activation_beta)}) {
    if (!std::isfinite(value)) throw Error(ErrorCode::config, text(what, ": ", value, " is not a finite number"));
  }
  a.constants.alpha = c.activation_alpha;
  a.constants.beta = c.activation_beta;
  for (auto const& [what, value] :
       {std::pair("activation_situ_gate", c.activation_situ_gate), std::pair("activation_situ_up", c.activation_situ_up)}) {
    if (!(value > 0.0F) || !std::isfinite(value)) throw Error(ErrorCode::config, text(what, ": ", value, " is not positive and finite"));
  }
  a.constants.situ_gate = c.activation_situ_gate;
  a.constants.situ_up = c.activation_situ_up;
  if (!(c.activation_limit >= 0.0F)) {
    throw Error(ErrorCode::config, text("activation_limit: ", c.activation_limit, " is out of range [0, infinity]"));
  }
  a.constants.limit = c.activation_limit == 0.0F ? std::numeric_limits<float>::infinity() : c.activation_limit;
  activation::validate(a.kind, a.constants);
  return a;
}

/// Structs that were checked, and outlive the request. Everything but the weights' arrays is checked here; the sizes again by the layer.
/// Throws E_CONFIG or E_ARG.
inline Request request_of(moe_runner_config const& c, moe_weights const& w, std::shared_ptr<Group> group) {
  DLTensor const& w13 = *not_null("w13", w.w13);
  Request r;
  r.weights = &w;
  r.group = std::move(group);
  r.device = device_of("w13", w13);
  r.shape = {.hidden = c.hidden,
             .intermediate = c.intermediate,
             .num_experts = c.num_experts,
             .topk = c.topk,
             .weight_on_input = c.weight_on_input != 0};
  r.max_tokens_per_rank = c.max_tokens_per_rank;
  if (c.num_experts < 1 || c.num_experts > kMostSize) {
    throw Error(ErrorCode::config, text("num_experts: ", c.num_experts, " is out of range [1, ", kMostSize, "]"));
  }
  if (c.max_tokens_per_rank < 1) throw Error(ErrorCode::config, text("max_tokens_per_rank: ", c.max_tokens_per_rank, " is below 1"));
  if (c.num_threads < 0 || c.num_threads > kMostThreads) {
    throw Error(ErrorCode::config, text("num_threads: ", c.num_threads, " is out of range [0, ", kMostThreads, "]"));
  }
  r.external_router = c.router == nullptr;
  if (c.router != nullptr) {
    r.router = router_of(*c.router, r.device, c.num_experts, c.topk);
  } else {
    r.router.num_experts = c.num_experts;
    r.router.topk = c.topk;
    routing::validate(r.router);
  }
  r.activation = activation_of(c);
  r.dtype = dtype_of_request(c, w13);
  r.quantization = c.quantization == nullptr ? "none" : c.quantization;
  r.backend = c.backend != nullptr ? c.backend : r.group->size() == 1 ? "no_expert_parallel" : "all_to_all_v";
  r.experts = c.experts == nullptr ? "" : c.experts;
  r.num_threads = c.num_threads;
  r.log = c.log != 0;
  return r;
}

}  // namespace moe::c
