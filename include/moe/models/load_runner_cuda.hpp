// SPDX-License-Identifier: Apache-2.0
// models/load_runner_cuda.hpp: moe::load_runner() in the CUDA space: everything that a block needs is copied to the device once.
#pragma once

#include <cstddef>
#include <vector>

#include "moe/core/cuda_space.hpp"
#include "moe/models/load_runner.hpp"
#include "moe/models/shared_policy.hpp"
#include "moe/runner/device/dense_shared.hpp"
#include "moe/runner/device/linear.hpp"
#include "moe/runner/device/row_kernels.hpp"

namespace moe::models {

template <>
class PartMemory<space::cuda> {
 public:
  template <class T>
  T const* copy(std::vector<T> const& v) {
    if (v.empty()) return nullptr;
    memory_.emplace_back(static_cast<std::int64_t>(v.size() * sizeof(T)));
    Memory<space::cuda>::copy_from_host(memory_.back().data(), v.data(), v.size() * sizeof(T));
    return reinterpret_cast<T const*>(memory_.back().data());
  }
  /// Frees the copy at p, if there is one.
  void release(void const* p) {
    std::erase_if(memory_, [p](auto const& buffer) { return buffer.data() == p; });
  }

  /// Of the device, 90 for compute capability 9.0.
  static int architecture() { return device_architecture(); }

 private:
  std::vector<Buffer<std::byte, space::cuda>> memory_;
};

/// The block of any checkpoint on the device, with run-time dimensions: rows and weights that are not quantised in Act. Shared experts
/// are dense in Act, or, if Options::shared_in_scheme asks for it, in Quant where the checkpoint stores them so (DeviceSharedFor).
template <class Quant, class Backend, class Experts, class Act = bf16>
using AnyDeviceBlock = Runner<ModularKernel<RuntimeLayer<Act, Act>, routing::AnyRouter, Quant, Backend, Experts>,
                              AnyParts<Act, DeviceSharedFor<Quant, Experts>::template Policy>>;

}  // namespace moe::models
