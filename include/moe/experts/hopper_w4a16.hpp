// SPDX-License-Identifier: Apache-2.0
// experts/hopper_w4a16.hpp: the experts with 4-bit weights (int4 in groups, mxfp4) and bf16 activations on one Hopper GPU (sm_90a),
// standard and batched formats, at most three launches. Include experts/hopper_w4a16.cuh where a layer is instantiated.
#pragma once

#include <concepts>
#include <cstdint>
#include <limits>
#include <memory>

#include "moe/activation/activation.hpp"
#include "moe/core/buffer.hpp"
#include "moe/core/check.hpp"
#include "moe/core/cuda_space.hpp"
#include "moe/core/layer_config.hpp"
#include "moe/core/tokens.hpp"
#include "moe/experts/hopper/w4/problem.hpp"
#include "moe/experts/weights.hpp"
#include "moe/quantization/int4_group128.hpp"
#include "moe/quantization/mxfp4.hpp"

namespace moe::hopper {

/// One layer's experts. forward() enqueues at most three kernels, allocates nothing, never synchronises, and can be captured; the row
/// count may be in device memory.
class W4A16Layer {
 public:
  /// One forward of an object at a time: it owns counters that a forward leaves as it found them.
  /// Packs the weights into `packed` (device memory of packed_bytes(), 16-byte aligned, of the layer's lifetime) and waits for that; only
  /// the biases are read afterwards, and all of it by weights_changed(). E_UNSUPPORTED without a Hopper device or for a zero point that is
  /// no integer of 0 … 15; E_CONFIG if a size or group does not fit; E_ARG for null or misaligned memory.
  W4A16Layer(LayerShape shape, W4Scheme scheme, W4Weights const& weights, W4Activation const& activation, void* packed,
             W4Launcher launcher);
  ~W4A16Layer();
  W4A16Layer(W4A16Layer&&) noexcept;
  W4A16Layer& operator=(W4A16Layer&&) noexcept;

  /// Bytes of the packed weights and what belongs to them.
  static constexpr std::int64_t packed_bytes(LayerShape const& s, W4Scheme scheme) {
    int const width = padded_intermediate(s.intermediate);
    std::int64_t const matrices = hopper::packed_bytes(scheme, 2LL * width, s.hidden) + hopper::packed_bytes(scheme, s.hidden, width);
    return s.num_experts * matrices + kHeadBytes;
  }
  /// Bytes of workspace (device memory, 1024-byte aligned, any contents) for at most that many tokens.
  std::int64_t workspace_bytes(int max_tokens) const;
  /// Packs again, in stream order, what the weights' memory holds now. Zero points are not checked again.
  void weights_changed(CUstream_st* stream);
  /// x and out of the call are bf16. E_ARG on null or misaligned pointers.
  void forward(LayerCall const& call, void* workspace, CUstream_st* stream) const;
  /// The same with a tile choice of the caller's.
  void forward(LayerCall const& call, W4Tuning const& tuning, void* workspace, CUstream_st* stream) const;
  /// Batched format: x and out are [E, capacity, H], counts[e] rows of expert e are valid (device memory); no router weights.
  /// `expected_rows` of an expert is a hint for the tile. The workspace is of E·capacity slots.
  /// gather [E, capacity]: row i of expert e is row gather[e][i] of x, which then has any number of rows; or null.
  void forward_batched(void const* x, std::int32_t const* counts, int capacity, int expected_rows, void* out, void* workspace,
                       CUstream_st* stream, std::int32_t const* gather = nullptr) const;

 private:
  static constexpr std::int64_t kHeadBytes = (4 * 1024 + W4Workspace::kMaxSplitUnits) * 4;  ///< factors, flags, counters
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace moe::hopper

namespace moe::experts {

namespace detail {

/// How a quantisation stores 4-bit weights, or that it is none of the layer's.
template <class Quant>
struct W4Storage {
  static constexpr bool kSupported = false;
};
template <int Group, bool ZeroPoint>
struct W4Storage<quantization::WNa16<4, Group, ZeroPoint>> {
  static constexpr bool kSupported = Group == 0 || Group >= 64;
  static constexpr hopper::W4Scheme kScheme = ZeroPoint ? hopper::W4Scheme::int4_zero : hopper::W4Scheme::int4;
  static constexpr int group(std::int64_t cols) { return static_cast<int>(quantization::effective_group(cols, Group)); }
};
template <quantization::MxRule Rule>
struct W4Storage<quantization::Mxfp4W4A16<Rule>> {
  static constexpr bool kSupported = true;
  static constexpr hopper::W4Scheme kScheme = hopper::W4Scheme::mxfp4;
  static constexpr int group(std::int64_t) { return 32; }
};

/// The kinds that W4Activation's formula covers.
constexpr bool is_w4_activation(activation::Kind k) {
  using activation::Kind;
  return k == Kind::silu || k == Kind::swigluoai || k == Kind::swigluoai_halves || k == Kind::silu_clamped;
}
/// E_UNSUPPORTED for another kind.
inline hopper::W4Activation w4_activation(activation::Kind kind, activation::Constants const& c) {
  using activation::Kind;
  switch (kind) {
    case Kind::silu: return {};
    case Kind::swigluoai:
    case Kind::swigluoai_halves: return {c.alpha, c.beta, c.limit};
    case Kind::silu_clamped: return {1.0F, 0.0F, c.limit};
    default:
      throw Error(ErrorCode::unsupported,
                  text("hopper_w4a16: the activation ", activation::name(kind), " is not built in, use cuda_reference"));
  }
}

}  // namespace detail

/// int4 (groups of 64 and more, or whole rows, with or without zero points) and mxfp4 weights with bf16 activations, standard and batched
/// formats, biases, SwiGLU and its clamped forms. Weights become bf16 in registers, exactly; scales of more than 11
/// bits (int4) are rounded to these.
struct HopperW4A16 {
  static constexpr char const* kName = "hopper_w4a16";
  using Space = space::cuda;
  static constexpr int kSharedMemoryLimit = 232448;  ///< of one multiprocessor of sm_90
  struct Params {
    int expected_rows = 16;  ///< batched: rows to expect of an expert; a hint for the tile
  };

  static constexpr bool reads(ActivationFormat) { return true; }
  static constexpr TopKReduction reduction(ActivationFormat f) {
    return f == ActivationFormat::standard ? TopKReduction::experts : TopKReduction::backend;
  }
  /// The stored weights are codes; `Weight` is the type that they were before.
  template <class Act, class Weight>
  static constexpr bool supports_element() {
    return std::same_as<Act, bf16>;
  }
  template <class A>
  static constexpr bool supports_activation() {
    if constexpr (requires { A::kKind; }) {
      return detail::is_w4_activation(A::kKind);
    } else {
      return std::same_as<A, activation::Any>;  // judged when the layer is made
    }
  }
  template <class Q>
  static constexpr bool supports_quantization() {
    return detail::W4Storage<Q>::kSupported;
  }
  template <class Config, class Quant>
  static constexpr bool fits_shape() {
    constexpr int unit = std::same_as<typename Quant::WeightScale, std::uint8_t> ? 32 : 64;  // of mxfp4 half a brick can be padding
    return moe::detail::fits(Config::hidden, 64) && moe::detail::fits(Config::intermediate, unit);
  }
  template <class Config, class Quant>
  static constexpr int shared_memory_bytes() {
    return kSharedMemoryLimit;
  }

  template <class Config, class Quant, ActivationFormat Format>
  class Kernel {
   public:
    using Act = typename Config::Act;
    using Output = Act;
    static constexpr bool kSkipsForeignIds = true;
    using Weights = WeightsOf<Config, Quant>;

    /// `weights` are device views; the packed copy is in the arena. E_UNSUPPORTED for a router weight
    /// on the input, an activation that is not built in, or a device that is not Hopper.
    Kernel(Shape<Config> const& shape, Weights const& weights, std::int64_t max_rows, Quant const&,
           typename Config::Activation const& activation, Params const& params, Arena<space::cuda>& arena)
        : hidden_(shape.hidden()),
          topk_(shape.topk()),
          max_rows_(max_rows),
          num_local_(weights.w13.codes.extent(0)),
          expected_rows_(params.expected_rows),
          layer_(make_layer(shape, weights, activation, arena)) {
      std::int64_t const tokens = max_rows * (Format == ActivationFormat::standard ? 1 : num_local_);
      if (tokens * topk_ > std::numeric_limits<std::int32_t>::max()) {
        throw Error(ErrorCode::capacity, text("hopper_w4a16: ", tokens, " rows of ", topk_, " slots, at most 2^31 - 1 slots"));
      }
      workspace_ = arena.template take<char>(layer_.workspace_bytes(static_cast<int>(tokens)));
    }

    /// Packs the weights anew after they were replaced in place. Enqueues.
    void weights_changed(cudaStream_t stream) { layer_.weights_changed(stream); }

    /// y[r] = Σ_j w_j FFN_{id_j}(x_r); rows without a local expert become 0. y [R, H] on the device, one rounding of the float32 sum of
    /// rows rounded to bf16. Enqueues.
    void apply(StandardTokensOf<Config, Quant> const& tokens, Rows<Output> y, cudaStream_t stream) const {
      std::int64_t const rows = tokens.rows.extent(0);
      check(rows, y.extent(0));
      if (rows == 0) return;
      expect("rows of topk_ids", tokens.topk_ids.extent(0), rows);
      expect("columns of topk_ids", tokens.topk_ids.extent(1), topk_);
      expect("columns of x", tokens.rows.extent(1), hidden_);
      expect("columns of the output", y.extent(1), hidden_);
      expect("row stride of the output", y.stride(0), hidden_);
      hopper::LayerCall call{};
      call.x = tokens.rows.data_handle();
      call.x_stride = tokens.rows.stride(0);
      call.topk_ids = tokens.topk_ids.data_handle();
      call.id_stride = tokens.topk_ids.stride(0);
      call.topk_weights = tokens.topk_weights.data_handle();
      call.weight_stride = tokens.topk_weights.stride(0);
      call.num_tokens = tokens.num_rows;
      call.out = y.data_handle();
      call.max_tokens = static_cast<int>(rows);
      layer_.forward(call, workspace_, stream);
    }
    /// y[e][i] = FFN_e(x_i) for the valid rows of each block, unweighted. y [L, C, H] on the device. Enqueues.
    void apply(BatchedTokensOf<Config, Quant> const& tokens, Blocks<Output> y, cudaStream_t stream) const {
      std::int64_t const capacity = tokens.capacity();
      check(capacity, y.extent(1));
      if (capacity == 0) return;
      bool const gathers = tokens.gather.extent(0) > 0;
      expect(gathers ? "blocks of gathered rows" : "blocks of x", gathers ? tokens.gather.extent(0) : tokens.rows.extent(0), num_local_);
      expect("columns of x", tokens.rows.extent(2), hidden_);
      expect("rows of an output block", y.extent(1), capacity);
      expect("entries of expert_num_tokens", tokens.expert_num_tokens.extent(0), num_local_);
      layer_.forward_batched(tokens.rows.data_handle(), tokens.expert_num_tokens.data_handle(), static_cast<int>(capacity), expected_rows_,
                             y.data_handle(), workspace_, stream, gathers ? tokens.gather.data_handle() : nullptr);
    }

   private:
    static hopper::W4A16Layer make_layer(Shape<Config> const& shape, Weights const& weights, typename Config::Activation const& activation,
                                         Arena<space::cuda>& arena) {
      using Storage = detail::W4Storage<Quant>;
      if (shape.weight_on_input()) {
        throw Error(ErrorCode::unsupported, "hopper_w4a16: the router weight on the input is not supported, use cuda_reference");
      }
      hopper::W4Activation act{};
      if constexpr (requires { activation.kKind; }) {
        act = detail::w4_activation(activation.kKind, activation.constants);
      } else {
        act = detail::w4_activation(activation.kind, activation.constants);
      }
      check_weights(weights, shape.hidden(), shape.intermediate(), true);
      hopper::LayerShape const sizes{static_cast<int>(weights.w13.codes.extent(0)), static_cast<int>(shape.hidden()),
                                     static_cast<int>(shape.intermediate()), Format == ActivationFormat::standard ? shape.topk() : 1};
      hopper::W4Weights w{};
      w.w13 = weights.w13.codes.data_handle();
      w.w2 = weights.w2.codes.data_handle();
      w.w13_scales = weights.w13.scales.data_handle();
      w.w2_scales = weights.w2.scales.data_handle();
      w.w13_group = Storage::group(sizes.hidden);
      w.w2_group = Storage::group(sizes.intermediate);
      w.b13 = weights.w13.has_bias() ? weights.w13.bias.data_handle() : nullptr;
      w.b2 = weights.w2.has_bias() ? weights.w2.bias.data_handle() : nullptr;
      char* const packed = arena.template take<char>(hopper::W4A16Layer::packed_bytes(sizes, Storage::kScheme));
      return {sizes, Storage::kScheme, w, act, packed, hopper::w4_launcher<Storage::kScheme>()};
    }
    static void expect(char const* what, std::int64_t value, std::int64_t wanted) {
      if (value != wanted) throw Error(ErrorCode::argument, text("hopper_w4a16: ", what, ": ", value, ", expected ", wanted));
    }
    void check(std::int64_t rows, std::int64_t out_rows) const {
      if (rows > max_rows_ || out_rows < rows) {
        throw Error(ErrorCode::argument,
                    text("experts: ", rows, " rows, capacity ", max_rows_, ", room for ", out_rows, " rows of output"));
      }
    }

    std::int64_t hidden_;
    std::int64_t topk_;
    std::int64_t max_rows_;
    std::int64_t num_local_;
    int expected_rows_;
    hopper::W4A16Layer layer_;
    char* workspace_ = nullptr;
  };
};

}  // namespace moe::experts
