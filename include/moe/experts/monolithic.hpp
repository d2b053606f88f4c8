// SPDX-License-Identifier: Apache-2.0
// experts/monolithic.hpp: experts that route inside (monolithic): each rank gets the logits of the rows, chooses, and computes those of its
// experts that were chosen. Plain host C++; the kernel of the CUDA space is in monolithic.cuh.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <string_view>

#include "moe/core/buffer.hpp"
#include "moe/core/contract/facts.hpp"
#include "moe/core/layer_config.hpp"
#include "moe/core/tokens.hpp"
#include "moe/core/types.hpp"
#include "moe/routing/row/row_router.hpp"

/// Defined in monolithic.cuh, so that the linker's message for a program without the kernels says what to do.
namespace moe::fix {
void include_moe_experts_monolithic_cuh();
}  // namespace moe::fix

namespace moe::experts {

namespace detail {

/// Rows of all logits, and what is chosen of them.
struct ChosenRows {
  Rows<std::int32_t const> local_ids;  ///< [R, num_logits] local id of each expert, or kNoExpert
  Rows<std::int32_t> topk_ids;         ///< [R, k] in: chosen experts; out: their local ids
};
MOE_HD inline void localize(ChosenRows const& rows, std::int64_t t, std::int64_t j) {
  std::int32_t const id = rows.topk_ids(t, j);
  rows.topk_ids(t, j) = id >= 0 && id < rows.local_ids.extent(1) ? rows.local_ids(t, id) : kNoExpert;
}
inline void localize(ChosenRows const& rows, HostStream) {
  for (std::int64_t t = 0; t < rows.topk_ids.extent(0); ++t) {
    for (std::int64_t j = 0; j < rows.topk_ids.extent(1); ++j) localize(rows, t, j);
  }
}
/// Enqueues; defined in monolithic.cuh.
void localize(ChosenRows const& rows, Stream<space::cuda> stream);

/// "monolithic_" and the name of the experts inside, as an array that ends with 0.
template <class Inner>
inline constexpr auto monolithic_name = [] {
  constexpr std::string_view kPrefix = "monolithic_", kInner = Inner::kName;
  std::array<char, kPrefix.size() + kInner.size() + 1> name{};
  std::copy(kInner.begin(), kInner.end(), std::copy(kPrefix.begin(), kPrefix.end(), name.begin()));
  return name;
}();

}  // namespace detail

/// Inner: experts of either space that read the standard format. Their choice is that of the layer's router, made where the experts are.
/// Backends: local or gathering ones. No mapping, no counted load, no zero experts, no shared experts among the routed ones.
template <class Inner>
struct Monolithic : Inner {
  static constexpr char const* kName = detail::monolithic_name<Inner>.data();  ///< "monolithic_reference" around "reference"
  static constexpr bool kRoutesInside = true;
  using Computes = Inner;
  using Space = typename Inner::Space;
  using Params = typename Inner::Params;
  static constexpr bool reads(ActivationFormat format) { return format == ActivationFormat::standard && Inner::reads(format); }
  /// The library's routers that choose row by row.
  template <class Router>
  static constexpr bool supports_router() {
    return facts::chooses_by_row<Router>();
  }

  template <class Config, class Quant, ActivationFormat Format>
  class Kernel {
   public:
    using InnerKernel = typename Inner::template Kernel<Config, Quant, Format>;
    using Output = typename InnerKernel::Output;
    using Weights = WeightsOf<Config, Quant>;
    static constexpr bool kSkipsForeignIds = true;  ///< there are none: ids are those of all experts

    /// As Inner's.
    Kernel(Shape<Config> const& shape, Weights const& weights, std::int64_t max_rows, Quant const& quant,
           typename Config::Activation const& activation, Params const& params, Arena<Space>& arena)
        : inner_(shape, weights, max_rows, quant, activation, params, arena),
          topk_(shape.topk()),
          ids_(arena.template take<std::int32_t>(max_rows * topk_)),
          weights_(arena.template take<float>(max_rows * topk_)) {
      if constexpr (Space::kKind == SpaceKind::cuda) fix::include_moe_experts_monolithic_cuh();
    }

    template <class Router>
    void route_with(Router const& router) {
      router_ = &router;
      select_ = [](void const* self, routing::RouteArgs<float> const& args, [[maybe_unused]] Stream<Space> stream) {
        auto const& chosen = *static_cast<Router const*>(self);
        if constexpr (Space::kKind == SpaceKind::host) {
          chosen.select(args);
        } else {
          chosen.select(args, stream);
        }
      };
    }
    /// tokens: of every logit (facts::routes_inside). y[r] = Σ_j w_j FFN_{id_j}(x_r) over the chosen experts of this rank.
    template <class Payload, class Scale>
    void apply(StandardTokens<Payload, Scale> const& tokens, Rows<Output> y, Stream<Space> stream) {
      std::int64_t const rows = tokens.rows.extent(0);
      auto const ids = make_rows(ids_, rows, topk_);
      auto const weights = make_rows(weights_, rows, topk_);
      select_(router_, {.logits = tokens.topk_weights, .num_valid_rows = rows, .topk_ids = ids, .topk_weights = weights}, stream);
      detail::localize({tokens.topk_ids, ids}, stream);
      inner_.apply(
          StandardTokens<Payload, Scale>{tokens.rows, tokens.scales, make_rows(static_cast<std::int32_t const*>(ids_), rows, topk_),
                                         make_rows(static_cast<float const*>(weights_), rows, topk_), tokens.num_rows},
          y, stream);
    }
    void weights_changed(Stream<Space> stream) { facts::weights_changed(inner_, stream); }
    bool capturable() const
      requires(facts::may_not_capture<InnerKernel const>())
    {
      return inner_.capturable();
    }

   private:
    InnerKernel inner_;
    std::int64_t topk_;
    std::int32_t* ids_;  // [max_rows, k]
    float* weights_;     // [max_rows, k]
    void const* router_ = nullptr;
    void (*select_)(void const*, routing::RouteArgs<float> const&, Stream<Space>) = nullptr;
  };
};

}  // namespace moe::experts
