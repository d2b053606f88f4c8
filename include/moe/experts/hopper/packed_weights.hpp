// SPDX-License-Identifier: Apache-2.0
// experts/hopper/packed_weights.hpp: what the policies hopper_w4a16, hopper_w8a16 and hopper_w4a8 share: experts that pack their weights
// once and convert codes in registers. Plain host C++.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstdint>
#include <memory>
#include <string>

#include "moe/activation/activation.hpp"
#include "moe/core/buffer.hpp"
#include "moe/core/contract/check.hpp"
#include "moe/core/cuda_space.hpp"
#include "moe/core/layer_config.hpp"
#include "moe/core/tokens.hpp"
#include "moe/experts/common/check_weights.hpp"
#include "moe/experts/hopper/calls.hpp"
#include "moe/experts/hopper/common/activation.hpp"
#include "moe/experts/hopper/facts.hpp"
#include "moe/experts/hopper/packed_store.hpp"
#include "moe/experts/hopper/shared_workspace.hpp"
#include "moe/experts/hopper/w4/activation.hpp"
#include "moe/experts/hopper/w4/batched_call.hpp"
#include "moe/experts/hopper/w4a16_layer.hpp"

namespace moe::experts::detail {

/// The format of rows that the layer of a storage widens to bf16, rounding the intermediate like them; bf16: it does not.
template <class Storage>
constexpr hopper::RowFormat rounded_rows() {
  if constexpr (requires { Storage::kRows; }) {
    return Storage::kRows;
  } else {
    return hopper::RowFormat::bf16;
  }
}

/// Experts that pack their weights. Storages has kName; for each quantisation Of<Quant>: kSupported and, where that is true, kScheme and
/// group(cols), the elements of a row of `cols` that share a scale, and kRows if rounded_rows() is not bf16; the Layer; launcher<scheme>(),
/// any_launcher<scheme>() and, for such rows, rounded_launcher<scheme>() of its kernels; link_kernels(), which names the function that only
/// the kernels' definitions have.
template <class Storages>
struct PackedWeights : PackedFacts<PackedWeights<Storages>> {
  static constexpr char const* kName = Storages::kName;
  struct Params {
    int expected_rows = 16;  ///< batched: expected rows per expert; a hint for the tile
    /// Multiprocessors to use at most, so that other kernels can run at the same time; 0: all. One token may run in a kernel whose thread
    /// blocks wait for each other. Two such calls at the same time, on two streams, need workers that fit on the device together.
    int workers = 0;
    /// Shared with layers whose calls never overlap this one's; unset: memory of the layer's own. The kernels keep it alive.
    std::shared_ptr<hopper::SharedWorkspace> workspace{};
  };

  /// Owns packed experts, without their codes.
  template <class Config, class Quant>
  using Store = PackedStore<Storages, Config, Quant>;

  static constexpr bool reads(ActivationFormat) { return true; }
  template <class A>
  static constexpr bool supports_activation() {
    return facts::fixes_kind<A>() || std::same_as<A, activation::Any>;
  }
  template <class Q>
  static constexpr bool supports_quantization() {
    return Storages::template Of<Q>::kSupported;
  }
  /// Rows that are rounded to codes and multiplied as bf16 are emulated.
  template <class Q>
  static constexpr quantization::Support support_on(int sm) {
    using quantization::Support;
    if constexpr (!supports_quantization<Q>()) {
      return Support::none;
    } else {
      if (sm != 90) return Support::none;
      return rounded_rows<typename Storages::template Of<Q>>() == hopper::RowFormat::bf16 ? Support::converted : Support::emulated;
    }
  }
  template <class Config, class Quant>
  static constexpr bool fits_shape() {
    if constexpr (supports_quantization<Quant>()) {
      return moe::detail::fits(Config::hidden, hopper::kBrickDepth) &&
             moe::detail::fits(Config::intermediate, hopper::intermediate_multiple(Storages::template Of<Quant>::kScheme));
    } else {
      return true;  // another rule says it
    }
  }

  template <class Config, class Quant, ActivationFormat Format>
  class Kernel : HopperCalls {
    using Storage = typename Storages::template Of<Quant>;
    using Layer = typename Storages::Layer;
    static constexpr hopper::RowFormat kRows = rounded_rows<Storage>();
    static constexpr bool kRounds = kRows != hopper::RowFormat::bf16;

   public:
    using Act = typename Config::Act;
    using Output = Act;
    static constexpr bool kSkipsForeignIds = true;
    using Weights = WeightsOf<Config, Quant>;

    /// `weights` are device views; the packed copy is in the arena, or they are those of a Store, which has packed them. E_CONFIG for an
    /// activation without its limit or negative workers, E_UNSUPPORTED for a scale under which a weight is not finite or a device that is
    /// not Hopper.
    Kernel(Shape<Config> const& shape, Weights const& weights, std::int64_t max_rows, [[maybe_unused]] Quant const& quant,
           typename Config::Activation const& activation, Params const& params, Arena<space::cuda>& arena)
        : HopperCalls(kName, shape, max_rows, weights.w13.codes.extent(0)),
          expected_rows_(params.expected_rows),
          shared_(params.workspace),
          sizes_(local_shape(shape, weights)),
          layer_(make_layer(shape, weights, quant, activation, sizes_, arena)) {
      Storages::link_kernels();
      if (params.workers != 0) layer_.limit_workers(params.workers);
      std::int64_t const bytes = layer_.workspace_bytes(workspace_tokens(Format));
      workspace_ = shared_ != nullptr ? shared_->reserve(bytes) : arena.template take<char>(bytes);
    }

    /// Packs the weights again after they were replaced in place; those of a Store are read where they lie. Enqueues.
    void weights_changed(cudaStream_t stream) { layer_.weights_changed(stream); }

    /// y[r] = Σ_j w_j FFN_{id_j}(x_r); rows without a local expert become 0. y [R, H] on the device, one rounding of the float32 sum of
    /// rows rounded to bf16; of one token, which may have a kernel of its own, of rows in float32. Enqueues.
    void apply(StandardTokensOf<Config, Quant> const& tokens, Rows<Output> y, cudaStream_t stream) const {
      hopper::LayerCall call{};
      if (!standard_call(tokens, y, call, Quant::payload_cols(hidden()))) return;
      if constexpr (kRounds) {
        hopper::W4Codes const codes{call.x, call.x_stride, tokens.scales.data_handle(), tokens.scales.stride(0)};
        return layer_.forward(call, codes, workspace_, stream);
      } else if constexpr (Quant::kQuantizesActivations) {
        call.x_scales = tokens.scales.data_handle();
        call.x_scale_stride = tokens.scales.stride(0);
      }
      layer_.forward(call, workspace_, stream);
    }
    /// y[e][i] = FFN_e(x_i) for the valid rows of each block, unweighted. y [L, C, H] on the device. Enqueues.
    void apply(BatchedTokensOf<Config, Quant> const& tokens, Blocks<Output> y, cudaStream_t stream) const {
      hopper::BatchedCall call{};
      call.capacity = checked_capacity(tokens, y, Quant::payload_cols(hidden()));
      if (call.capacity == 0) return;
      call.x = tokens.rows.data_handle();
      if constexpr (Quant::kQuantizesActivations && !kRounds) call.x_scales = tokens.scales.data_handle();
      call.counts = tokens.expert_num_tokens.data_handle();
      call.expected_rows = expected_rows_;
      call.out = y.data_handle();
      call.gather = gather_of(tokens);
      if constexpr (kRounds) {
        hopper::W4Codes const codes{call.x, tokens.rows.extent(2), tokens.scales.data_handle(), tokens.scales.extent(2)};
        layer_.forward_batched(call, codes, workspace_, stream);
      } else {
        layer_.forward_batched(call, workspace_, stream);
      }
    }

    /// The tiles of a call of the most rows, for a log.
    std::string tuning() const {
      constexpr bool kBatched = Format == ActivationFormat::batched;
      int const most = static_cast<int>(max_rows());
      int const rows = kBatched ? std::clamp(expected_rows_, 1, std::max(1, most)) : most;
      hopper::W4Tuning const t = layer_.tuning(kBatched ? sizes_.num_experts * rows : rows);
      return text("for ", rows, kBatched ? " rows an expert: " : " rows: ", "W4Tuning{tile_rows ", t.tile_rows, ", max_splits ",
                  t.max_splits, ", raster ", t.raster, "}");
    }

   private:
    static hopper::LocalShape local_shape(Shape<Config> const& shape, Weights const& weights) {
      return {static_cast<int>(weights.w13.codes.extent(0)), static_cast<int>(shape.hidden()), static_cast<int>(shape.intermediate()),
              Format == ActivationFormat::standard ? shape.topk() : 1};
    }
    static hopper::W4Rows rows_of(Quant const& quant) {
      hopper::W4Rows rows{.format = kRows};
      if constexpr (kRows == hopper::RowFormat::nvfp4) rows.global_scale = quant.act.global_scale;
      return rows;
    }
    static Layer make_layer(Shape<Config> const& shape, Weights const& weights, [[maybe_unused]] Quant const& quant,
                            typename Config::Activation const& activation, hopper::LocalShape const& sizes, Arena<space::cuda>& arena) {
      activation::Kind const kind = hopper::kind_of(activation);
      bool const gated = activation::gated(kind);
      check_weights<Quant>(weights, shape.hidden(), shape.intermediate(), gated, kName);
      hopper::W4Weights w = stored_weights(weights);
      w.w13_group = Storage::group(sizes.hidden);
      w.w2_group = Storage::group(sizes.intermediate);
      char* const packed =
          arena.template take<char>(w.packed.given() ? Layer::state_bytes() : Layer::packed_bytes(sizes, Storage::kScheme, gated));
      hopper::W4AnyActivation const any{kind, activation.constants, shape.weight_on_input()};
      if constexpr (kRounds) {
        return {sizes, Storage::kScheme, w, any, rows_of(quant), packed, Storages::template rounded_launcher<Storage::kScheme>()};
      } else {
        if (hopper::is_w4_activation(kind) && !shape.weight_on_input()) {
          hopper::W4Activation const act = hopper::w4_activation(kind, activation.constants);
          return {sizes, Storage::kScheme, w, act, packed, Storages::template launcher<Storage::kScheme>()};
        }
        return {sizes, Storage::kScheme, w, any, packed, Storages::template any_launcher<Storage::kScheme>()};
      }
    }

    int expected_rows_;
    std::shared_ptr<hopper::SharedWorkspace> shared_;
    hopper::LocalShape sizes_;
    Layer layer_;
    char* workspace_ = nullptr;
  };
};

/// What storages of W4A16Layer have in common: codes widened to bf16.
struct WidenedStorages {
  using Layer = hopper::W4A16Layer;
  template <hopper::W4Scheme S>
  static hopper::W4Launcher launcher() {
    return hopper::w4_launcher<S>();
  }
  template <hopper::W4Scheme S>
  static hopper::W4Launcher any_launcher() {
    return hopper::w4_any_launcher<S>();
  }
  template <hopper::W4Scheme S>
  static hopper::W4Launcher rounded_launcher() {
    return hopper::w4_rounded_launcher<S>();
  }
  static void link_kernels() { fix::include_moe_experts_hopper_w4a16_cuh_or_link_a_library_of_moe_add_hopper_kernels(); }
};

}  // namespace moe::experts::detail
