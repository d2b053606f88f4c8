// SPDX-License-Identifier: Apache-2.0
// core/layer_config.hpp: one layer as a type of constexpr values; each dimension may be left to run time.
#pragma once

#include <concepts>
#include <cstdint>
#include <tuple>

#include "moe/core/array.hpp"
#include "moe/core/error.hpp"
#include "moe/core/rule.hpp"

namespace moe {

/// Defaults that a model's configuration inherits and overrides. A dimension left `dynamic` is given at construction (LayerShape),
/// one that is fixed becomes part of every array type, so loops unroll and divisions vanish.
struct LayerDefaults {
  static constexpr int hidden = dynamic;        ///< H, width that the experts work on
  static constexpr int intermediate = dynamic;  ///< I, expert intermediate width on this rank
  static constexpr int num_experts = dynamic;   ///< E, logical routed experts
  static constexpr int topk = dynamic;          ///< k, experts per token
  using Act = float;                            ///< element of hidden states and outputs
  using Weight = float;                         ///< element of unquantised weights
  /// A token's result must not depend, bit for bit, on which other tokens are in the call (docs/semantics/glossary.md, section 6).
  static constexpr bool batch_invariant = false;
  /// The experts start while the rows of the dispatch are on their way (docs/architecture.md, "One schedule"). The value that was measured
  /// to be the faster one for a pair is measured_schedule() of layer/schedule_choice.hpp, for overlap_combine, too.
  static constexpr bool overlap_dispatch = false;
  /// The combine starts while the experts' products run, and follows them column block by column block (same section).
  static constexpr bool overlap_combine = false;
};

/// Whether a configuration asks for rows that do not depend on their batch. Default: it does not.
template <class Config>
inline constexpr bool kBatchInvariant = false;
template <class Config>
  requires requires { Config::batch_invariant; }
inline constexpr bool kBatchInvariant<Config> = Config::batch_invariant;

/// Whether a configuration asks for dispatch and experts in one schedule. Default: it does not.
template <class Config>
inline constexpr bool kOverlapsDispatch = false;
template <class Config>
  requires requires { Config::overlap_dispatch; }
inline constexpr bool kOverlapsDispatch<Config> = Config::overlap_dispatch;

/// Whether a configuration asks for experts and combine in one schedule. Default: it does not.
template <class Config>
inline constexpr bool kOverlapsCombine = false;
template <class Config>
  requires requires { Config::overlap_combine; }
inline constexpr bool kOverlapsCombine<Config> = Config::overlap_combine;

/// An RMSNorm of each expert's output, before the router's weight (Muse-Spark).
enum class ExpertNorm {
  none,      ///< no kernel has code for it; weights with one are refused
  always,    ///< weights without one are refused
  if_given,  ///< the weights decide at run time; experts that cannot compute it refuse those with one
};
/// What a configuration states of it: expert_norm. Default: none.
template <class Config>
inline constexpr ExpertNorm kExpertNorm = ExpertNorm::none;
template <class Config>
  requires requires { Config::expert_norm; }
inline constexpr ExpertNorm kExpertNorm<Config> = Config::expert_norm;

/// Whether a configuration's router needs a selection bias: a layer then refuses a null correction_bias. Default: nothing is checked.
template <class Config>
inline constexpr bool kHasSelectionBias = false;
template <class Config>
  requires requires { Config::has_selection_bias; }
inline constexpr bool kHasSelectionBias<Config> = Config::has_selection_bias;

/// Whether a configuration asks for exchange kernels with its sizes compiled in, which its library then holds. Default: it does not.
template <class Config>
inline constexpr bool kFixedKernels = false;
template <class Config>
  requires requires { Config::fixed_kernels; }
inline constexpr bool kFixedKernels<Config> = Config::fixed_kernels;

namespace detail {
template <class Config>
struct FixedKernels {
  using type = Config;
};
template <class Config>
  requires requires { typename Config::FixedKernels; }
struct FixedKernels<Config> {
  using type = typename Config::FixedKernels;
};
}  // namespace detail
/// The configuration by which such kernels are named: one that only adds to another (FixedKernels) takes the other's. Default: Config.
template <class Config>
using FixedKernelsOf = typename detail::FixedKernels<Config>::type;

/// The experts without weights that a configuration states, for a router whose sizes it fixes. Default: 0.
template <class Config>
inline constexpr int kNumZeroExperts = 0;
template <class Config>
  requires requires { Config::num_zero_experts; }
inline constexpr int kNumZeroExperts<Config> = Config::num_zero_experts;

template <class C>
concept ConfigHasHidden = requires {
  { C::hidden } -> std::convertible_to<int>;
};
MOE_MEMBER(ConfigHasHidden, "the layer configuration", "static constexpr int hidden", "H, or moe::dynamic");
template <class C>
concept ConfigHasIntermediate = requires {
  { C::intermediate } -> std::convertible_to<int>;
};
MOE_MEMBER(ConfigHasIntermediate, "the layer configuration", "static constexpr int intermediate", "I on this rank, or moe::dynamic");
template <class C>
concept ConfigHasNumExperts = requires {
  { C::num_experts } -> std::convertible_to<int>;
};
MOE_MEMBER(ConfigHasNumExperts, "the layer configuration", "static constexpr int num_experts", "E, or moe::dynamic");
template <class C>
concept ConfigHasTopK = requires {
  { C::topk } -> std::convertible_to<int>;
};
MOE_MEMBER(ConfigHasTopK, "the layer configuration", "static constexpr int topk", "experts per token, or moe::dynamic");
template <class C>
concept ConfigHasAct = requires { typename C::Act; };
MOE_MEMBER(ConfigHasAct, "the layer configuration", "using Act", "element of hidden states and outputs");
template <class C>
concept ConfigHasWeight = requires { typename C::Weight; };
MOE_MEMBER(ConfigHasWeight, "the layer configuration", "using Weight", "element of unquantised weights");
template <class C>
concept ConfigHasActivation = requires { typename C::Activation; };
MOE_MEMBER(ConfigHasActivation, "the layer configuration", "using Activation", "the function between the two matrix products");

namespace detail {
template <class C>
using ConfigContract =
    std::tuple<Verdict<rules::ConfigHasHidden, ConfigHasHidden<C>, C>, Verdict<rules::ConfigHasIntermediate, ConfigHasIntermediate<C>, C>,
               Verdict<rules::ConfigHasNumExperts, ConfigHasNumExperts<C>, C>, Verdict<rules::ConfigHasTopK, ConfigHasTopK<C>, C>,
               Verdict<rules::ConfigHasAct, ConfigHasAct<C>, C>, Verdict<rules::ConfigHasWeight, ConfigHasWeight<C>, C>,
               Verdict<rules::ConfigHasActivation, ConfigHasActivation<C>, C>>;
}  // namespace detail

/// A layer configuration: dimensions, element types, and the activation policy between the two matrix products.
template <class C>
concept LayerConfig = detail::kAllHold<detail::ConfigContract<C>>;

/// The most rows, columns or experts of a layer, so that sizes of arrays do not overflow.
inline constexpr std::int64_t kMostSize = std::int64_t{1} << 24;

namespace detail {
/// E_CONFIG if a dimension that the type fixes was given another value.
inline void expect_fixed(char const* what, int fixed, std::int64_t given) {
  if (fixed != dynamic && given != fixed) {
    throw Error(ErrorCode::config, text(what, ": ", given, " was given, but the layer's type fixes it to ", fixed));
  }
}
}  // namespace detail

/// The dimensions of one layer at run time; 0 leaves a fixed dimension to the type.
struct LayerShape {
  std::int64_t hidden = 0;
  std::int64_t intermediate = 0;
  int num_experts = 0;
  int topk = 0;
  /// The router weight multiplies the expert's input instead of its output (Llama-4). A router with kWeightOnInput sets it for its layer.
  bool weight_on_input = false;
};

/// The dimensions of a layer: constants if Config fixes them, else the values given at construction.
template <LayerConfig Config>
class Shape {
 public:
  /// E_CONFIG if a dimension is missing, not in [1, kMostSize], or contradicts the type; also if topk exceeds kMaxTopK. The router checks
  /// that there are topk experts to choose, since its zero experts count, too.
  explicit Shape(LayerShape const& s)
      : hidden_(resolve("hidden", Config::hidden, s.hidden)),
        intermediate_(resolve("intermediate", Config::intermediate, s.intermediate)),
        num_experts_(static_cast<int>(resolve("num_experts", Config::num_experts, s.num_experts))),
        topk_(static_cast<int>(resolve("topk", Config::topk, s.topk))),
        weight_on_input_(s.weight_on_input) {
    if (topk_ > kMaxTopK) {
      throw Error(ErrorCode::config, text("top_k: ", topk_, " exceeds the bound ", kMaxTopK));
    }
  }

  constexpr std::int64_t hidden() const { return Config::hidden == dynamic ? hidden_ : Config::hidden; }
  constexpr std::int64_t intermediate() const { return Config::intermediate == dynamic ? intermediate_ : Config::intermediate; }
  constexpr int num_experts() const { return Config::num_experts == dynamic ? num_experts_ : Config::num_experts; }
  constexpr int topk() const { return Config::topk == dynamic ? topk_ : Config::topk; }
  constexpr bool weight_on_input() const { return weight_on_input_; }

 private:
  static std::int64_t resolve(char const* what, int fixed, std::int64_t given) {
    if (given != 0) detail::expect_fixed(what, fixed, given);
    std::int64_t const value = fixed == dynamic ? given : fixed;
    if (value < 1 || value > kMostSize) {
      throw Error(ErrorCode::config, text(what, ": ", value, " is out of range [1, ", kMostSize, "]"));
    }
    return value;
  }
  std::int64_t hidden_;
  std::int64_t intermediate_;
  int num_experts_;
  int topk_;
  bool weight_on_input_;
};

}  // namespace moe
