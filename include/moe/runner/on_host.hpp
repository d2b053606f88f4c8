// SPDX-License-Identifier: Apache-2.0
// runner/on_host.hpp: a layer in the CUDA space as one of the host space: float32 rows are copied to the device and back.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "moe/core/array.hpp"
#include "moe/core/buffer.hpp"
#include "moe/core/contract/facts.hpp"
#include "moe/core/contract/params.hpp"
#include "moe/core/types.hpp"
#include "moe/layer/options.hpp"
#include "moe/layer/weight_move.hpp"
#include "moe/parallel/construction.hpp"
#include "moe/routing/caller_routing.hpp"

namespace moe::runner {

/// Rows are rounded to the layer's Act on the way in. The pointers of the router's parameters are of host memory, and their arrays are
/// copied; the experts' weights are in device memory. forward() returns when the device has finished.
template <class DeviceLayer>
class OnHost {
  using Device = typename DeviceLayer::Space;

 public:
  using Space = space::host;
  using Act = float;
  using Comm = typename DeviceLayer::Comm;
  using Weights = typename DeviceLayer::Weights;
  using Params = typename DeviceLayer::Params;
  static constexpr bool kMonolithic = DeviceLayer::kMonolithic;
  struct Config {
    static constexpr int hidden = DeviceLayer::Config::hidden;
  };

  OnHost(Comm& comm, Weights const& weights, Params const& p)
      : tables_(moe::detail::build(comm, [&] { return Tables(p); })), layer_(comm, weights, tables_.moved(p)) {
    moe::detail::build(comm, [&] { take_memory(p.max_tokens_per_rank); });
    moe::detail::agree_on_construction(comm);
  }

  /// As the layer's, with all arrays in host memory.
  template <class Probe>
  void forward(Rows<float const, Config::hidden> x, Rows<float const> logits, Rows<float, Config::hidden> output,
               ForwardOptions const& options, HostStream, Probe& probe) {
    std::int64_t const m = x.extent(0);
    ForwardOptions inner = options;
    bring([&] { inner = bring_logits(x, logits, options); });
    layer_.forward(device_x(m), make_rows(static_cast<float const*>(logits_.data()), m, num_logits_), device_y(m), inner, Stream<Device>{},
                   probe);
    take(output);
    to_host(options.shared_weights.data_handle(), joint_.data(), static_cast<std::size_t>(options.shared_weights.size()));
  }
  /// As the layer's, with all arrays in host memory. The host checks the slots: E_ARG for the first invalid one.
  template <class Probe>
  void forward_routed(Rows<float const, Config::hidden> x, routing::GivenIds ids, Rows<float const> weights,
                      Rows<float, Config::hidden> output, ForwardOptions const& options, HostStream, Probe& probe) {
    std::int64_t const m = x.extent(0);
    int const k = layer_.router().topk();
    bring([&] { bring_routing(x, ids, weights, options); });
    layer_.forward_routed(device_x(m), make_rows(static_cast<std::int32_t const*>(given_ids_.data()), m, k),
                          make_rows(static_cast<float const*>(given_weights_.data()), m, k), device_y(m), options, Stream<Device>{}, probe);
    take(output);
  }
  void weights_changed(HostStream) { layer_.weights_changed(Stream<Device>{}); }
  WeightMove& weight_move() { return layer_.weight_move(); }
  WeightMove const& weight_move() const { return layer_.weight_move(); }
  void abandon(HostStream) { layer_.abandon(Stream<Device>{}); }

  DeviceLayer& device() { return layer_; }
  auto const& router() const { return layer_.router(); }
  Rows<std::int32_t> topk_ids() { return make_rows(ids_.data(), rows_, slots_); }
  Rows<float> topk_weights() { return make_rows(weights_.data(), rows_, slots_); }
  std::size_t bytes() const { return layer_.bytes(); }

 private:
  using DeviceAct = typename DeviceLayer::Act;

  template <class T>
  static Buffer<T, Device> copy_of(T const* from, std::int64_t n) {
    Buffer<T, Device> to(from == nullptr ? 0 : n);
    if (to.size() > 0) to.copy_from_host(from);
    return to;
  }
  /// Waits within the deadline: a copy to the host would wait for a dead rank for ever.
  void wait() {
    if constexpr (facts::waits<typename DeviceLayer::Exchange, Stream<Device>>()) {
      facts::wait(layer_.exchange(), Stream<Device>{});
    } else {
      Memory<Device>::synchronize(Stream<Device>{});  // kernels that wait for peers have a deadline
      layer_.check();
    }
  }

  /// The router's arrays in device memory.
  struct Tables {
    explicit Tables([[maybe_unused]] Params const& p) {
      if constexpr (facts::takes_tables<decltype(p.router)>()) {
        bias = copy_of(p.router.correction_bias, p.router.num_experts + p.router.num_zero_experts);
        scale = copy_of(p.router.per_expert_scale, p.router.num_experts);
        table = copy_of(p.router.hash_table, p.router.vocabulary * p.router.topk);
      }
    }
    Params moved(Params p) const {
      if constexpr (facts::takes_tables<decltype(p.router)>()) {
        p.router.correction_bias = bias.data();
        p.router.per_expert_scale = scale.data();
        p.router.hash_table = table.data();
      }
      return p;
    }
    Buffer<float, Device> bias, scale;
    Buffer<std::int64_t, Device> table;
  };

  auto device_x(std::int64_t m) const { return make_rows<Config::hidden>(static_cast<DeviceAct const*>(x_.data()), m, width_); }
  auto device_y(std::int64_t m) { return make_rows<Config::hidden>(y_.data(), m, width_); }

  void take_memory(std::int64_t rows) {
    width_ = layer_.shape().hidden();
    num_logits_ = layer_.router().num_logits();
    slots_ = kMonolithic ? layer_.router().num_logits() : layer_.router().num_slots();
    int const joint = facts::num_joint_shared(layer_.router());
    x_ = Buffer<DeviceAct, Device>(rows * width_);
    y_ = Buffer<DeviceAct, Device>(rows * width_);
    logits_ = Buffer<float, Device>(rows * num_logits_);
    joint_ = Buffer<float, Device>(rows * joint);
    tokens_ = Buffer<std::int64_t, Device>(rows);
    staged_.resize(static_cast<std::size_t>(rows * width_));
    ids_.resize(static_cast<std::size_t>(rows * slots_));
    weights_.resize(ids_.size());
    if constexpr (!kMonolithic) {
      given_ids_ = Buffer<std::int32_t, Device>(rows * layer_.router().topk());
      given_weights_ = Buffer<float, Device>(rows * layer_.router().topk());
    }
  }
  template <class T>
  static void to_device(T* to, T const* from, std::size_t n) {
    if (n > 0) Memory<Device>::copy_from_host(to, from, n * sizeof(T));
  }
  template <class T>
  static void to_host(T* to, T const* from, std::size_t n) {
    if (n > 0) Memory<Device>::copy_to_host(to, from, n * sizeof(T));
  }

  /// copy(); if it fails, the other ranks learn that this one gives up.
  template <class Copy>
  void bring(Copy const& copy) {
    try {
      copy();
    } catch (...) {
      abandon({});
      throw;
    }
  }
  void bring_rows(Rows<float const, Config::hidden> x) {
    std::int64_t const m = x.extent(0);
    for (std::int64_t t = 0; t < m; ++t) {
      std::transform(row_ptr(x, t), row_ptr(x, t) + width_, staged_.data() + t * width_, [](float v) { return from_float<DeviceAct>(v); });
    }
    to_device(x_.data(), staged_.data(), static_cast<std::size_t>(m * width_));
  }
  ForwardOptions bring_logits(Rows<float const, Config::hidden> x, Rows<float const> logits, ForwardOptions options) {
    std::int64_t const m = x.extent(0);
    bring_rows(x);
    to_device(logits_.data(), logits.data_handle(), static_cast<std::size_t>(m * num_logits_));
    if (options.token_ids != nullptr) {
      to_device(tokens_.data(), options.token_ids, static_cast<std::size_t>(m));
      options.token_ids = tokens_.data();
    }
    options.shared_weights = make_rows(joint_.data(), m, options.shared_weights.extent(1));
    return options;
  }
  /// The valid rows' slots; others become no expert.
  void bring_routing(Rows<float const, Config::hidden> x, routing::GivenIds ids, Rows<float const> weights, ForwardOptions const& options) {
    std::int64_t const m = x.extent(0);
    routing::check_given(layer_.router(), ids, weights, m);
    check_valid_rows(options, m);
    auto const k = static_cast<std::size_t>(layer_.router().topk());
    routing::CallerRouting given{.given_ids = ids, .given_weights = weights};
    given.num_valid_rows = options.num_valid_rows < 0 ? m : options.num_valid_rows;
    given.topk_ids = make_rows(ids_.data(), m, static_cast<std::int64_t>(k));
    given.topk_weights = make_rows(weights_.data(), m, static_cast<std::int64_t>(k));
    routing::take_routing(layer_.router(), given, HostStream{});
    bring_rows(x);
    to_device(given_ids_.data(), ids_.data(), static_cast<std::size_t>(m) * k);
    to_device(given_weights_.data(), weights_.data(), static_cast<std::size_t>(m) * k);
  }
  /// Waits for the layer, and brings its output and its routing.
  void take(Rows<float, Config::hidden> output) {
    std::int64_t const m = output.extent(0);
    wait();
    to_host(staged_.data(), y_.data(), static_cast<std::size_t>(m * width_));
    for (std::int64_t t = 0; t < m; ++t) {
      std::transform(staged_.data() + t * width_, staged_.data() + (t + 1) * width_, row_ptr(output, t),
                     [](DeviceAct v) { return to_float(v); });
    }
    rows_ = m;
    to_host(ids_.data(), layer_.topk_ids().data_handle(), static_cast<std::size_t>(m * slots_));
    to_host(weights_.data(), layer_.topk_weights().data_handle(), static_cast<std::size_t>(m * slots_));
  }

  Tables tables_;
  DeviceLayer layer_;
  std::int64_t width_ = 0;
  std::int64_t num_logits_ = 0;
  std::int64_t slots_ = 0;
  std::int64_t rows_ = 0;
  Buffer<DeviceAct, Device> x_, y_;
  Buffer<float, Device> logits_, joint_, given_weights_;
  Buffer<std::int32_t, Device> given_ids_;
  Buffer<std::int64_t, Device> tokens_;
  std::vector<DeviceAct> staged_;
  std::vector<std::int32_t> ids_;
  std::vector<float> weights_;
};

}  // namespace moe::runner
