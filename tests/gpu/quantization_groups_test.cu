// SPDX-License-Identifier: Apache-2.0
// tests/gpu/quantization_groups_test.cu: fp8 groups and blocks and int8 on the device: the host's bits.
#include "quantization_device.cuh"

namespace {

using GroupSchemes =
    testing::Types<Fp8Group<>, Fp8Group<128, ScaleFormat::ue8m0>, Fp8Block<>, Fp8Block<128, ScaleFormat::f32_pow2, ScaleFloor::amax_1e4>,
                   Int8PerToken, Int8PerTensorStatic, Int8Group<>>;
INSTANTIATE_TYPED_TEST_SUITE_P(Groups, QuantizationDevice, GroupSchemes);

}  // namespace
