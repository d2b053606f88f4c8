// SPDX-License-Identifier: Apache-2.0
// experts/hopper_w4a8.hpp: experts with 4-bit weights and e4m3 activations in groups of 128 on one Hopper GPU, standard and batched
// formats. Plain host C++: a program links the kernels (cmake/MoeHopperKernels.cmake) or includes experts/hopper_w4a8.cuh.
#pragma once

#include <cstdint>

#include "moe/experts/hopper/packed_weights.hpp"
#include "moe/experts/hopper/w4a8_layer.hpp"
#include "moe/experts/weights.hpp"
#include "moe/quantization/int4_fp8.hpp"
#include "moe/quantization/mxfp4_fp8.hpp"

namespace moe::experts {

namespace detail {

/// The layer's scheme for a quantisation's weights and rows; kSupported is false if there is none.
template <class Quant>
struct W4A8Storage {
  static constexpr bool kSupported = false;
};
template <quantization::MxRule Rule>
struct W4A8Storage<quantization::Mxfp4Fp8<Rule>> {
  static constexpr bool kSupported = true;
  static constexpr hopper::W4Scheme kScheme = hopper::W4Scheme::mxfp4;
  static constexpr int group(std::int64_t) { return 32; }
};
template <int Group, bool ZeroPoint>
struct W4A8Storage<quantization::Int4Fp8<Group, ZeroPoint>> {
  static constexpr bool kSupported = Group >= 32;
  static constexpr hopper::W4Scheme kScheme = hopper::int4_scheme(Group, ZeroPoint);
  static constexpr int group(std::int64_t cols) { return static_cast<int>(quantization::effective_group(cols, Group)); }
};

struct W4A8Storages {
  static constexpr char const* kName = "hopper_w4a8";
  template <class Quant>
  using Of = W4A8Storage<Quant>;
  using Layer = hopper::W4A8Layer;
  template <hopper::W4Scheme S>
  static hopper::w4a8::Launcher launcher() {
    return &hopper::w4a8::launch_layer<S, false>;
  }
  template <hopper::W4Scheme S>
  static hopper::w4a8::Launcher any_launcher() {
    return &hopper::w4a8::launch_layer<S, true>;
  }
  static void link_kernels() { fix::include_moe_experts_hopper_w4a8_cuh_or_link_a_library_of_moe_add_hopper_kernels(); }
};

}  // namespace detail

/// mxfp4 and int4 weights (groups of 32 and more, with or without zero points) and rows of e4m3 codes with a scale per 128, standard and
/// batched formats, biases, every activation, the router weight on either side. SwiGLU and its clamped forms with the weight on the output
/// have kernels of their own. Weights become e4m3 in registers, exactly; int4's scales keep 11 significant bits within 28 binades of the
/// largest of their row (hopper/w4/row_factors.hpp); GEMM1 quantises the intermediate to e4m3 with a scale per 128.
struct HopperW4A8 : detail::PackedWeights<detail::W4A8Storages> {};

}  // namespace moe::experts
