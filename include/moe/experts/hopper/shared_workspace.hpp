// SPDX-License-Identifier: Apache-2.0
// experts/hopper/shared_workspace.hpp: one workspace for the experts of several layers, whose calls follow each other. Plain host C++.
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <vector>

#include "moe/core/buffer.hpp"
#include "moe/core/cuda_space.hpp"

namespace moe::hopper {

/// Device memory that the kernels of several layers use in turn: nothing in it outlives a call. Layers that share one must be on one
/// device, and their calls must follow each other there: on one stream, or each inside a Use.
class SharedWorkspace {
 public:
  SharedWorkspace() = default;
  SharedWorkspace(SharedWorkspace const&) = delete;
  SharedWorkspace& operator=(SharedWorkspace const&) = delete;

  /// At least `bytes` of memory of the current device with any contents, aligned to 1024 bytes, until this object is destroyed. The memory
  /// that others have, if it is large enough; else new memory for this one and for those after it.
  char* reserve(std::int64_t bytes) {
    std::lock_guard const lock(mutex_);
    if (blocks_.empty() || blocks_.back().size() - kAlign < bytes) {
      blocks_.emplace_back(bytes + kAlign);
      bytes_ += bytes + kAlign;
    }
    char* const block = blocks_.back().data();
    auto const past = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(block) % kAlign);
    return block + (past == 0 ? 0 : kAlign - past);
  }
  /// Of device memory, in all.
  std::int64_t bytes() const {
    std::lock_guard const lock(mutex_);
    return bytes_;
  }
  /// A layer that calls inside a Use joins, and leaves when it is destroyed. One alone needs no order on the device, so the second to join
  /// waits for the device. Not while a stream is captured.
  void join() {
    std::lock_guard const lock(mutex_);
    if (layers_ == 1) check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    ++layers_;
  }
  void leave() {
    std::lock_guard const lock(mutex_);
    --layers_;
  }

  /// Around the call of a layer: other threads wait until it is enqueued, and its stream waits for the last call if that was on another
  /// one. A call that a graph records is not ordered by this: replays must follow other calls by the program's own order.
  class Use {
   public:
    Use(SharedWorkspace* of, cudaStream_t stream) : of_(of), stream_(stream) {
      if (of_ == nullptr) return;
      lock_ = std::unique_lock(of_->mutex_);
      if (of_->layers_ > 1) of_->begin(stream_, ordered_);
    }
    Use(Use const&) = delete;
    Use& operator=(Use const&) = delete;
    ~Use() {
      if (ordered_) cudaEventRecord(*of_->finished_, stream_);
    }

   private:
    SharedWorkspace* of_;
    cudaStream_t stream_;
    bool ordered_ = false;  // an event follows the call
    std::unique_lock<std::mutex> lock_;
  };

 private:
  static constexpr std::int64_t kAlign = 1024;

  void begin(cudaStream_t stream, bool& ordered) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    if (stream != nullptr && stream != cudaStreamLegacy) check_cuda(cudaStreamIsCapturing(stream, &status), "cudaStreamIsCapturing");
    if (status != cudaStreamCaptureStatusNone) return;
    unsigned long long id = 0;  // of this stream alone; a cudaStream_t may be reused after its stream was destroyed
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;  // while another stream is captured, too
    check_cuda(cudaThreadExchangeStreamCaptureMode(&mode), "cudaThreadExchangeStreamCaptureMode");
    cudaError_t const known = cudaStreamGetId(stream, &id);
    cudaThreadExchangeStreamCaptureMode(&mode);
    check_cuda(known, "cudaStreamGetId");
    if (!finished_) {
      finished_.emplace();
    } else if (id != last_) {
      finished_->make_wait(stream);
    }
    last_ = id;
    ordered = true;
  }

  mutable std::mutex mutex_;
  std::vector<Buffer<char, space::cuda>> blocks_;
  std::int64_t bytes_ = 0;
  int layers_ = 0;
  std::optional<CudaMark> finished_;  // of the last call
  unsigned long long last_ = 0;       // its stream's id
};

}  // namespace moe::hopper
