// SPDX-License-Identifier: Apache-2.0
// experts/cublas_grouped.hpp: the experts through cuBLAS's grouped matrix product, with kernels of this library around it: the baseline
// from a vendor library, also for shapes without tuning. Any GPU from sm_80; float32, bf16 and fp16; every activation; biases; both
// formats. Plain host C++; the kernels are in cublas_grouped.cuh, which needs cuBLAS (CMake: moe::cublas).
#pragma once

#include <concepts>
#include <cstdint>
#include <memory>

#include "moe/core/buffer.hpp"
#include "moe/core/cuda_space.hpp"
#include "moe/core/layer_config.hpp"
#include "moe/core/stream_capture.hpp"
#include "moe/core/tokens.hpp"
#include "moe/experts/common/any_composition.hpp"
#include "moe/experts/weights.hpp"
#include "moe/quantization/format/facts.hpp"
#include "moe/quantization/format/granularity.hpp"
#include "moe/quantization/support_level.hpp"

/// The kernels of cublas_grouped.cuh define this function: the linker names it in its message about a program without them.
namespace moe::fix {
void include_moe_experts_cublas_grouped_cuh_or_link_a_model_library();
}  // namespace moe::fix

namespace moe::experts {

namespace cublas {
class Products;  ///< the cuBLAS handle and the host's half of a group list
}  // namespace cublas

/// Rows are gathered by expert, multiplied, activated, multiplied, and summed in slot order in float32. cuBLAS takes the sizes of the
/// groups from the host, so a call reads the rows per expert back. It therefore waits for the stream once and cannot be captured in a CUDA
/// graph, except with `fixed_groups`.
struct CublasGrouped : AnyComposition {
  static constexpr char const* kName = "cublas_grouped";
  using Space = space::cuda;
  struct Params {
    /// Every local expert is a group with the most rows that it could get (all rows of the call, or the capacity). Nothing is read back and
    /// a call can be captured. The price: products of rows that do not exist, reads of idle experts' weights, and a workspace for rows ×
    /// experts.
    bool fixed_groups = false;
  };

  template <class Act, class Weight>
  static constexpr bool supports_element() {
    return std::same_as<Act, Weight> && (std::same_as<Act, float> || std::same_as<Act, bf16> || std::same_as<Act, f16>);
  }
  template <class Q>
  static constexpr bool supports_quantization() {
    return !facts::quantizes_activations<Q>() && facts::weight_granularity<Q>() == quantization::ScaleGranularity::none;
  }

  template <class Quant>
  static constexpr quantization::Support support_on(int sm) {
    return sm >= 80 && supports_quantization<Quant>() ? quantization::Support::native : quantization::Support::none;
  }

  template <class Config, class Quant, ActivationFormat Format>
  class Kernel {
   public:
    using Act = typename Config::Act;
    using Output = Act;
    static constexpr bool kSkipsForeignIds = true;
    using Weights = WeightsOf<Config, Quant>;

    /// `weights` are device views, read in place. E_UNSUPPORTED on a device older than sm_80; E_ARG for weights of another shape; E_CUDA if
    /// cuBLAS cannot be initialised. One apply() of an object at a time.
    Kernel(Shape<Config> const& shape, Weights const& weights, std::int64_t max_rows, Quant const&,
           typename Config::Activation const& activation, Params const& params, Arena<space::cuda>& arena)
        : hidden_(shape.hidden()),
          intermediate_(shape.intermediate()),
          topk_(shape.topk()),
          weight_on_input_(shape.weight_on_input() && Format == ActivationFormat::standard),
          fixed_(params.fixed_groups),
          max_rows_(max_rows),
          num_local_(weights.w13.codes.extent(0)),
          weights_(weights),
          activation_(activation) {
      fix::include_moe_experts_cublas_grouped_cuh_or_link_a_model_library();
      if (int const sm = device_architecture(); sm < 80) {
        throw Error(ErrorCode::unsupported, text("cublas_grouped: the device is sm_", sm, ", sm_80 or newer is needed"));
      }
      check_weights<Quant>(weights, hidden_, intermediate_, activation.gated());
      allocate(arena);
    }

    /// y[r] = Σ_j w_j FFN_{id_j}(x_r); rows without a local expert become 0. y [R, H] on the device; one rounding of the float32 sum of
    /// rows rounded to Act. E_STATE in a stream that is being captured, except with fixed_groups.
    void apply(StandardTokensOf<Config, Quant> const& tokens, Rows<Output> y, cudaStream_t stream) const;
    /// y[e][i] = FFN_e(x_i) for the valid rows of each block, unweighted. y [L, C, H] on the device; rows past the valid ones are not
    /// written, or with fixed_groups have undefined contents.
    void apply(BatchedTokensOf<Config, Quant> const& tokens, Blocks<Output> y, cudaStream_t stream) const;

    /// Whether apply() can be captured in a graph: no count reaches the host.
    bool capturable() const { return fixed_; }

   private:
    void allocate(Arena<space::cuda>& arena);  // defined in cublas_grouped.cuh, like all that follows
    void check(std::int64_t rows, std::int64_t out_rows, cudaStream_t stream) const;
    /// Both products of the planned groups, and the activation between them.
    void multiply(std::int64_t capacity, Act const* x, Act* y, cudaStream_t stream) const;

    std::int64_t hidden_;
    std::int64_t intermediate_;
    std::int64_t topk_;
    bool weight_on_input_;
    bool fixed_;
    std::int64_t max_rows_;
    std::int64_t num_local_;
    Weights weights_;
    typename Config::Activation activation_;
    std::shared_ptr<cublas::Products> products_;
    std::int32_t* counts_ = nullptr;      // [L] number of rows of each expert
    std::int64_t* offsets_ = nullptr;     // [L] first row of each expert
    std::int32_t* positions_ = nullptr;   // [slots] position of a slot among the slots of its expert
    std::int32_t* row_expert_ = nullptr;  // [rows]
    float* row_weight_ = nullptr;         // [rows]
    void const** pointers_ = nullptr;     // [6, L] operands and results of the groups
    Act* x_ = nullptr;                    // [rows, H], gathered
    Act* gate_up_ = nullptr;              // [rows, 2I or I]
    Act* inter_ = nullptr;                // [rows, I]
    Act* out_ = nullptr;                  // [rows, H], standard
  };
};

}  // namespace moe::experts
