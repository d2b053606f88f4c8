// SPDX-License-Identifier: Apache-2.0
// core/contract/params.hpp: optional members of a policy's Params, each with what holds without it. Layers, runners and programs read these
// functions. Members that a configuration may state are in core/config_defaults.hpp.
#pragma once

namespace moe::facts {

/// Router::Params::num_experts: 0 if the user has set none, which a layer then reports. Default: the constructor's own error is reported.
template <class Params>
constexpr bool lacks_num_experts([[maybe_unused]] Params const& params) {
  if constexpr (requires { params.num_experts == 0; }) {
    return params.num_experts == 0;
  } else {
    return false;
  }
}
/// Router::Params::correction_bias: a bias of each expert's score, for the choice alone; a layer whose Config::has_selection_bias is true
/// refuses null. Default: the router takes no such bias, and nothing is checked.
template <class Params>
constexpr bool takes_correction_bias() {
  return requires(Params const& params) { params.correction_bias; };
}
/// Router::Params::hash_table, with the other arrays of routing::RouterConfig, all in the router's space. Default: its Params are the same
/// in both spaces.
template <class Params>
constexpr bool takes_tables() {
  return requires(Params const& params) { params.hash_table; };
}

/// Backend::Params::deduplicate: a token goes to a rank once, and its outputs there are added before they come back. Default: the backend
/// has no such option.
template <class Params>
constexpr bool deduplicates([[maybe_unused]] Params const& params) {
  if constexpr (requires { params.deduplicate; }) {
    return params.deduplicate;
  } else {
    return false;
  }
}

/// Backend::Params::expert_rank, an optional<int>: the placement's rank whose experts this rank has. A runner sets it, where ranks of the
/// communicator are not those of the placement. Default: the communicator's rank.
template <class Params>
constexpr bool takes_expert_rank() {
  return requires(Params const& params) { params.expert_rank; };
}
template <class Params>
constexpr int expert_rank([[maybe_unused]] Params const& params, int rank) {
  if constexpr (takes_expert_rank<Params>()) {
    return params.expert_rank.value_or(rank);
  } else {
    return rank;
  }
}

/// Experts::Params::workers: the most multiprocessors that they use, so that the kernels of another half batch run beside them. Default:
/// they use all.
template <class Params>
constexpr bool takes_workers() {
  return requires(Params const& params) { params.workers; };
}
/// Experts::Params::workspace, a shared_ptr: memory that layers with the same experts share if they do not compute at the same time.
/// Default: each layer has its own.
template <class Params>
constexpr bool shares_workspace() {
  return requires(Params const& params) { params.workspace; };
}
/// Experts::Params::expected_rows: a hint for the tile, the rows of an expert. Default: they need no hint.
template <class Params>
constexpr bool takes_expected_rows() {
  return requires(Params const& params) { params.expected_rows; };
}
/// Experts::Params::num_threads: threads of the host, 0 for all. Default: they decide.
template <class Params>
constexpr bool takes_num_threads() {
  return requires(Params const& params) { params.num_threads; };
}

}  // namespace moe::facts
