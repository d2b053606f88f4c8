// SPDX-License-Identifier: Apache-2.0
// tests/gpu/quantization_golden_test.cpp: the device's codes and scales are the reference's, bit for bit.
#include "golden/quantization_golden.hpp"

#include <gtest/gtest.h>

#include "device_rows.hpp"

namespace {

using moe_test::quantize_on_device;

template <class T>
std::vector<std::byte> bytes_of(std::vector<T> const& v) {
  auto const bytes = std::as_bytes(std::span(v));
  return {bytes.begin(), bytes.end()};
}
std::vector<std::byte> bytes(moe::io::SafetensorsFile const& file, std::string const& name) {
  auto const& t = file.at(name);
  if (t.dtype == moe::io::FileDType::f32) return bytes_of(file.read<float>(name));
  if (t.dtype == moe::io::FileDType::i8) return bytes_of(file.read<std::int8_t>(name));
  return bytes_of(file.read<std::uint8_t>(name));
}

template <class Act>
void activations(std::string const& name) {
  if (!moe_test::has_quant_file(name)) GTEST_SKIP() << name << " is only in the whole reference set";
  auto const file = moe_test::quant_file(name);
  auto const x = file.read<Act>("x");
  std::int64_t const cols = file.at("x").shape[1];
  for (std::string const scheme : {"per_token", "per_token_ue8m0", "group128", "group128_ue8m0", "int8_per_token"}) {
    auto const got = quantize_on_device(scheme, x, cols);
    EXPECT_EQ(got.codes, bytes(file, scheme + ".q")) << scheme;
    EXPECT_EQ(got.scales, bytes(file, scheme + (scheme.ends_with("ue8m0") ? ".scale_byte" : ".scale"))) << scheme;
  }
}
TEST(QuantizationDeviceGolden, ActivationsBf16) { activations<moe::bf16>("act_bf16_seed2001"); }
TEST(QuantizationDeviceGolden, ActivationsFloat) { activations<float>("act_f32_seed2001"); }

TEST(QuantizationDeviceGolden, PerTensor) {
  auto const file = moe_test::quant_file("act_bf16_seed2001");
  auto const x = file.read<moe::bf16>("x");
  std::int64_t const cols = file.at("x").shape[1];
  std::vector<float> rows;
  for (std::int32_t const r : file.read<std::int32_t>("per_tensor.rows")) {
    for (std::int64_t c = 0; c < cols; ++c) rows.push_back(moe::to_float(x[static_cast<std::size_t>(r * cols + c)]));
  }
  auto const got = quantize_on_device("per_tensor", rows, cols, file.read<float>("per_tensor.scale").at(0));
  EXPECT_EQ(got.codes, bytes(file, "per_tensor.q"));
}
TEST(QuantizationDeviceGolden, Mxfp4) {
  auto const file = moe_test::quant_file("mxfp4_quant_ocp_seed2031");
  auto const got = quantize_on_device("mxfp4", file.read<float>("x"), file.at("x").shape[1]);
  EXPECT_EQ(got.codes, bytes(file, "packed"));
  EXPECT_EQ(got.scales, bytes(file, "scale_byte"));
}
TEST(QuantizationDeviceGolden, Nvfp4) {
  auto const file = moe_test::quant_file("nvfp4_seed2041");
  auto const got = quantize_on_device("nvfp4", file.read<float>("w"), file.at("w").shape[1], file.read<float>("global_scale").at(0));
  EXPECT_EQ(got.codes, bytes(file, "packed"));
  EXPECT_EQ(got.scales, bytes(file, "block_scale_e4m3"));
}

}  // namespace
