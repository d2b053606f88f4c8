// SPDX-License-Identifier: Apache-2.0
// c/stream.hpp: the stream argument of moe.h, and the device that is current during a call.
#pragma once

#include <chrono>
#include <cstdint>
#include <exception>
#include <thread>
#include <type_traits>

#include "moe/c/tensor.hpp"
#include "moe/core/space.hpp"
#ifdef MOE_HAS_CUDA
#include "moe/core/cuda_space.hpp"
#endif

namespace moe::c {

#ifdef MOE_HAS_CUDA
/// The streams 0, 1 and 2: the default ones.
inline bool is_of_current_device(void* stream) { return reinterpret_cast<std::uintptr_t>(stream) <= 2; }

/// While it exists, this thread may call any function of CUDA, even if another stream is being captured.
class DuringAnyCapture {
 public:
  DuringAnyCapture() { check_cuda(cudaThreadExchangeStreamCaptureMode(&mode_), "cudaThreadExchangeStreamCaptureMode"); }
  DuringAnyCapture(DuringAnyCapture const&) = delete;
  DuringAnyCapture& operator=(DuringAnyCapture const&) = delete;
  ~DuringAnyCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};
#endif

/// Whether calls on the stream go into a graph. Leaves a capture as it is.
template <class Space>
bool is_capturing([[maybe_unused]] void* stream) {
#ifdef MOE_HAS_CUDA
  if constexpr (Space::kKind == SpaceKind::cuda) {
    if (stream == nullptr || stream == cudaStreamLegacy) return false;
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    check_cuda(cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status), "stream: cudaStreamIsCapturing");
    return status != cudaStreamCaptureStatusNone;
  }
#endif
  return false;
}
/// E_STATE if the stream is being captured, before the call does anything.
template <class Space>
void refuse_capture(char const* call, void* stream, char const* why) {
  if (is_capturing<Space>(stream)) throw Error(ErrorCode::state, text("stream: is being captured in a graph, but ", call, " ", why));
}

/// The stream of a call. E_ARG for a stream in the host space, or one of another device than the runner's; under a capture,
/// which cudaStreamGetDevice() would end, the first launch finds the latter.
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
    if (!is_of_current_device(stream) && !is_capturing<Space>(stream)) {
      DuringAnyCapture const allowed;
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

/// The current device while a runner in the CUDA space works, whichever it was before. An error that an earlier call of the program has
/// left does not fail the runner's launches, and one that a call throws does not fail the program's next launch.
template <class Space>
class OnDevice {
 public:
  explicit OnDevice([[maybe_unused]] Device device) {
#ifdef MOE_HAS_CUDA
    if constexpr (Space::kKind == SpaceKind::cuda) {
      cudaGetLastError();
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
    if constexpr (Space::kKind == SpaceKind::cuda) {
      if (std::uncaught_exceptions() > exceptions_) cudaGetLastError();
    }
#endif
  }

 private:
  [[maybe_unused]] int const exceptions_ = std::uncaught_exceptions();
  [[maybe_unused]] int before_ = 0;
  [[maybe_unused]] bool changed_ = false;
};

/// Waits for a stream of a GPU. E_ARG for another device, E_UNSUPPORTED without CUDA, E_STATE under a capture, E_TIMEOUT.
inline void wait_for_stream(DLDevice given, [[maybe_unused]] void* stream, [[maybe_unused]] std::int64_t timeout_ms) {
  if (given.device_type != kDLCUDA) {
    throw Error(ErrorCode::argument, text("device: is ", describe(given), ", expected one of cuda: the host has no streams"));
  }
#ifdef MOE_HAS_CUDA
  Device const device{SpaceKind::cuda, given.device_id};
  OnDevice<space::cuda> const current(device);
  refuse_capture<space::cuda>("moe_stream_wait()", stream, "waits for it");
  auto const of = stream_of<space::cuda>(stream, device);
  auto const begin = std::chrono::steady_clock::now();
  for (;;) {
    cudaError_t const status = cudaStreamQuery(of);
    if (status != cudaErrorNotReady) return check_cuda(status, "stream: cudaStreamQuery");
    cudaGetLastError();  // not an error
    auto const waited = std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() - begin).count();
    if (waited >= timeout_ms) throw Error(ErrorCode::timeout, text("stream: has not finished after ", waited, " ms"));
    if (waited > 0) std::this_thread::sleep_for(std::chrono::microseconds(50));  // the first millisecond without
  }
#else
  throw Error(ErrorCode::unsupported, text("device: is ", describe(given), ", this library was built without CUDA"));
#endif
}

}  // namespace moe::c
