// SPDX-License-Identifier: Apache-2.0
// c/stream.hpp: the stream argument of moe.h, and the device that is current during a call.
#pragma once

#include <cstdint>
#include <type_traits>

#include "moe/c/tensor.hpp"
#include "moe/core/space.hpp"
#ifdef MOE_HAS_CUDA
#include "moe/core/cuda_space.hpp"
#endif

namespace moe::c {

/// The stream of a call. E_ARG for a stream in the host space, or one of another device than the runner's.
template <class Space>
Stream<Space> stream_of(void* stream, [[maybe_unused]] Device device) {
  if constexpr (Space::kKind == SpaceKind::host) {
    if (stream != nullptr) {
      throw Error(ErrorCode::argument, text("stream: is ", stream, ", expected NULL: this runner is in the host space"));
    }
    return {};
  } else {
#ifdef MOE_HAS_CUDA
    auto const given = static_cast<cudaStream_t>(stream);
    // The streams 0, 1 and 2 are the current device's.
    if (reinterpret_cast<std::uintptr_t>(stream) > 2) {
      int id = 0;
      check_cuda(cudaStreamGetDevice(given, &id), "stream: cudaStreamGetDevice");
      if (id != device.id) throw Error(ErrorCode::argument, text("stream: is of cuda:", id, ", expected one of cuda:", device.id));
    }
    return given;
#else
    return static_cast<Stream<Space> >(stream);
#endif
  }
}

/// The current device while a runner in the CUDA space works, whichever it was before.
template <class Space>
class OnDevice {
 public:
  explicit OnDevice([[maybe_unused]] Device device) {
#ifdef MOE_HAS_CUDA
    if constexpr (Space::kKind == SpaceKind::cuda) {
      check_cuda(cudaGetDevice(&before_), "cudaGetDevice");
      changed_ = before_ != device.id;
      if (changed_) check_cuda(cudaSetDevice(device.id), "cudaSetDevice");
    }
#endif
  }
  OnDevice(OnDevice const&) = delete;
  OnDevice& operator=(OnDevice const&) = delete;
  ~OnDevice() {
#ifdef MOE_HAS_CUDA
    if (changed_) cudaSetDevice(before_);
#endif
  }

 private:
  [[maybe_unused]] int before_ = 0;
  [[maybe_unused]] bool changed_ = false;
};

}  // namespace moe::c
