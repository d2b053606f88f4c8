// SPDX-License-Identifier: Apache-2.0
// parallel/validation.hpp: the whole parallel configuration of a process and every rule it must satisfy before anything communicates.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "moe/core/error.hpp"
#include "moe/parallel/config.hpp"
#include "moe/parallel/fingerprint.hpp"
#include "moe/parallel/placement.hpp"

namespace moe {

/// Load balancing options. Units: steps.
struct EplbOptions {
  bool enable = false;
  std::optional<int> num_redundant_experts{};  ///< X; unset: 0
  int window = 1000;
  int step_interval = 3000;
  int log_interval = 1000;
  bool async = true;
  std::string policy = "default";
  bool policy_async_capable = true;  ///< the policy works on host copies and its own communicator
};

/// Dual-batch overlap options. Units: tokens.
struct DboOptions {
  bool enable = false;
  int decode_threshold = 32;
  int prefill_threshold = 512;
};

/// The parallel configuration of a process.
struct ParallelConfig {
  GridSizes grid{};
  int global_rank = 0;
  int world_size = 1;     ///< processes launched
  int local_ranks = 1;    ///< processes on this node
  int visible_gpus = -1;  ///< GPUs this node's processes see; -1: host space, not checked
  bool enable_expert_parallel = false;
  std::optional<int> moe_ep_size{};
  std::optional<int> moe_tp_size{};
  BackendFacts backend = kDefaultBackend;  ///< kFacts of the backend policy; registry::backend_facts() has them by name

  int num_experts = 1;        ///< E, logical
  int topk = 1;               ///< k
  int hidden = 1;             ///< H
  int intermediate_size = 1;  ///< I
  PlacementStrategy placement = PlacementStrategy::linear;
  bool strict_placement = false;
  int num_expert_group = 1;
  bool allow_empty_ranks = false;

  int dp_local_size = 1;  ///< DP ranks on this node
  bool external_load_balancing = false;
  bool hybrid_load_balancing = false;
  bool enable_elastic_ep = false;

  int chunk_size = 256;  ///< tokens per chunk
  EplbOptions eplb{};
  DboOptions dbo{};
};

/// A configuration that passed every rule, with what follows from it.
struct ResolvedParallel {
  MoeParallel moe;
  int num_redundant = 0;  ///< X
  int num_physical = 0;   ///< P = E + X
  PlacementChoice placement;
};

namespace detail {
inline void require(bool ok, ErrorCode code, std::string const& message) {
  if (!ok) throw Error(code, message);
}
inline void require_positive(std::string_view field, std::int64_t value) {
  require(value > 0, ErrorCode::config, text(field, " must be greater than 0, is ", value));
}

/// "X" that make E + X divisible by R, just below and above: "0 or 8".
inline std::string nearest_redundant(int num_experts, int num_redundant, int ep_size) {
  int const over = (num_experts + num_redundant) % ep_size;
  int const below = num_redundant - over;
  int const above = below + ep_size;
  return below >= 0 ? text(below, " or ", above) : text(above);
}

inline int resolve_redundant(ParallelConfig const& config, int ep_size) {
  EplbOptions const& eplb = config.eplb;
  int const asked = eplb.num_redundant_experts.value_or(0);
  require(asked >= 0, ErrorCode::config, text("num_redundant_experts must be at least 0, is ", asked));
  require(asked <= kMaxWorldSize, ErrorCode::config, text("num_redundant_experts must be at most ", kMaxWorldSize, ", is ", asked));
  if (!eplb.enable) {
    require(asked == 0, ErrorCode::config, text("redundant experts need EPLB: num_redundant_experts = ", asked, ", enable_eplb = false"));
    return 0;
  }
  int const physical = config.num_experts + asked;
  require(physical % ep_size == 0, ErrorCode::config,
          text("P must be divisible by ep_size; nearest valid num_redundant_experts are ",
               nearest_redundant(config.num_experts, asked, ep_size), " (num_experts = ", config.num_experts,
               ", num_redundant_experts = ", asked, ", ep_size = ", ep_size, ")"));
  return asked;
}

inline void validate_eplb(ParallelConfig const& config, MoeParallel const& moe) {
  EplbOptions const& eplb = config.eplb;
  if (eplb.enable) {
    bool const expert_parallel = config.enable_expert_parallel || config.moe_ep_size.value_or(1) > 1;
    require(expert_parallel, ErrorCode::config, "enable_expert_parallel must be set to use EPLB");
    require(moe.ep_size > 1, ErrorCode::config, text("EPLB needs more than one rank, ep_size is ", moe.ep_size));
    require_positive("eplb window", eplb.window);
    require_positive("eplb step_interval", eplb.step_interval);
    require_positive("eplb log_interval", eplb.log_interval);
    require(!eplb.async || eplb.policy_async_capable, ErrorCode::config,
            text("EPLB policy \"", eplb.policy, "\" cannot run asynchronously; set async = false"));
  }
  if (config.enable_elastic_ep) {
    require(eplb.enable, ErrorCode::config, "elastic EP needs EPLB: enable_eplb = false");
    require(config.grid.pp == 1, ErrorCode::config, text("elastic EP needs pp_size = 1, is ", config.grid.pp));
    require(!config.hybrid_load_balancing, ErrorCode::config, "elastic EP does not work with hybrid load balancing");
  }
}
}  // namespace detail

/// Checks everything that one process can check alone, in a fixed order, and derives the layer's view. Raises before any
/// communicator exists. E_CONFIG, each message naming the field, its value and the bound.
inline ResolvedParallel validate(ParallelConfig const& config) {
  ProcessGrid const grid(config.grid);
  grid.check_world_size(config.world_size);
  GridCoordinates const at = grid.coordinates(config.global_rank);
  detail::require(config.visible_gpus < 0 || config.local_ranks <= config.visible_gpus, ErrorCode::config,
                  text("local ranks = ", config.local_ranks, " exceed the ", config.visible_gpus, " visible GPUs"));
  detail::check_size("num_experts", config.num_experts);
  detail::require_positive("topk", config.topk);
  detail::require_positive("hidden", config.hidden);
  detail::require_positive("intermediate_size", config.intermediate_size);
  detail::require_positive("chunk size", config.chunk_size);
  detail::require_positive("dp_local_size", config.dp_local_size);
  detail::require(config.dp_local_size <= config.grid.dp, ErrorCode::config,
                  text("dp_local_size = ", config.dp_local_size, " exceeds dp_size = ", config.grid.dp));
  detail::require(!config.external_load_balancing || config.grid.dp > 1, ErrorCode::config,
                  text("external load balancing needs dp_size > 1, is ", config.grid.dp));

  ResolvedParallel out;
  out.moe = flatten({.tp_size = config.grid.tp,
                     .tp_rank = at.tp,
                     .pcp_size = config.grid.pcp,
                     .pcp_rank = at.pcp,
                     .dp_size = config.grid.dp,
                     .dp_rank = at.dp,
                     .enable_expert_parallel = config.enable_expert_parallel,
                     .backend = config.backend,
                     .moe_ep_size = config.moe_ep_size,
                     .moe_tp_size = config.moe_tp_size});
  detail::require(config.intermediate_size % out.moe.moe_tp_size == 0, ErrorCode::config,
                  text("intermediate_size = ", config.intermediate_size, " must be divisible by the layer's tensor parallel size ",
                       out.moe.moe_tp_size));
  detail::validate_eplb(config, out.moe);
  out.num_redundant = detail::resolve_redundant(config, out.moe.ep_size);
  out.num_physical = config.num_experts + out.num_redundant;
  detail::require(out.num_physical >= out.moe.ep_size || config.allow_empty_ranks, ErrorCode::config,
                  text("more ranks than experts: ep_size = ", out.moe.ep_size, ", num_experts = ", config.num_experts,
                       "; allow_empty_ranks permits ranks that compute nothing"));
  if (config.dbo.enable) {
    detail::require(out.moe.backend.asynchronous, ErrorCode::config,
                    text("DBO needs an asynchronous backend, ", out.moe.backend.name, " is not"));
    detail::require_positive("dbo decode_threshold", config.dbo.decode_threshold);
    detail::require_positive("dbo prefill_threshold", config.dbo.prefill_threshold);
  }
  out.placement = choose_placement({.strategy = config.placement,
                                    .num_expert_group = config.num_expert_group,
                                    .num_redundant_experts = out.num_redundant,
                                    .enable_eplb = config.eplb.enable,
                                    .backend_translates_ids = out.moe.backend.translates_ids || !out.moe.use_all2all(),
                                    .strict = config.strict_placement});
  return out;
}

/// E_UNSUPPORTED naming the first pair of GPUs without peer-to-peer access. `reaches(a, b)` over the node's GPU indices.
template <class Reaches>
void check_peer_access(std::string_view backend, int num_gpus, Reaches&& reaches) {
  for (int a = 0; a < num_gpus; ++a) {
    for (int b = 0; b < num_gpus; ++b) {
      detail::require(a == b || reaches(a, b), ErrorCode::unsupported,
                      text(backend, " needs peer-to-peer access, absent from GPU ", a, " to GPU ", b));
    }
  }
}

/// E_UNSUPPORTED if the GPU's architecture (major · 10 + minor) is below what the backend was built for.
inline void check_arch(std::string_view backend, int arch, int min_arch) {
  detail::require(arch >= min_arch, ErrorCode::unsupported,
                  text(backend, " needs GPU architecture sm_", min_arch, " or newer, this GPU is sm_", arch));
}

/// Every field that must be equal on all ranks: values local to a rank (its rank, node, GPUs) are left out.
inline Fingerprint fingerprint(ParallelConfig const& c) {
  auto const optional = [](std::optional<int> const& value) { return value.has_value() ? text(*value) : std::string("unset"); };
  Fingerprint out;
  out.add("world_size", c.world_size).add("xdp_size", c.grid.xdp).add("dp_size", c.grid.dp).add("pp_size", c.grid.pp);
  out.add("pcp_size", c.grid.pcp).add("tp_size", c.grid.tp).add("dcp_size", c.grid.dcp);
  out.add("enable_expert_parallel", c.enable_expert_parallel).add("backend", c.backend.name);
  out.add("moe_ep_size", optional(c.moe_ep_size)).add("moe_tp_size", optional(c.moe_tp_size));
  out.add("num_experts", c.num_experts).add("topk", c.topk).add("hidden", c.hidden).add("intermediate_size", c.intermediate_size);
  out.add("placement", name(c.placement)).add("strict_placement", c.strict_placement).add("num_expert_group", c.num_expert_group);
  out.add("allow_empty_ranks", c.allow_empty_ranks).add("external_load_balancing", c.external_load_balancing);
  out.add("hybrid_load_balancing", c.hybrid_load_balancing).add("enable_elastic_ep", c.enable_elastic_ep);
  out.add("chunk_size", c.chunk_size);
  out.add("enable_eplb", c.eplb.enable).add("num_redundant_experts", optional(c.eplb.num_redundant_experts));
  out.add("eplb_window", c.eplb.window).add("eplb_step_interval", c.eplb.step_interval).add("eplb_log_interval", c.eplb.log_interval);
  out.add("eplb_async", c.eplb.async).add("eplb_policy", c.eplb.policy);
  out.add("enable_dbo", c.dbo.enable).add("dbo_decode_threshold", c.dbo.decode_threshold);
  out.add("dbo_prefill_threshold", c.dbo.prefill_threshold);
  return out;
}

}  // namespace moe
