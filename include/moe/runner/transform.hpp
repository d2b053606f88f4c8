// SPDX-License-Identifier: Apache-2.0
// runner/transform.hpp: projections of the routed path into and out of a narrower width (latent mixture of experts).
#pragma once

#include <cstdint>
#include <optional>

#include "moe/core/error.hpp"
#include "moe/runner/primitives.hpp"
#include "moe/runner/reduction.hpp"

namespace moe::runner::transform {

/// The routed path has the block's width.
struct None {
  static constexpr bool kAbsent = true;
  struct Params {};
};

/// y = norm?(W norm?(x)), without bias. No weight: the identity.
template <class WeightT = float>
struct Projection {
  static constexpr bool kAbsent = false;
  struct Params {
    Rows<WeightT const> weight = {};        ///< [out, in]
    bool normalise = false;                 ///< RMSNorm of x first; forward() overwrites x with it
    float const* norm = nullptr;            ///< [in], or null: 1
    bool normalise_result = false;          ///< RMSNorm of W x
    float const* result_norm = nullptr;     ///< [out], or null: 1
    float eps = 0.0F;                       ///< of both norms
    WeightReads reads = WeightReads::once;  ///< as gate::Linear's
  };
  static OutputStep step(Params const& p) {
    if (p.weight.extent(0) == 0) return OutputStep::none;
    return p.normalise || p.normalise_result ? OutputStep::nonlinear : OutputStep::linear;
  }

  template <class Space, class Act>
  class Part {
   public:
    /// E_ARG unless W is [out, in].
    Part(char const* name, Params const& p, std::int64_t in, std::int64_t out, Sizes const& sizes, Arena<Space>& arena) : params_(p) {
      if (p.weight.extent(0) == 0) {
        if (in != out) throw Error(ErrorCode::argument, text(name, ": no weight, and the width changes from ", in, " to ", out));
        return;
      }
      if (p.weight.extent(0) != out || p.weight.extent(1) != in) {
        throw Error(ErrorCode::argument,
                    text(name, ": weight is [", p.weight.extent(0), ", ", p.weight.extent(1), "], expected [", out, ", ", in, "]"));
      }
      linear_.emplace(p.weight, nullptr, Sums::blocked, sizes.max_rows, arena, p.reads);
      y_ = arena.template take<Act>(sizes.max_rows * out);
    }
    bool active() const { return linear_.has_value(); }
    /// Of an active part. x may be written.
    Rows<Act> apply(Rows<Act const> x, Stream<Space> stream) {
      Rows<Act> const y = make_rows(y_, x.extent(0), params_.weight.extent(0));
      linear_->apply(x, y, stream);
      if (params_.normalise_result) {
        RowKernels<Space>::template rms_norm<Act, Act>(y, params_.result_norm, params_.eps, 1.0F, y, stream);
      }
      return y;
    }
    Rows<Act> apply_normed(Rows<Act> x, Stream<Space> stream) {
      if (params_.normalise) {
        RowKernels<Space>::template rms_norm<Act, Act>(x, params_.norm, params_.eps, 1.0F, x, stream);
      }
      return apply(x, stream);
    }

   private:
    Params params_;
    std::optional<runner::Linear<Space, WeightT, Act, Act>> linear_;
    Act* y_ = nullptr;
  };
};

}  // namespace moe::runner::transform
