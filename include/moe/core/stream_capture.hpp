// SPDX-License-Identifier: Apache-2.0
// core/stream_capture.hpp: whether a stream is being captured in a CUDA graph. Plain host C++.
#pragma once

#include "moe/core/cuda_space.hpp"

namespace moe {

/// Whether a stream of a memory space is being captured. Only the CUDA space has graphs. Policies that cannot be captured include this
/// header.
template <class Space>
struct StreamCapture;

template <>
struct StreamCapture<space::cuda> {
  /// Whether what is enqueued becomes part of a graph. The legacy default stream is never captured.
  static bool is_active(cudaStream_t stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    if (stream != nullptr && stream != cudaStreamLegacy) check_cuda(cudaStreamIsCapturing(stream, &status), "cudaStreamIsCapturing");
    return status != cudaStreamCaptureStatusNone;
  }
};

}  // namespace moe
