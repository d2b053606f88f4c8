// SPDX-License-Identifier: Apache-2.0
// models/loaded_parts.hpp: the parameters of a runner's parts, made of the weights around a layer, and the memory that holds them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <string_view>
#include <type_traits>
#include <vector>

#include "moe/core/array.hpp"
#include "moe/core/buffer.hpp"
#include "moe/core/error.hpp"
#include "moe/core/host_pool.hpp"
#include "moe/core/space.hpp"
#include "moe/io/expert_loader.hpp"
#include "moe/io/host_layer_weights.hpp"
#include "moe/io/huge_pages.hpp"
#include "moe/models/runtime_layer.hpp"
#include "moe/modular_kernel.hpp"
#include "moe/routing/any_router.hpp"
#include "moe/runner/declaration.hpp"

namespace moe::models {

/// The parts of any block, chosen at run time by the checkpoint. Shared: the policy of shared experts in the layer's space.
template <class Weight, template <class> class SharedPolicy>
struct AnyParts : RunnerDefaults {
  using Gate = runner::gate::Any;
  using Input = runner::transform::Projection<Weight>;
  using Output = runner::transform::Projection<Weight>;
  using Shared = SharedPolicy<Weight>;
  using Scaling = runner::scaling::Factor;
  using ZeroExperts = runner::zero_experts::Identity;
  using End = runner::end::BiasNorm;
};

namespace detail {

template <class Params>
struct ProjectionElement {
  using type = void;
};
template <class Params>
  requires requires(Params p) { p.weight; }
struct ProjectionElement<Params> {
  using type = std::remove_cv_t<typename decltype(Params::weight)::element_type>;
};
template <class Shared>
struct SharedElement {
  using type = void;
};
template <class Shared>
  requires(
      !requires { typename Shared::Weight; } && requires(typename Shared::Params p) { p.weights; })
struct SharedElement<Shared> {
  using type = std::remove_cv_t<typename decltype(decltype(Shared::Params::weights)::w2.codes)::element_type>;
};
template <class Shared>
  requires requires { typename Shared::Weight; }
struct SharedElement<Shared> {
  using type = typename Shared::Weight;  // the codes of a scheme are not an element type
};

}  // namespace detail

/// The element in which the weights around a layer are read: that of the parts; float where no part has any.
template <class Parts>
using LoadedElement =
    std::conditional_t<!std::is_void_v<typename detail::SharedElement<typename Parts::Shared>::type>,
                       typename detail::SharedElement<typename Parts::Shared>::type,
                       std::conditional_t<!std::is_void_v<typename detail::ProjectionElement<typename Parts::Input::Params>::type>,
                                          typename detail::ProjectionElement<typename Parts::Input::Params>::type, float>>;

/// Where the arrays of the parts lie: in host memory where they were read; load_runner_cuda.hpp copies them to the device.
template <class Space>
class PartMemory;
template <>
class PartMemory<space::host> {
 public:
  template <class T>
  T const* copy(std::vector<T> const& v) {
    return v.empty() ? nullptr : v.data();
  }
  static constexpr int architecture() { return 0; }
};

namespace detail {

/// Elements of one expert's arrays.
struct ExpertCounts {
  std::int64_t w13 = 0, w2 = 0, w13_scales = 0, w2_scales = 0;
};
/// The arrays of expert l of those that begin at `first`.
template <class Arrays>
Arrays arrays_of(Arrays const& first, ExpertCounts const& n, std::int64_t l) {
  return {first.w13 + l * n.w13, first.w2 + l * n.w2, first.w13_scales + l * n.w13_scales, first.w2_scales + l * n.w2_scales};
}

/// Reads a few experts at a time, by as many threads, into host memory; take(l, n, arrays) then takes the n that begin with local expert l.
template <class Loader, class Take>
void read_through_host(Loader const& loader, std::span<int const> experts, int threads, ExpertCounts const& n, Take const& take,
                       io::LoadProgress const& progress) {
  using Arrays = typename Loader::Arrays;
  using Code = std::remove_pointer_t<decltype(Arrays::w13)>;
  using Scale = std::remove_pointer_t<decltype(Arrays::w13_scales)>;
  constexpr int kMostAtOnce = 8;
  auto const count = static_cast<std::int64_t>(experts.size()), bytes = loader.expert_bytes();
  auto const at_once = std::min<std::int64_t>({count, threads, kMostAtOnce});
  Buffer<Code> c13(at_once * n.w13), c2(at_once * n.w2);
  Buffer<Scale> e13(at_once * n.w13_scales), e2(at_once * n.w2_scales);
  io::advise_huge_pages(c13.data(), c13.bytes());
  io::advise_huge_pages(c2.data(), c2.bytes());
  Arrays const staged{c13.data(), c2.data(), e13.data(), e2.data()};
  for (std::int64_t l = 0; l < count; l += at_once) {
    std::int64_t const some = std::min(at_once, count - l);
    loader.read_all(experts.subspan(static_cast<std::size_t>(l), static_cast<std::size_t>(some)), threads,
                    [&](std::int64_t i) { return arrays_of(staged, n, i); }, {});
    take(l, some, staged);
    if (progress) progress((l + some) * bytes, count * bytes);
  }
}

}  // namespace detail

/// Fills a store with experts. Host: threads write into the store itself. Else a few experts at a time pass through host memory, and a
/// store of packed experts packs them at once.
template <class Space, class Store, class Loader>
void read_into(Store& store, Loader const& loader, std::span<int const> experts, int threads, io::LoadProgress const& progress) {
  using Arrays = typename Loader::Arrays;
  if (threads <= 0) threads = host_threads();
  if constexpr (requires { store.counts(); }) {
    auto const c = store.counts();
    auto const take = [&](std::int64_t l, std::int64_t n, Arrays const& a) { store.pack(l, n, {a.w13, a.w2, a.w13_scales, a.w2_scales}); };
    detail::read_through_host(loader, experts, threads, {c.w13, c.w2, c.w13_scales, c.w2_scales}, take, progress);
  } else {
    Arrays first;
    detail::ExpertCounts n;
    store.visit_tensors([&](std::string_view name, auto const& view) {
      std::int64_t const each = view.extent(0) == 0 ? 0 : static_cast<std::int64_t>(view.size()) / view.extent(0);
      auto const set = [&](auto*& pointer, std::int64_t& of_expert) {
        if constexpr (std::is_convertible_v<decltype(view.data_handle()), std::remove_reference_t<decltype(pointer)>>) {
          pointer = view.data_handle();
          of_expert = each;
          if constexpr (Space::kKind == SpaceKind::host) io::advise_huge_pages(pointer, view.size() * sizeof(*pointer));
        }
      };
      if (name == "w13") set(first.w13, n.w13);
      if (name == "w2") set(first.w2, n.w2);
      if (name == "w13_scale") set(first.w13_scales, n.w13_scales);
      if (name == "w2_scale") set(first.w2_scales, n.w2_scales);
    });
    if constexpr (Space::kKind == SpaceKind::host) {
      loader.read_all(experts, threads, [&](std::int64_t l) { return detail::arrays_of(first, n, l); }, progress);
    } else {
      auto const take = [&](std::int64_t l, std::int64_t some, Arrays const& from) {
        Arrays const to = detail::arrays_of(first, n, l);
        auto const move = [&](auto* into, auto const* values, std::int64_t each) {
          if (each > 0) Memory<Space>::copy_from_host(into, values, static_cast<std::size_t>(some * each) * sizeof(*into));
        };
        move(to.w13, from.w13, n.w13);
        move(to.w2, from.w2, n.w2);
        move(to.w13_scales, from.w13_scales, n.w13_scales);
        move(to.w2_scales, from.w2_scales, n.w2_scales);
      };
      detail::read_through_host(loader, experts, threads, n, take, progress);
    }
  }
}

namespace detail {

/// Views of arrays that `memory` holds; no rows without values.
template <class Memory, class T>
Rows<T const> loaded_matrix(Memory& memory, std::vector<T> const& v, std::int64_t rows, std::int64_t cols) {
  return make_rows(memory.copy(v), v.empty() ? 0 : rows, cols);
}

template <class Gate, class Memory, class Weight>
void set_gate(Gate& p, io::HostLayerWeights<Weight> const& w, Memory& memory) {
  io::LayerDescription const& d = w.description;
  p.bias = memory.copy(w.router_bias);
  p.weight = loaded_matrix(memory, w.router_weight, d.router.num_logits(), d.hidden);
  if constexpr (requires { p.mlp; }) {
    using Input = decltype(p.input);
    p.eps = d.rms_norm_eps;
    if (d.router_input == io::RouterInput::scaled_rms_norm) {
      p.input = Input::scaled_rms_norm;
      p.scale = memory.copy(w.router_scale);
    }
    if (d.router_input == io::RouterInput::mlp) {
      io::RouterMlp const& m = w.router_mlp;
      p.input = Input::mlp;
      p.bias = nullptr;
      p.weight = loaded_matrix(memory, m.out, d.router.num_logits(), m.width);
      p.mlp = {loaded_matrix(memory, m.down, m.width, d.hidden),
               memory.copy(m.down_bias),
               memory.copy(m.norm),
               loaded_matrix(memory, m.fc1, m.width, m.width),
               memory.copy(m.fc1_bias),
               loaded_matrix(memory, m.fc2, m.width, m.width),
               memory.copy(m.fc2_bias)};
    }
  }
}

template <class Shared, class Memory, class Weight>
void set_shared(Shared& p, io::HostLayerWeights<Weight> const& w, bool overlaps, Memory& memory) {
  using runner::shared::Gate;
  io::LayerDescription const& d = w.description;
  if (d.shared.count == 0) return;
  p.count = static_cast<int>(w.shared.count);
  p.intermediate = w.shared.intermediate;
  p.activation = {d.shared.activation.kind, d.shared.activation.constants};
  p.gate = d.shared.gate == io::SharedGate::sigmoid          ? Gate::sigmoid
           : d.shared.gate == io::SharedGate::routing_weight ? Gate::routing_weight
                                                             : Gate::none;
  p.gate_vector = memory.copy(w.shared.gate);
  p.average = d.shared.combination == io::Combination::average;
  if constexpr (requires { p.overlap_rows; }) {
    if (!overlaps) p.overlap_rows = 0;  // an exchange in one call, whose kernels wait for peers, needs the device
  }
  if (w.shared.w13.empty()) return;  // they were read in a scheme (shared_store.hpp)
  auto const set = [&](auto& m, std::vector<Weight> const& values, std::int64_t rows, std::int64_t cols) {
    m.codes = make_blocks(memory.copy(values), w.shared.count, rows, cols);
    m.scales = make_rows(m.scales.data_handle(), w.shared.count, 0);
    m.rows = rows;
    m.cols = cols;
  };
  if constexpr (std::is_convertible_v<Weight const*, decltype(p.weights.w2.codes.data_handle())>) {
    set(p.weights.w13, w.shared.w13, (d.shared.activation.gated() ? 2 : 1) * p.intermediate, d.hidden);
    set(p.weights.w2, w.shared.w2, d.hidden, p.intermediate);
  }
}

}  // namespace detail

/// The runner's parameters but for its layer's. `memory` keeps what it copies; `w` must outlive the runner.
template <class Runner, class Weight, class Memory>
void set_loaded_parts(typename Runner::Params& p, io::HostLayerWeights<Weight> const& w, Memory& memory) {
  using Parts = typename Runner::Parts;
  using runner::detail::kPresent;
  io::LayerDescription const& d = w.description;
  p.hidden = d.hidden;
  p.expert_hidden = d.expert_hidden();
  detail::set_gate(p.gate, w, memory);
  if constexpr (kPresent<typename Parts::Shared>) {
    detail::set_shared(p.shared, w, runner::shared::may_overlap<typename Runner::Layer::Backend>(), memory);
  }
  if constexpr (kPresent<typename Parts::Input>) {
    p.input = {.weight = detail::loaded_matrix(memory, w.latent_in, d.latent, d.hidden),
               .normalise_result = d.latent_in_norm,
               .result_norm = memory.copy(w.latent_in_norm),
               .eps = d.rms_norm_eps};
  }
  if constexpr (kPresent<typename Parts::Output>) {
    p.output = {.weight = detail::loaded_matrix(memory, w.latent_out, d.hidden, d.latent),
                .normalise = d.latent_norm,
                .norm = memory.copy(w.latent_norm),
                .eps = d.rms_norm_eps};
  }
  if constexpr (std::is_same_v<typename Parts::Scaling, runner::scaling::Factor>) {
    p.scaling = {.routed = d.output_scaling_factor, .beside_weights = true};  // a description has one factor, or two that differ
  }
  if constexpr (std::is_same_v<typename Parts::End, runner::end::BiasNorm>) {
    p.end = {memory.copy(w.output_bias), d.post_norm, memory.copy(w.post_norm), d.rms_norm_eps};
  }
}

}  // namespace moe::models
