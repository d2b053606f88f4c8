// SPDX-License-Identifier: Apache-2.0
// experts/hopper/policy.hpp: what HopperContiguous and HopperMasked share: their facts, and the kernel object over hopper::ContiguousLayer.
// Plain host C++.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>

#include "moe/activation/activation.hpp"
#include "moe/comm/arrivals.hpp"
#include "moe/comm/completions.hpp"
#include "moe/core/buffer.hpp"
#include "moe/core/contract/check.hpp"
#include "moe/core/cuda_space.hpp"
#include "moe/core/layer_config.hpp"
#include "moe/core/tokens.hpp"
#include "moe/experts/common/check_weights.hpp"
#include "moe/experts/hopper/calls.hpp"
#include "moe/experts/hopper/common/activation.hpp"
#include "moe/experts/hopper/contiguous_layer.hpp"
#include "moe/experts/hopper/facts.hpp"
#include "moe/experts/hopper/shared_workspace.hpp"
#include "moe/quantization/format/facts.hpp"
#include "moe/quantization/format/granularity.hpp"
#include "moe/quantization/fp8_block128.hpp"
#include "moe/quantization/none.hpp"
#include "moe/quantization/support_level.hpp"

namespace moe::experts {

namespace detail {

/// The kernels' scheme for a quantisation, derived from its facts; -1 if there is none.
template <class Quant, class Act>
constexpr int hopper_scheme() {
  using quantization::ScaleGranularity;
  constexpr ScaleGranularity rows = facts::act_granularity<Quant>();
  constexpr ScaleGranularity tiles = facts::weight_granularity<Quant>();
  if constexpr (!facts::states_format<Quant>()) {
    return -1;
  } else if constexpr (!Quant::kQuantizesActivations) {
    if (tiles != ScaleGranularity::none) return -1;
    return static_cast<int>(std::same_as<Act, f16> ? hopper::Scheme::f16 : hopper::Scheme::bf16);
  } else if constexpr (Quant::kPayloadDType == DType::i8 && Quant::kWeightDType == DType::i8) {
    bool const whole = rows == ScaleGranularity::per_token || rows == ScaleGranularity::per_tensor;
    return whole && tiles == ScaleGranularity::per_channel ? static_cast<int>(hopper::Scheme::int8_row) : -1;
  } else if constexpr (Quant::kPayloadDType != DType::e4m3 || Quant::kWeightDType != DType::e4m3 || Quant::Codec::kPowerOfTwo ||
                       !std::same_as<typename Quant::Scale, float> || !std::same_as<typename Quant::WeightScale, float>) {
    return -1;
  } else if constexpr (rows == ScaleGranularity::group) {
    bool const blocks = tiles == ScaleGranularity::block && Quant::kWeightGroupRows == 128 && Quant::kWeightGroupCols == 128;
    return Quant::kActGroup == 128 && blocks ? static_cast<int>(hopper::Scheme::fp8_block) : -1;
  } else {
    bool const whole = tiles == ScaleGranularity::per_channel || tiles == ScaleGranularity::per_tensor;
    return whole ? static_cast<int>(hopper::Scheme::fp8_row) : -1;
  }
}

/// Whether the kernels quantise a layer's rows while loading: e4m3 in whole groups of 128 from bf16, by the rule of Fp8Block.
template <class Config, class Quant, ActivationFormat Format>
inline constexpr bool hopper_quantizes_rows =
    std::same_as<Quant, quantization::Fp8Block<>> && std::same_as<typename Config::Act, bf16> && Format == ActivationFormat::standard &&
    Config::hidden != dynamic && Config::hidden % 128 == 0;

/// A base of the kernel object. RowsAsTheyAre: the quantisation in which it reads rows from a backend whose rows stay on their rank.
template <bool Quantizes>
struct HopperRows {};
template <>
struct HopperRows<true> {
  using RowsAsTheyAre = quantization::None;
};

/// The facts and the kernel object that both policies share. Tiles: a struct like hopper::DefaultTiles.
template <ActivationFormat Reads, class Tiles>
struct HopperPolicy : HopperFacts<HopperPolicy<Reads, Tiles>, quantization::Support::native> {
  static constexpr bool kBatchInvariant = true;  ///< if the layer's configuration asks for it
  struct Params {
    /// Expected rows per expert, a hint for the tile; 0: 16 (batched), or as if every slot of the given rows had an expert here.
    int expected_rows = 0;
    int workers = 0;  ///< multiprocessors to use at most, so that other kernels can run at the same time; 0: all
    /// Shared with layers whose calls never overlap this one's; unset: memory of the layer's own. The kernels keep it alive.
    std::shared_ptr<hopper::SharedWorkspace> workspace{};
  };

  static constexpr bool reads(ActivationFormat f) { return f == Reads; }
  template <class Act, class Weight>
  static constexpr bool supports_element() {
    return std::same_as<Act, Weight> && (std::same_as<Act, bf16> || std::same_as<Act, f16>);
  }
  template <class A>
  static constexpr bool supports_activation() {
    return !std::is_void_v<hopper::DeviceActivationOf<A>>;
  }
  template <class Q>
  static constexpr bool supports_quantization() {
    return hopper_scheme<Q, bf16>() >= 0;
  }
  template <class Config, class Quant>
  static constexpr bool fits_shape() {
    constexpr int scheme = hopper_scheme<Quant, typename Config::Act>();
    if constexpr (scheme < 0) {
      return true;  // another rule reports this
    } else {
      constexpr auto s = static_cast<hopper::Scheme>(scheme);
      return moe::detail::fits(Config::hidden, hopper::hidden_multiple(s)) &&
             moe::detail::fits(Config::intermediate, hopper::intermediate_multiple(s)) && Config::hidden <= hopper::most_columns(s) &&
             Config::intermediate <= hopper::most_columns(s);
    }
  }
  template <class Config, class Quant>
  static constexpr int shared_memory_bytes() {
    constexpr int scheme = hopper_scheme<Quant, typename Config::Act>();
    if constexpr (scheme < 0) {
      return 0;
    } else {
      return hopper::layer_smem_bytes<static_cast<hopper::Scheme>(scheme), Tiles>();
    }
  }

  template <class Config, class Quant, ActivationFormat Format>
  class Kernel : HopperCalls, public HopperRows<hopper_quantizes_rows<Config, Quant, Format>> {
   public:
    using Act = typename Config::Act;
    static constexpr hopper::Scheme kScheme = static_cast<hopper::Scheme>(hopper_scheme<Quant, Act>());
    /// fp8 and int8 layers round to bf16, and the backend to Act.
    using Output = std::conditional_t<hopper::is_scaled(kScheme), bf16, Act>;
    using Weights = WeightsOf<Config, Quant>;
    static constexpr bool kSkipsForeignIds = true;

    /// `weights` are device views, read in place. E_UNSUPPORTED on a device that is not Hopper; E_CONFIG for sizes that the kernels cannot
    /// take; E_ARG for weights of another shape or misaligned.
    Kernel(Shape<Config> const& shape, Weights const& weights, std::int64_t max_rows, Quant const& quant,
           typename Config::Activation const& activation, Params const& params, Arena<space::cuda>& arena)
        : HopperCalls("hopper experts", shape, max_rows, weights.w13.codes.extent(0)),
          expected_rows_(params.expected_rows),
          shared_(params.workspace),
          sizes_(local_shape(shape, weights, activation)),
          layer_(sizes_, kScheme, layer_weights(weights), options(shape, quant, activation, params), launcher(shape, weights)) {
      if constexpr (Format == ActivationFormat::standard) {
        fix::include_moe_experts_hopper_contiguous_cuh_or_link_a_library_of_moe_add_hopper_kernels();
      } else {
        fix::include_moe_experts_hopper_masked_cuh_or_link_a_library_of_moe_add_hopper_kernels();
      }
      std::int64_t const bytes = layer_.workspace_bytes(workspace_tokens(Format));
      workspace_ = shared_ != nullptr ? shared_->reserve(bytes) : arena.template take<char>(bytes);
      if constexpr (kQuantizesRows) packed_ = arena.template take<Act>(max_rows * hidden());
    }

    /// y[r] = Σ_j w_j FFN_{id_j}(x_r); rows without a local expert become 0. y [R, H] on the device, packed; one rounding of the float32
    /// sum of rows rounded to Output. Enqueues. E_ARG, E_UNSUPPORTED before anything is launched.
    void apply(StandardTokensOf<Config, Quant> const& tokens, Rows<Output> y, cudaStream_t stream) const {
      enqueue(tokens, call_of(tokens), y, stream);
    }
    /// The same beside the dispatch that brings the rows: the last kernel in `stream` is that of `arrivals`. The products of an expert wait
    /// for its rows, by the exchange's deadline.
    void apply(StandardTokensOf<Config, Quant> const& tokens, Rows<Output> y, comm::Arrivals const& arrivals, cudaStream_t stream) const
      requires(Format == ActivationFormat::standard && (!hopper::is_scaled(kScheme) || kScheme == hopper::Scheme::fp8_block))
    {
      hopper::LayerCall call = call_of(tokens);
      call.arrivals = &arrivals;
      enqueue(tokens, call, y, stream);
    }
    /// The same, and tells the combine which columns of y are complete: every block, also without rows. Large calls do so block by block
    /// if the configuration fixes a gated activation, and, for SwiGLU and in fp8, there are neither biases nor weights on the input; all
    /// others tell all blocks behind their last kernel. The next kernel in `stream` may begin before y is complete; it has y behind it when
    /// it has waited for the end of the kernel before it. E_ARG also for blocks that do not cover `hidden`, over 32 ranks, and no round.
    void apply(StandardTokensOf<Config, Quant> const& tokens, Rows<Output> y, comm::Completions const& completions,
               cudaStream_t stream) const
      requires(Format == ActivationFormat::standard && (!hopper::is_scaled(kScheme) || kScheme == hopper::Scheme::fp8_block))
    {
      hopper::LayerCall call = call_of(tokens);
      call.completions = &completions;
      enqueue(tokens, call, y, stream);
    }
    /// Both.
    void apply(StandardTokensOf<Config, Quant> const& tokens, Rows<Output> y, comm::Arrivals const& arrivals,
               comm::Completions const& completions, cudaStream_t stream) const
      requires(Format == ActivationFormat::standard && (!hopper::is_scaled(kScheme) || kScheme == hopper::Scheme::fp8_block))
    {
      hopper::LayerCall call = call_of(tokens);
      call.arrivals = &arrivals;
      call.completions = &completions;
      enqueue(tokens, call, y, stream);
    }
    /// The same from rows that the kernels quantise themselves.
    template <class Tokens>
      requires(hopper_quantizes_rows<Config, Quant, Format> && std::same_as<Tokens, StandardTokensOf<Config, quantization::None>>)
    void apply(Tokens const& tokens, Rows<Output> y, cudaStream_t stream) const {
      Tokens packed = tokens;
      std::int64_t const rows = tokens.rows.extent(0);
      if (rows > 0 && rows <= max_rows() && tokens.rows.stride(0) != hidden()) {
        std::size_t const width = static_cast<std::size_t>(hidden()) * sizeof(Act);
        check_cuda(
            cudaMemcpy2DAsync(packed_, width, tokens.rows.data_handle(), static_cast<std::size_t>(tokens.rows.stride(0)) * sizeof(Act),
                              width, static_cast<std::size_t>(rows), cudaMemcpyDeviceToDevice, stream),
            "cudaMemcpy2DAsync");
        packed.rows = make_rows(static_cast<Act const*>(packed_), rows, hidden());
      }
      enqueue(packed, {}, y, stream);
    }
    /// y[e][i] = FFN_e(x_i) for the valid rows of each block, unweighted. y [L, C, H] on the device. Enqueues.
    void apply(BatchedTokensOf<Config, Quant> const& tokens, Blocks<Output> y, cudaStream_t stream) const {
      enqueue_batched(tokens, y, nullptr, stream);
    }
    /// The same while rows are still coming; the last kernel in `stream` is that of `arrivals`, at whose end the counts of the batches are
    /// complete. The products of an expert wait for its rows, by the exchange's deadline.
    void apply(BatchedTokensOf<Config, Quant> const& tokens, Blocks<Output> y, comm::Arrivals const& arrivals, cudaStream_t stream) const
      requires(Format == ActivationFormat::batched && (!hopper::is_scaled(kScheme) || kScheme == hopper::Scheme::fp8_block))
    {
      enqueue_batched(tokens, y, &arrivals, stream);
    }

    /// The tiles of a call of the most rows, for a log. A call may take fewer clusters, and tiles that its activation's kernels have.
    std::string tuning() const {
      int const most = static_cast<int>(max_rows());
      if constexpr (Format == ActivationFormat::batched) {
        int const rows = expected_rows_ == 0 ? kExpectedRows : expected_rows_;
        return text("for ", rows, " rows an expert: ", hopper::choose_batched_tuning(sizes_, kScheme, rows, most));
      } else {
        int const rows = expected_rows_ == 0 ? most : expected_tokens(most);
        hopper::Tuning const t = hopper::choose_tuning(sizes_, kScheme, rows, kQuantizesRows);
        return text("for ", rows, " rows: ", moe::kBatchInvariant<Config> ? hopper::invariant(t, kScheme) : t);
      }
    }

   private:
    static constexpr int kExpectedRows = 16;  // of an expert, if Params do not say
    static constexpr bool kQuantizesRows = hopper_quantizes_rows<Config, Quant, Format>;

    static hopper::LayerCall call_of(StandardTokensOf<Config, Quant> const& tokens) {
      hopper::LayerCall call{};
      if constexpr (kHasScales) {
        call.x_scales = tokens.scales.data_handle();
        call.x_scale_stride = tokens.scales.stride(0);
      }
      return call;
    }
    template <class Tokens>
    void enqueue(Tokens const& tokens, hopper::LayerCall call, Rows<Output> y, cudaStream_t stream) const {
      bool const any = standard_call(tokens, y, call);
      if (!any && call.completions == nullptr) return;
      if (!any || expected_rows_ == 0) {
        layer_.forward(call, workspace_, stream);
      } else {
        bool const quantises = kScheme == hopper::Scheme::fp8_block && call.x_scales == nullptr;
        layer_.forward(call, hopper::choose_tuning(sizes_, kScheme, expected_tokens(call.max_tokens), quantises), workspace_, stream);
      }
    }
    void enqueue_batched(BatchedTokensOf<Config, Quant> const& tokens, Blocks<Output> y, comm::Arrivals const* arrivals,
                         cudaStream_t stream) const {
      int const capacity = checked_capacity(tokens, y);
      if (capacity == 0) return;
      float const* scales = nullptr;
      if constexpr (kHasScales) scales = tokens.scales.data_handle();
      layer_.forward_batched(tokens.rows.data_handle(), tokens.expert_num_tokens.data_handle(), capacity,
                             expected_rows_ == 0 ? kExpectedRows : expected_rows_, y.data_handle(), workspace_, stream, scales,
                             gather_of(tokens), arrivals);
    }
    /// Tokens of a call of at most `most` that give an expert the rows that Params expect.
    int expected_tokens(int most) const {
      return static_cast<int>(std::clamp<std::int64_t>(expected_rows_ * num_local() / topk(), 1, std::max(most, 1)));
    }
    static constexpr bool kStatic = Quant::kQuantizesActivations && Quant::kActGranularity == quantization::ScaleGranularity::per_tensor;
    static constexpr bool kHasScales = Quant::kQuantizesActivations && !kStatic;

    static hopper::LocalShape local_shape(Shape<Config> const& shape, Weights const& weights,
                                          typename Config::Activation const& activation) {
      check_weights<Quant>(weights, shape.hidden(), shape.intermediate(), activation.gated());
      return {static_cast<int>(weights.w13.codes.extent(0)), static_cast<int>(shape.hidden()), static_cast<int>(shape.intermediate()),
              Format == ActivationFormat::standard ? shape.topk() : 1};
    }
    static hopper::LayerLauncher launcher(Shape<Config> const& shape, Weights const& weights) {
      using Activation = hopper::DeviceActivationOf<typename Config::Activation>;
      if constexpr (hopper::kPlainKernels<Activation>) {
        if (shape.weight_on_input() || weights.w13.has_bias() || weights.w2.has_bias()) {
          return hopper::layer_launcher<kScheme, hopper::AnyActivation, Tiles>();
        }
      }
      hopper::LayerLauncher found = hopper::layer_launcher<kScheme, Activation, Tiles>();
      if constexpr (kOverlapsCombine<Config> && Format == ActivationFormat::standard && hopper::kHasColumnBlocks<kScheme, Activation>) {
        found.enqueue_columns = hopper::column_launcher<kScheme, Activation, Tiles>();
      }
      return found;
    }
    static hopper::LayerWeights layer_weights(Weights const& w) {
      hopper::LayerWeights out{};
      out.w13 = w.w13.codes.data_handle();
      out.w2 = w.w2.codes.data_handle();
      if constexpr (Quant::kQuantizesActivations) {
        out.w13_scales = w.w13.scales.data_handle();
        out.w2_scales = w.w2.scales.data_handle();
      }
      out.w13_bias = w.w13.has_bias() ? w.w13.bias.data_handle() : nullptr;
      out.w2_bias = w.w2.has_bias() ? w.w2.bias.data_handle() : nullptr;
      out.tensor_scales = Quant::kWeightGranularity == quantization::ScaleGranularity::per_tensor;
      return out;
    }
    static hopper::LayerOptions options(Shape<Config> const& shape, Quant const& quant, typename Config::Activation const& activation,
                                        Params const& params) {
      hopper::LayerOptions o{};
      o.activation = hopper::kind_of(activation);
      o.constants = activation.constants;
      o.weight_on_input = shape.weight_on_input();
      o.workers = params.workers;
      o.batch_invariant = moe::kBatchInvariant<Config>;
      if constexpr (kStatic) {
        o.static_scale = quant.params.scale;
      } else if constexpr (Quant::kQuantizesActivations) {
        o.scale_floor = quant.act.scale(0);
        if constexpr (facts::bounds_amax<Quant>()) o.amax_bound = quant.act.amax_upper_bound;
      }
      return o;
    }

    int expected_rows_;
    std::shared_ptr<hopper::SharedWorkspace> shared_;
    hopper::LocalShape sizes_;
    hopper::ContiguousLayer layer_;
    char* workspace_ = nullptr;
    Act* packed_ = nullptr;  // packed copy of the caller's strided rows, for kernels that quantise them
  };
};

}  // namespace detail

}  // namespace moe::experts
