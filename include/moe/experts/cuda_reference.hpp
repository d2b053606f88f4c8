// SPDX-License-Identifier: Apache-2.0
// experts/cuda_reference.hpp: the experts exactly as defined, on any GPU from sm_80: any quantisation that states its format, by
// dequantising, any activation, both formats, float32 sums in j order. The reference for tests on the device, and the fallback for shapes
// without a tuned kernel.
#pragma once

#include "moe/core/buffer.hpp"
#include "moe/core/cuda_space.hpp"
#include "moe/core/layer_config.hpp"
#include "moe/core/tokens.hpp"
#include "moe/experts/common/any_composition.hpp"
#include "moe/experts/weights.hpp"
#include "moe/quantization/format/facts.hpp"
#include "moe/quantization/format/granularity.hpp"
#include "moe/quantization/support_level.hpp"

/// Defined in cuda_reference.cuh, so that the linker's message for a program without the kernels says what to do.
namespace moe::fix {
void include_moe_experts_cuda_reference_cuh_or_link_a_model_library();
}  // namespace moe::fix

namespace moe::experts {

struct CudaReference : AnyComposition {
  static constexpr char const* kName = "cuda_reference";
  using Space = space::cuda;
  static constexpr bool kBatchInvariant = true;
  static constexpr bool kNormalisesOutput = true;
  struct Params {};

  /// The device reads rows by their format.
  template <class Quant>
  static constexpr bool supports_quantization() {
    return facts::states_format<Quant>();
  }
  template <class Quant>
  static constexpr quantization::Support support_on(int sm) {
    return sm >= 80 && supports_quantization<Quant>() ? quantization::Support::emulated : quantization::Support::none;
  }

  template <class Config, class Quant, ActivationFormat Format>
  class Kernel {
   public:
    using Output = float;
    using Weights = WeightsOf<Config, Quant>;
    using Act = typename Config::Act;
    using Code = typename Quant::template Payload<float>;

    /// `weights` are device views. Dequantises them once into float32 (arena): memory of 4 bytes a weight.
    Kernel(Shape<Config> const& shape, Weights const& weights, std::int64_t max_rows, Quant const& quant,
           typename Config::Activation const& activation, Params const&, Arena<space::cuda>& arena)
        : hidden_(shape.hidden()),
          intermediate_(shape.intermediate()),
          topk_(shape.topk()),
          weight_on_input_(shape.weight_on_input()),
          max_rows_(max_rows),
          num_local_(weights.w13.codes.extent(0)),
          weights_(weights),
          quant_(quant),
          activation_(activation) {
      fix::include_moe_experts_cuda_reference_cuh_or_link_a_model_library();
      if (int const sm = device_architecture(); sm < 80) {
        throw Error(ErrorCode::unsupported, text("cuda_reference: the device is sm_", sm, ", sm_80 or newer is needed"));
      }
      check_weights<Quant>(weights, hidden_, intermediate_, activation.gated());
      std::int64_t const slots = max_rows * (Format == ActivationFormat::standard ? topk_ : num_local_);
      std::int64_t const inputs = max_rows * (Format == ActivationFormat::standard ? 1 : num_local_);
      w13_ = arena.template take<float>(num_local_ * weights.w13.rows * hidden_);
      w2_ = arena.template take<float>(num_local_ * hidden_ * intermediate_);
      x_ = arena.template take<float>(inputs * hidden_);
      h_ = arena.template take<float>(slots * intermediate_);
      codes_ = arena.template take<Code>(slots * Quant::payload_cols(intermediate_));
      scales_ = arena.template take<typename Quant::Scale>(slots * Quant::scale_cols(intermediate_));
      if (kExpertNorm<Config> != ExpertNorm::none && weights.norm.given() && Format == ActivationFormat::standard) {
        z_ = arena.template take<float>(slots * hidden_);
      }
      weights_changed(nullptr);
      check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    }

    /// Dequantises the weights again after they were replaced in place. Enqueues.
    void weights_changed(cudaStream_t stream);  // defined in cuda_reference.cuh, like apply()

    /// y[r] = Σ_j w_j FFN_{id_j}(x_r); rows without a local expert become 0. y [R, H] float32 on the device. Enqueues.
    void apply(StandardTokensOf<Config, Quant> const& tokens, Rows<float> y, cudaStream_t stream) const;
    /// y[e][i] = FFN_e(x_i) for the valid rows of each block, unweighted. y [L, C, H] float32 on the device. Enqueues.
    void apply(BatchedTokensOf<Config, Quant> const& tokens, Blocks<float> y, cudaStream_t stream) const;

   private:
    std::int64_t hidden_;
    std::int64_t intermediate_;
    std::int64_t topk_;
    bool weight_on_input_;
    std::int64_t max_rows_;
    std::int64_t num_local_;
    Weights weights_;
    Quant quant_;
    typename Config::Activation activation_;
    float* w13_ = nullptr;
    float* w2_ = nullptr;
    float* x_ = nullptr;
    float* h_ = nullptr;
    Code* codes_ = nullptr;
    typename Quant::Scale* scales_ = nullptr;
    float* z_ = nullptr;  // [slots, hidden] outputs of experts that go through a norm
  };
};

}  // namespace moe::experts
