// SPDX-License-Identifier: Apache-2.0
// core/device_facts.hpp: what launches need to know of the current device, asked of the driver once. Plain host C++.
#pragma once

#include <array>
#include <cstddef>
#include <mutex>

#include "moe/core/cuda_space.hpp"

namespace moe {

struct DeviceFacts {
  int device = 0;
  int num_sms = 0;
  bool has_clusters = false;
  int max_shared_bytes = 0;  ///< of a block that asks for more than the default
};

namespace detail {

inline DeviceFacts ask_device_facts(int device) {
  auto const ask = [device](cudaDeviceAttr attribute) {
    int value = 0;
    check_cuda(cudaDeviceGetAttribute(&value, attribute, device), "cudaDeviceGetAttribute");
    return value;
  };
  return {device, ask(cudaDevAttrMultiProcessorCount), ask(cudaDevAttrClusterLaunch) != 0, ask(cudaDevAttrMaxSharedMemoryPerBlockOptin)};
}

}  // namespace detail

/// Of the current device. The facts of devices 0 to 63 are kept; those of any other device are queried at each call.
inline DeviceFacts device_facts() {
  struct Known {
    std::once_flag once;
    DeviceFacts facts;
  };
  static std::array<Known, 64> known;
  int device = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  if (device >= static_cast<int>(known.size())) return detail::ask_device_facts(device);
  Known& k = known[static_cast<std::size_t>(device)];
  std::call_once(k.once, [&] { k.facts = detail::ask_device_facts(device); });
  return k.facts;
}

}  // namespace moe
