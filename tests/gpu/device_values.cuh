// SPDX-License-Identifier: Apache-2.0
// tests/gpu/device_values.cuh: vectors to and from the device, random values, and the error between two vectors, for the runner's tests.
#pragma once

#include <cmath>
#include <cstdint>
#include <random>
#include <type_traits>
#include <vector>

#include "moe/core/buffer.hpp"
#include "moe/core/cuda_space.hpp"

namespace moe_test {

template <class T>
using DeviceBuffer = moe::Buffer<T, moe::space::cuda>;

template <class T>
DeviceBuffer<T> upload(std::vector<T> const& host) {
  DeviceBuffer<T> buffer(static_cast<std::int64_t>(host.size()));
  if (!host.empty()) buffer.copy_from_host(host.data());
  moe::check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");  // streams of the tests do not wait for the default stream
  return buffer;
}
/// All of a buffer as float32, once the device is idle.
template <class T>
std::vector<float> floats(DeviceBuffer<T> const& buffer) {
  moe::check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  std::vector<T> host(static_cast<std::size_t>(buffer.size()));
  if (!host.empty()) buffer.copy_to_host(host.data());
  std::vector<float> out;
  for (T v : host) out.push_back(moe::to_float(v));
  return out;
}

/// Normal values, as the element type rounds them.
template <class T>
struct Values {
  std::vector<T> host;
  DeviceBuffer<T> device;
  Values(std::int64_t count, float sigma, std::mt19937& gen) : host(static_cast<std::size_t>(count)) {
    std::normal_distribution<float> normal(0.0F, sigma);
    for (T& v : host) v = moe::from_float<T>(normal(gen));
    device = upload(host);
  }
  float at(std::int64_t i) const { return moe::to_float(host[static_cast<std::size_t>(i)]); }
  moe::Rows<T const> rows(std::int64_t count, std::int64_t cols) const { return rows(count, cols, cols); }
  moe::Rows<T const> rows(std::int64_t count, std::int64_t cols, std::int64_t stride) const {
    return moe::make_strided_rows(device.data(), count, cols, stride);
  }
};

inline double root_mean_square(std::vector<double> const& v) {
  double sum = 0.0;
  for (double x : v) sum += x * x;
  return v.empty() ? 1.0 : std::sqrt(sum / static_cast<double>(v.size()));
}
/// The largest |got - want| over the root mean square of `want`.
inline double worst_error(std::vector<float> const& got, std::vector<double> const& want) {
  double const norm = root_mean_square(want);
  double worst = got.size() == want.size() ? 0.0 : 1e30;
  for (std::size_t i = 0; i < want.size() && i < got.size(); ++i) {
    double const error = std::abs(got[i] - want[i]) / norm;
    worst = error <= worst ? worst : error;  // a NaN is not less
  }
  return worst;
}
/// The largest |got - want| over what one rounding to T and float32 sums may cost: at most 1. `sums` is relative to the root mean square.
template <class T>
double excess(std::vector<float> const& got, std::vector<double> const& want, double sums = 4e-6) {
  double const unit = std::is_same_v<T, float> ? 0x1p-23 : std::is_same_v<T, moe::bf16> ? 0x1.02p-8 : 0x1.02p-11;
  double const absolute = sums * root_mean_square(want);
  double worst = got.size() == want.size() ? 0.0 : 1e30;
  for (std::size_t i = 0; i < want.size() && i < got.size(); ++i) {
    double const error = std::abs(got[i] - want[i]) / (unit * std::abs(want[i]) + absolute);
    worst = error <= worst ? worst : error;
  }
  return worst;
}

}  // namespace moe_test
