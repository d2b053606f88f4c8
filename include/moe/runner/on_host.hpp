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
#include "moe/parallel/construction.hpp"

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
    try {
      inner = bring(x, logits, options);
    } catch (...) {
      abandon({});
      throw;
    }
    layer_.forward(make_rows<Config::hidden>(static_cast<DeviceAct const*>(x_.data()), m, width_),
                   make_rows(static_cast<float const*>(logits_.data()), m, num_logits_), make_rows<Config::hidden>(y_.data(), m, width_),
                   inner, Stream<Device>{}, probe);
    wait();
    std::size_t const n = static_cast<std::size_t>(m * width_);
    to_host(staged_.data(), y_.data(), n);
    for (std::int64_t t = 0; t < m; ++t) {
      std::transform(staged_.data() + t * width_, staged_.data() + (t + 1) * width_, row_ptr(output, t),
                     [](DeviceAct v) { return to_float(v); });
    }
    rows_ = m;
    to_host(ids_.data(), layer_.topk_ids().data_handle(), static_cast<std::size_t>(m * slots_));
    to_host(weights_.data(), layer_.topk_weights().data_handle(), static_cast<std::size_t>(m * slots_));
    to_host(options.shared_weights.data_handle(), joint_.data(), static_cast<std::size_t>(options.shared_weights.size()));
  }
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
  }
  template <class T>
  static void to_device(T* to, T const* from, std::size_t n) {
    if (n > 0) Memory<Device>::copy_from_host(to, from, n * sizeof(T));
  }
  template <class T>
  static void to_host(T* to, T const* from, std::size_t n) {
    if (n > 0) Memory<Device>::copy_to_host(to, from, n * sizeof(T));
  }

  ForwardOptions bring(Rows<float const, Config::hidden> x, Rows<float const> logits, ForwardOptions options) {
    std::int64_t const m = x.extent(0);
    for (std::int64_t t = 0; t < m; ++t) {
      std::transform(row_ptr(x, t), row_ptr(x, t) + width_, staged_.data() + t * width_, [](float v) { return from_float<DeviceAct>(v); });
    }
    to_device(x_.data(), staged_.data(), static_cast<std::size_t>(m * width_));
    to_device(logits_.data(), logits.data_handle(), static_cast<std::size_t>(m * num_logits_));
    if (options.token_ids != nullptr) {
      to_device(tokens_.data(), options.token_ids, static_cast<std::size_t>(m));
      options.token_ids = tokens_.data();
    }
    options.shared_weights = make_rows(joint_.data(), m, options.shared_weights.extent(1));
    return options;
  }

  Tables tables_;
  DeviceLayer layer_;
  std::int64_t width_ = 0;
  std::int64_t num_logits_ = 0;
  std::int64_t slots_ = 0;
  std::int64_t rows_ = 0;
  Buffer<DeviceAct, Device> x_, y_;
  Buffer<float, Device> logits_, joint_;
  Buffer<std::int64_t, Device> tokens_;
  std::vector<DeviceAct> staged_;
  std::vector<std::int32_t> ids_;
  std::vector<float> weights_;
};

}  // namespace moe::runner
