// SPDX-License-Identifier: Apache-2.0
// routing/row/row_router.hpp: what all routers that choose row by row share: route_row() over a batch, on the host or on the device.
#pragma once

#include <atomic>
#include <concepts>
#include <cstdint>

#include "moe/core/host_pool.hpp"
#include "moe/core/space.hpp"
#include "moe/routing/row/expert_capacity.hpp"
#include "moe/routing/row/route_args.hpp"
#include "moe/routing/row/route_row.hpp"
#include "moe/routing/row/validate.hpp"

namespace moe::routing {

/// A router whose choices are those of Config: RouterConfig, or a type derived from it that hides fixed choices by static constexpr
/// members.
template <class ConfigType>
class RowRouter {
 public:
  using Config = ConfigType;
  static constexpr bool kWeightOnInput = false;

  int num_experts() const { return config_.num_experts; }
  int topk() const { return config_.topk; }
  /// Width of router_logits.
  int num_logits() const { return config_.num_logits(); }
  /// Width of topk_ids and topk_weights: k and the fused shared experts.
  int num_slots() const { return config_.num_slots(); }
  Config const& config() const { return config_; }
  /// The same with every choice as a run-time value.
  RouterConfig resolved() const { return resolve(config_); }

  /// Routes a batch on the host. Rows are independent: the result of a row does not depend on other rows or on the threads; with an
  /// expert_capacity it depends on the earlier rows of its sequence. Throws E_ARG if the arrays do not fit.
  template <class L>
  void select(RouteArgs<L> const& a) const {
    check_args(resolved(), a);
    check_logits(a);
    bool const overflows = capacity_may_bind(resolved(), a);
    std::int64_t const m = a.logits.extent(0);
    std::atomic<std::int64_t> degenerate{0};
    int const threads = m * num_logits() >= kParallelLogits ? host_threads() : 1;
    HostPool::instance().for_each(m, kRowGrain, threads, [&](std::int64_t t, int) {
      float* const shared = a.shared_weights.data_handle() == nullptr ? nullptr : row_ptr(a.shared_weights, t);
      if (t >= a.num_valid_rows) {
        pad_row(config_, row_ptr(a.topk_ids, t), row_ptr(a.topk_weights, t), shared);
        return;
      }
      RowResult const row = route_row(config_, row_ptr(a.logits, t), a.token_ids == nullptr ? 0 : a.token_ids[t], row_ptr(a.topk_ids, t),
                                      row_ptr(a.topk_weights, t), shared);
      if (row.degenerate) degenerate.fetch_add(1, std::memory_order_relaxed);
    });
    if (overflows) drop_overflow(resolved(), a);
    if (a.counters != nullptr) a.counters->degenerate_rows += degenerate;
  }

  /// Routes a batch on the device: one launch, capturable. Defined in routing/device/route.cuh, which a .cu that uses it includes.
  template <class L>
  void select(RouteArgs<L> const& a, Stream<space::cuda> stream) const;

 protected:
  explicit RowRouter(Config const& config) : config_(config) { validate(resolved()); }

 private:
  static constexpr std::int64_t kParallelLogits = 1 << 14;  ///< below it waking the threads costs more than the rows
  static constexpr std::int64_t kRowGrain = 16;
  Config config_;
};

}  // namespace moe::routing

namespace moe::facts {

/// Router::Config, with the public base class routing::RowRouter<Config>: it chooses row by row as Config says. The CUDA space then maps
/// and counts in the launch that routes, experts may route inside, and routing::Fixed compiles it for a configuration's sizes. Default: it
/// chooses in a way of its own; layers of the CUDA space refuse a mapping, and fused shared experts on several ranks (E_UNSUPPORTED).
template <class Router>
constexpr bool chooses_by_row() {
  if constexpr (requires { typename Router::Config; }) {
    return std::derived_from<Router, routing::RowRouter<typename Router::Config>>;
  } else {
    return false;
  }
}

}  // namespace moe::facts
