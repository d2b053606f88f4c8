// SPDX-License-Identifier: Apache-2.0
// tests/gpu/quantization_golden_test.cu: rows in host memory through a scheme on the device, for the tests in quantization_golden_test.cpp.
#include "device_rows.hpp"
#include "moe/core/buffer.hpp"
#include "moe/quantization/rows/quantize_rows.cuh"
#include "moe/quantization/schemes.hpp"

namespace {

using namespace moe::quantization;

template <class Scheme, class Act>
moe_test::DeviceRows run(Scheme const& scheme, std::vector<Act> const& x, std::int64_t cols) {
  using Code = typename Scheme::template Payload<Act>;
  using Scale = typename Scheme::Scale;
  std::int64_t const rows = std::ssize(x) / cols, payload = Scheme::payload_cols(cols), scales = Scheme::scale_cols(cols);
  moe::Buffer<Act, moe::space::cuda> device_x(std::ssize(x));
  moe::Buffer<Code, moe::space::cuda> q(rows * payload);
  moe::Buffer<Scale, moe::space::cuda> s(rows * scales);
  device_x.copy_from_host(x.data());
  quantize_rows_on_device(scheme, moe::make_rows(static_cast<Act const*>(device_x.data()), rows, cols),
                          moe::make_rows(q.data(), rows, payload), moe::make_rows(s.data(), rows, scales), nullptr);
  moe::check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  moe_test::DeviceRows out{std::vector<std::byte>(sizeof(Code) * static_cast<std::size_t>(q.size())),
                           std::vector<std::byte>(sizeof(Scale) * static_cast<std::size_t>(s.size()))};
  q.copy_to_host(reinterpret_cast<Code*>(out.codes.data()));
  s.copy_to_host(reinterpret_cast<Scale*>(out.scales.data()));
  return out;
}

template <class Act>
moe_test::DeviceRows by_name(std::string const& scheme, std::vector<Act> const& x, std::int64_t cols) {
  if (scheme == "per_token") return run(Fp8PerToken<>{}, x, cols);
  if (scheme == "per_token_ue8m0") return run(Fp8PerToken<ScaleFloor::amax_1e10, ScaleFormat::ue8m0>{}, x, cols);
  if (scheme == "group128") return run(Fp8Group<128>{}, x, cols);
  if (scheme == "group128_ue8m0") return run(Fp8Group<128, ScaleFormat::ue8m0>{}, x, cols);
  if (scheme == "int8_per_token") return run(Int8PerToken{}, x, cols);
  throw moe::Error(moe::ErrorCode::argument, "scheme: " + scheme);
}

}  // namespace

moe_test::DeviceRows moe_test::quantize_on_device(std::string const& scheme, std::vector<float> const& x, std::int64_t cols,
                                                  float parameter) {
  if (scheme == "per_tensor") return run(Fp8PerTensorStatic({.scale = parameter}), x, cols);
  if (scheme == "mxfp4") return run(Mxfp4<MxRule::ocp>{}, x, cols);
  if (scheme == "nvfp4") return run(Nvfp4({.global_scale = parameter}), x, cols);
  return by_name(scheme, x, cols);
}
moe_test::DeviceRows moe_test::quantize_on_device(std::string const& scheme, std::vector<moe::bf16> const& x, std::int64_t cols) {
  return by_name(scheme, x, cols);
}
