// SPDX-License-Identifier: Apache-2.0
// tests/gpu/quantization_mx_test.cu: mxfp8, mxfp4 and nvfp4 on the device: the host's bits.
#include "quantization_device.cuh"

namespace {

using MxSchemes = testing::Types<Mxfp8<>, Mxfp8<MxRule::even>, Mxfp4<>, Mxfp4<MxRule::ocp>, Nvfp4>;
INSTANTIATE_TYPED_TEST_SUITE_P(Mx, QuantizationDevice, MxSchemes);

}  // namespace
