// SPDX-License-Identifier: Apache-2.0
// runner/device/priority_stream.hpp: a stream of higher priority than the streams of the program. Plain host C++.
#pragma once

#include <algorithm>

#include "moe/core/cuda_space.hpp"

namespace moe::runner::device {

/// A stream whose priority is `levels` above the least, which is that of streams by default. Streams of one priority share hardware queues,
/// in which a kernel can end up behind those of another stream that wait for a peer.
class PriorityStream {
 public:
  static constexpr int kAllLevels = 1 << 16;  ///< more than any device has: the highest priority
  explicit PriorityStream(int levels) {
    int least = 0, greatest = 0;
    check_cuda(cudaDeviceGetStreamPriorityRange(&least, &greatest), "cudaDeviceGetStreamPriorityRange");
    check_cuda(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, std::max(greatest, least - levels)),
               "cudaStreamCreateWithPriority");
  }
  PriorityStream(PriorityStream const&) = delete;
  PriorityStream& operator=(PriorityStream const&) = delete;
  ~PriorityStream() { cudaStreamDestroy(stream_); }
  operator cudaStream_t() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

}  // namespace moe::runner::device
