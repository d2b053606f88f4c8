// SPDX-License-Identifier: Apache-2.0
// runner/parts.hpp: the parts of a runner: which there are by default, and the object of each in a memory space.
#pragma once

#include "moe/core/contract/facts.hpp"
#include "moe/runner/chunking.hpp"
#include "moe/runner/dual_batch.hpp"
#include "moe/runner/gate.hpp"
#include "moe/runner/output.hpp"
#include "moe/runner/parallel.hpp"
#include "moe/runner/shared_experts.hpp"
#include "moe/runner/transform.hpp"

namespace moe {

/// The parts of a block that has nothing but its layer. A block's parts inherit this and override types.
struct RunnerDefaults {
  using Gate = runner::gate::Outside;              ///< the logits: Outside, Linear, Any
  using Input = runner::transform::None;           ///< before the experts: None, Projection
  using Output = runner::transform::None;          ///< after the experts: None, Projection
  using Shared = runner::shared::None;             ///< None, Separate, Dense, Stored
  using Scaling = runner::scaling::None;           ///< None, Factor, SharedInverse
  using ZeroExperts = runner::zero_experts::None;  ///< None, Identity
  using End = runner::end::None;                   ///< None, BiasNorm
  using Chunking = runner::chunking::None;         ///< None, Lockstep
  using DualBatch = runner::dual_batch::None;      ///< None, Halves
  using Parallel = runner::parallel::None;         ///< None, Groups
};

namespace runner::detail {

/// The object of a policy, or nothing.
struct Nothing {
  static constexpr bool active() { return false; }
  static constexpr bool takes_routing_weights() { return false; }
};
template <class Policy, class Space, class Act>
struct PartOf {
  using type = Nothing;
};
template <class Policy, class Space, class Act>
  requires requires { typename Policy::template Part<Space, Act>; }
struct PartOf<Policy, Space, Act> {
  using type = typename Policy::template Part<Space, Act>;
};
template <class Policy>
struct GroupOf {
  using type = Nothing;
};
template <class Policy>
  requires requires { typename Policy::Group; }
struct GroupOf<Policy> {
  using type = typename Policy::Group;
};
template <class Policy, class Comm>
struct ChunksOf {
  using type = Nothing;
};
template <class Policy, class Comm>
  requires requires { typename Policy::template Plan<Comm>; }
struct ChunksOf<Policy, Comm> {
  using type = typename Policy::template Plan<Comm>;
};
template <class Policy, class Layer>
struct HalvedOf {
  using type = Nothing;
};
template <class Policy, class Layer>
  requires requires { typename Policy::template Halved<Layer>; }
struct HalvedOf<Policy, Layer> {
  using type = typename Policy::template Halved<Layer>;
};
/// Element of the shared experts' output.
template <class Part, class Act>
struct SharedRowOf {
  using type = Act;
};
template <class Part, class Act>
  requires requires { typename Part::Output; }
struct SharedRowOf<Part, Act> {
  using type = typename Part::Output;
};
/// Whether a layer's rows travel in halves. OnHost has none.
template <class Layer>
inline constexpr bool kInHalves = false;
template <class Layer>
  requires requires { typename Layer::Half; }
inline constexpr bool kInHalves<Layer> = facts::is_asynchronous<typename Layer::Backend>();
/// Whether a layer's experts route inside. A layer without this constant: no.
template <class Layer>
inline constexpr bool kMonolithic = false;
template <class Layer>
  requires requires { Layer::kMonolithic; }
inline constexpr bool kMonolithic<Layer> = Layer::kMonolithic;
template <class Policy>
inline constexpr bool kPresent = !requires { requires Policy::kAbsent; };

}  // namespace runner::detail

}  // namespace moe
