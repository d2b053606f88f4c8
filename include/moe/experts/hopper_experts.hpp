// SPDX-License-Identifier: Apache-2.0
// experts/hopper_experts.hpp: the Hopper layer as experts policies of a composition: HopperContiguous (standard format) and HopperMasked
// (batched). bf16 and fp16 without quantisation, SwiGLU, no biases. Include experts/hopper_contiguous.cuh where a layer is instantiated.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstdint>

#include "moe/activation/activation.hpp"
#include "moe/core/buffer.hpp"
#include "moe/core/cuda_space.hpp"
#include "moe/core/layer_config.hpp"
#include "moe/core/tokens.hpp"
#include "moe/experts/hopper_contiguous.hpp"
#include "moe/quantization/none.hpp"

namespace moe::experts {

namespace detail {

/// The facts and the kernel object that both policies share.
template <ActivationFormat Reads>
struct HopperPolicy {
  using Space = space::cuda;
  static constexpr int kSharedMemoryLimit = 232448;  ///< of one multiprocessor of sm_90
  struct Params {
    int expected_rows = 16;  ///< batched: rows to expect of an expert; a hint for the tile
  };

  static constexpr bool reads(ActivationFormat f) { return f == Reads; }
  static constexpr TopKReduction reduction(ActivationFormat f) {
    return f == ActivationFormat::standard ? TopKReduction::experts : TopKReduction::backend;
  }
  template <class Act, class Weight>
  static constexpr bool supports_element() {
    return std::same_as<Act, Weight> && (std::same_as<Act, bf16> || std::same_as<Act, f16>);
  }
  template <class A>
  static constexpr bool supports_activation() {
    return std::same_as<A, activation::Silu>;
  }
  template <class Q>
  static constexpr bool supports_quantization() {
    return std::same_as<Q, quantization::None>;
  }
  template <class Config, class Quant>
  static constexpr bool fits_shape() {
    return (Config::hidden == dynamic || Config::hidden % 64 == 0) && (Config::intermediate == dynamic || Config::intermediate % 64 == 0);
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
    using Weights = WeightsOf<Config, Quant>;

    /// `weights` are device views, read in place. E_UNSUPPORTED for biases, a router weight on the input, or a device that is not Hopper.
    Kernel(Shape<Config> const& shape, Weights const& weights, std::int64_t max_rows, Quant const&, typename Config::Activation const&,
           Params const& params, Arena<space::cuda>& arena)
        : hidden_(shape.hidden()),
          max_rows_(max_rows),
          num_local_(weights.w13.codes.extent(0)),
          expected_rows_(params.expected_rows),
          layer_(hopper::LayerShape{static_cast<int>(num_local_), static_cast<int>(hidden_), static_cast<int>(shape.intermediate()),
                                    Format == ActivationFormat::standard ? shape.topk() : 1},
                 std::same_as<Act, bf16> ? hopper::Scheme::bf16 : hopper::Scheme::f16,
                 hopper::LayerWeights{weights.w13.codes.data_handle(), weights.w2.codes.data_handle(), nullptr, nullptr}) {
      if (weights.w13.has_bias() || weights.w2.has_bias()) {
        throw Error(ErrorCode::unsupported, "hopper experts: biases are not supported, use cuda_reference");
      }
      if (shape.weight_on_input()) {
        throw Error(ErrorCode::unsupported, "hopper experts: the router weight on the input is not supported, use cuda_reference");
      }
      std::int64_t const tokens = max_rows * (Format == ActivationFormat::standard ? 1 : num_local_);
      workspace_ = arena.template take<char>(layer_.workspace_bytes(static_cast<int>(tokens)));
    }

    /// y[r] = Σ_j w_j FFN_{id_j}(x_r); rows without a local expert become 0. y [R, H] on the device, one rounding of the float32 sum of
    /// rows rounded to Act. Enqueues.
    void apply(StandardTokensOf<Config, Quant> const& tokens, Rows<Output> y, cudaStream_t stream) const {
      std::int64_t const rows = tokens.rows.extent(0);
      check(rows, y.extent(0));
      if (rows == 0) return;
      if (tokens.rows.stride(0) != hidden_ || y.stride(0) != hidden_ || tokens.topk_ids.stride(0) != tokens.topk_ids.extent(1) ||
          tokens.topk_weights.stride(0) != tokens.topk_weights.extent(1)) {
        throw Error(ErrorCode::argument, text("hopper experts: rows of stride ", tokens.rows.stride(0), " and ", y.stride(0),
                                              ", packed rows of ", hidden_, " are needed"));
      }
      hopper::LayerCall call{};
      call.x = tokens.rows.data_handle();
      call.topk_ids = tokens.topk_ids.data_handle();
      call.topk_weights = tokens.topk_weights.data_handle();
      call.num_tokens = tokens.num_rows;
      call.out = y.data_handle();
      call.max_tokens = static_cast<int>(rows);
      layer_.forward(call, workspace_, stream);
    }
    /// y[e][i] = FFN_e(x_i) for the valid rows of each block, unweighted. y [L, C, H] on the device. Enqueues.
    void apply(BatchedTokensOf<Config, Quant> const& tokens, Blocks<Output> y, cudaStream_t stream) const {
      std::int64_t const capacity = tokens.rows.extent(1);
      check(capacity, y.extent(1));
      if (capacity == 0) return;
      if (y.extent(1) != capacity) {
        throw Error(ErrorCode::argument, text("hopper experts: output blocks of ", y.extent(1), " rows, input blocks of ", capacity));
      }
      layer_.forward_batched(tokens.rows.data_handle(), tokens.expert_num_tokens.data_handle(), static_cast<int>(capacity), expected_rows_,
                             y.data_handle(), workspace_, stream);
    }

   private:
    void check(std::int64_t rows, std::int64_t out_rows) const {
      if (rows > max_rows_ || out_rows < rows) {
        throw Error(ErrorCode::argument,
                    text("experts: ", rows, " rows, capacity ", max_rows_, ", room for ", out_rows, " rows of output"));
      }
    }

    std::int64_t hidden_;
    std::int64_t max_rows_;
    std::int64_t num_local_;
    int expected_rows_;
    hopper::ContiguousLayer layer_;
    char* workspace_ = nullptr;
  };
};

}  // namespace detail

/// Standard format: rows in any order with local ids; the sum over the slots is done here.
struct HopperContiguous : detail::HopperPolicy<ActivationFormat::standard> {
  static constexpr char const* kName = "hopper_contiguous";
};
/// Batched format: a block of rows and a count on the device per local expert.
struct HopperMasked : detail::HopperPolicy<ActivationFormat::batched> {
  static constexpr char const* kName = "hopper_masked";
};

}  // namespace moe::experts
