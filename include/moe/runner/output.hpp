// SPDX-License-Identifier: Apache-2.0
// runner/output.hpp: what happens to the routed output on its way to the block's output: a factor, zero experts, a bias, a norm.
#pragma once

#include <cstdint>

#include "moe/core/error.hpp"
#include "moe/runner/primitives.hpp"

namespace moe::runner {

namespace scaling {

/// The routing weights have the scaling factor, or there is none.
struct None {
  struct Params {
    static constexpr float routed = 1.0F, shared = 1.0F;
    static constexpr bool beside_weights = false;
  };
};
/// The routed output is multiplied by the factor, and not the weights too.
struct Factor {
  struct Params {
    float routed = 1.0F;  ///< c
    static constexpr float shared = 1.0F;
    bool beside_weights = false;  ///< the model declares another factor in its routing weights
  };
};
/// f16: the shared output is divided by the factor, and the model multiplies the block's output, so that large routed values do not
/// overflow. For models that declare it only.
struct SharedInverse {
  struct Params {
    static constexpr float routed = 1.0F;
    float shared = 1.0F;  ///< 1 / c
    static constexpr bool beside_weights = false;
  };
};

}  // namespace scaling

namespace zero_experts {

/// The router chooses experts with weights only.
struct None {
  static constexpr bool kAbsent = true;
};
/// Ids that the router places behind its experts add the routed path's input times their weight. Their number and kind are the router's;
/// a router without them adds nothing.
struct Identity {
  static constexpr bool kAbsent = false;
};

}  // namespace zero_experts

namespace end {

struct None {
  struct Params {
    static constexpr float const* bias = nullptr;
    static constexpr bool normalise = false;
    static constexpr float const* norm = nullptr;
    static constexpr float eps = 0.0F;
  };
};
/// y = norm?(y + bias), over the sum of routed and shared output.
struct BiasNorm {
  struct Params {
    float const* bias = nullptr;  ///< [H], or null
    bool normalise = false;       ///< RMSNorm
    float const* norm = nullptr;  ///< [H], or null: 1
    float eps = 0.0F;
  };
};

}  // namespace end

}  // namespace moe::runner
