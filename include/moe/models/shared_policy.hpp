// SPDX-License-Identifier: Apache-2.0
// models/shared_policy.hpp: the policy of shared experts of a block on the device: in the scheme of its experts, if there are kernels for
// it that the block links anyway. Plain host C++.
#pragma once

#include <type_traits>

#include "moe/activation/activation.hpp"
#include "moe/core/types.hpp"
#include "moe/experts/hopper_contiguous.hpp"
#include "moe/experts/hopper_masked.hpp"
#include "moe/quantization/support_level.hpp"
#include "moe/runner/device/dense_shared.hpp"
#include "moe/runner/device/stored_shared.hpp"

namespace moe::models {

namespace detail {

/// The experts that read rows in any order with the kernels of `Experts`.
template <class Experts>
struct InAnyOrder {
  using type = Experts;
};
template <class Tiles>
struct InAnyOrder<experts::HopperMaskedWith<Tiles>> {
  using type = experts::HopperContiguousWith<Tiles>;
};

/// Emulated products would cost more than dense ones.
template <class Experts, class Quant, class Weight>
constexpr bool computes_shared() {
  return Experts::reads(ActivationFormat::standard) && Experts::template supports_element<Weight, Weight>() &&
         Experts::template supports_quantization<Quant>() && Experts::template supports_activation<activation::Any>() &&
         facts::support_on<Experts, Quant>(90) >= quantization::Support::converted;
}

template <class Quant, class Experts, class Weight>
struct DeviceShared {
  using type = runner::shared::Dense<Weight>;
};
template <class Quant, class Experts, class Weight>
  requires runner::shared::InAScheme<runner::shared::Stored<typename InAnyOrder<Experts>::type, Weight, Quant>> &&
           (computes_shared<typename InAnyOrder<Experts>::type, Quant, Weight>())
struct DeviceShared<Quant, Experts, Weight> {
  using type = runner::shared::Stored<typename InAnyOrder<Experts>::type, Weight, Quant>;
};

}  // namespace detail

/// runner::shared::Stored where the scheme is one that checkpoints store and the block's experts have tensor-core kernels for it, else
/// runner::shared::Dense.
template <class Quant, class Experts>
struct DeviceSharedFor {
  template <class Weight>
  using Policy = typename detail::DeviceShared<Quant, Experts, Weight>::type;
};

}  // namespace moe::models
