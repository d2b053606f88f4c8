// SPDX-License-Identifier: Apache-2.0
// parallel/config.hpp: how one rank takes part in an MoE layer: tensor-, data-, context- and expert-parallel sizes flattened to (moe_tp,
// ep).
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include "moe/core/error.hpp"
#include "moe/parallel/backend_facts.hpp"
#include "moe/parallel/process_grid.hpp"

namespace moe {

/// The sizes and coordinates of a rank before flattening.
struct MoeParallelInput {
  int tp_size = 1;
  int tp_rank = 0;
  int pcp_size = 1;
  int pcp_rank = 0;
  int dp_size = 1;
  int dp_rank = 0;
  bool enable_expert_parallel = false;
  BackendFacts backend = kDefaultBackend;  ///< kFacts of the backend policy
  /// Explicit sizes (extension): moe_ep_size · moe_tp_size = flat size. Unset: expert parallel over all flat ranks, or none.
  std::optional<int> moe_ep_size{};
  std::optional<int> moe_tp_size{};
};

/// How the MoE layer sees the grid: flat rank = (dp · PCP + pcp) · TP + tp. Experts are spread over ep, each expert's weights are
/// split over moe_tp. The original sizes stay: they say who holds which tokens.
struct MoeParallel {
  int tp_size = 1, tp_rank = 0;
  int pcp_size = 1, pcp_rank = 0;
  int dp_size = 1, dp_rank = 0;
  int flat_size = 1, flat_rank = 0;
  int moe_tp_size = 1, moe_tp_rank = 0;
  int ep_size = 1, ep_rank = 0;
  bool use_ep = false;
  int sp_size = 1;  ///< TP under sequence parallel inside the layer, else 1
  BackendFacts backend{};

  /// Tokens that TP peers hold in common are split among them before dispatch.
  bool use_sp_moe() const { return sp_size > 1; }
  /// Ranks of the flat group hold different tokens.
  bool tokens_differ() const { return dp_size > 1 || pcp_size > 1 || sp_size > 1; }
  /// Expert parallel with different tokens: an all-to-all backend moves them.
  bool use_all2all() const { return use_ep && tokens_differ(); }
  /// Tokens must travel, with EP or without: without it each expert is sharded over all flat ranks, which then need all tokens
  /// (all-gather and reduce-scatter).
  bool needs_dispatch() const { return tokens_differ(); }
  /// The backend in use delivers [L, C, H].
  bool batched_format() const { return use_all2all() && backend.batched; }
  /// Distinct sources of tokens.
  int num_dispatchers() const {
    bool const split = backend.sender_split && dp_size > 1 && ep_size % tp_size == 0 && moe_tp_size == 1;
    return split ? ep_size / tp_size : ep_size;
  }
};

/// Flattens. E_CONFIG: a size below 1 or a rank outside [0, size) by name, PCP with DP, explicit sizes that do
/// not multiply to the flat size.
inline MoeParallel flatten(MoeParallelInput const& in) {
  detail::check_size("tp_size", in.tp_size);
  detail::check_size("pcp_size", in.pcp_size);
  detail::check_size("dp_size", in.dp_size);
  detail::check_rank("tp_rank", in.tp_rank, in.tp_size);
  detail::check_rank("pcp_rank", in.pcp_rank, in.pcp_size);
  detail::check_rank("dp_rank", in.dp_rank, in.dp_size);
  GridSizes grid;
  grid.dp = in.dp_size;
  grid.pcp = in.pcp_size;
  grid.tp = in.tp_size;
  ProcessGrid const checked(grid);

  MoeParallel out;
  out.backend = in.backend;
  out.tp_size = in.tp_size;
  out.tp_rank = in.tp_rank;
  out.pcp_size = in.pcp_size;
  out.pcp_rank = in.pcp_rank;
  out.dp_size = in.dp_size;
  out.dp_rank = in.dp_rank;
  out.flat_size = static_cast<int>(checked.world_size());
  out.flat_rank = (in.dp_rank * in.pcp_size + in.pcp_rank) * in.tp_size + in.tp_rank;

  if (in.moe_ep_size.has_value() || in.moe_tp_size.has_value()) {
    int const ep = in.moe_ep_size.value_or(out.flat_size / std::max(in.moe_tp_size.value_or(1), 1));
    int const tp = in.moe_tp_size.value_or(out.flat_size / std::max(ep, 1));
    detail::check_size("moe_ep_size", ep);
    detail::check_size("moe_tp_size", tp);
    if (std::int64_t{ep} * tp != out.flat_size) {
      throw Error(ErrorCode::config, text("moe_ep_size * moe_tp_size = ", ep, " * ", tp, " must be dp * pcp * tp = ", out.flat_size));
    }
    out.use_ep = ep > 1;
    out.ep_size = ep;
    out.ep_rank = out.flat_rank / tp;
    out.moe_tp_size = tp;
    out.moe_tp_rank = out.flat_rank % tp;
  } else if (in.enable_expert_parallel && out.flat_size > 1) {
    out.use_ep = true;
    out.ep_size = out.flat_size;
    out.ep_rank = out.flat_rank;
  } else {
    out.moe_tp_size = out.flat_size;
    out.moe_tp_rank = out.flat_rank;
  }
  if (out.use_ep && in.tp_size > 1 && in.dp_size > 1 && out.backend.sequence_parallel) out.sp_size = in.tp_size;
  return out;
}

/// Rows of one TP rank when n tokens held in common are split for sequence parallel: padded = ceil(n / sp) · sp rows in all.
struct SequenceSlice {
  int padded;  ///< rows over all ranks
  int begin;   ///< first row of this rank
  int rows;    ///< rows of this rank, padding included
  int valid;   ///< the first `valid` of them are tokens, the rest zero rows with id -1
  bool operator==(SequenceSlice const&) const = default;
};

/// E_ARG on n < 0 or a rank outside [0, sp_size).
inline SequenceSlice sequence_slice(int n, int sp_size, int sp_rank) {
  if (n < 0) throw Error(ErrorCode::argument, text("number of tokens must be at least 0, is ", n));
  if (sp_size < 1 || sp_rank < 0 || sp_rank >= sp_size) {
    throw Error(ErrorCode::argument, text("sp_rank ", sp_rank, " is out of range [0, ", sp_size, ")"));
  }
  int const rows = n / sp_size + (n % sp_size != 0 ? 1 : 0);
  int const begin = rows * sp_rank;
  return {rows * sp_size, begin, rows, std::clamp(n - begin, 0, rows)};
}

}  // namespace moe
