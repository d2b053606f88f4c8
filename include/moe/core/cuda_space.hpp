// SPDX-License-Identifier: Apache-2.0
// core/cuda_space.hpp: the CUDA half of core/space.hpp: checked calls, device memory, streams, events, and the status word through
// which kernels report errors. Plain host C++: needs the CUDA runtime's header and library, not nvcc.
#pragma once

#include <cuda_runtime_api.h>

#include <cstring>
#include <utility>

#include "moe/core/space.hpp"

namespace moe {

/// Throws E_CUDA with the call's name and CUDA's message unless `status` is cudaSuccess.
inline void check_cuda(cudaError_t status, char const* call, SourceLocation where = SourceLocation::current()) {
  if (status != cudaSuccess) {
    throw Error(ErrorCode::cuda, text(call, " failed: ", cudaGetErrorName(status), ": ", cudaGetErrorString(status)), where);
  }
}
/// Throws E_CUDA if the kernel launch just before it failed.
inline void check_launch(char const* kernel, SourceLocation where = SourceLocation::current()) {
  check_cuda(cudaGetLastError(), kernel, where);
}

template <>
struct Memory<space::cuda> {
  /// Uninitialised device memory, aligned to 256 bytes; E_CAPACITY if it cannot be had.
  static void* allocate(std::size_t bytes) {
    void* p = nullptr;
    cudaError_t const status = cudaMalloc(&p, bytes);
    if (status == cudaErrorMemoryAllocation) {
      cudaGetLastError();  // an allocation that failed must not look like a failed launch later
      throw Error(ErrorCode::capacity, text("device memory: cannot allocate ", bytes, " bytes"));
    }
    check_cuda(status, "cudaMalloc");
    return p;
  }
  static void release(void* p) noexcept { cudaFree(p); }
  static void copy_from_host(void* to, void const* from, std::size_t bytes) {
    check_cuda(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  static void copy_to_host(void* to, void const* from, std::size_t bytes) {
    check_cuda(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost), "cudaMemcpy");
  }
  /// Device to device, ordered by the stream.
  static void copy_async(void* to, void const* from, std::size_t bytes, cudaStream_t stream) {
    check_cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream), "cudaMemcpyAsync");
  }
  /// Host to device, ordered by the stream. Pageable memory may be used again when the call returns.
  static void copy_from_host_async(void* to, void const* from, std::size_t bytes, cudaStream_t stream) {
    check_cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream), "cudaMemcpyAsync");
  }
  /// Device to host, ordered by the stream. Pinned memory (HostArray), or the call waits for the copy.
  static void copy_to_host_async(void* to, void const* from, std::size_t bytes, cudaStream_t stream) {
    check_cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream), "cudaMemcpyAsync");
  }
  static void fill_async(void* p, int byte, std::size_t bytes, cudaStream_t stream) {
    check_cuda(cudaMemsetAsync(p, byte, bytes, stream), "cudaMemsetAsync");
  }
  static void fill(void* p, int byte, std::size_t bytes) { check_cuda(cudaMemset(p, byte, bytes), "cudaMemset"); }
  /// Waits for all work in the stream.
  static void synchronize(cudaStream_t stream) { check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize"); }
};

/// An owned stream that does not wait for the legacy default stream.
class CudaStream {
 public:
  CudaStream() { check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags"); }
  CudaStream(CudaStream const&) = delete;
  CudaStream& operator=(CudaStream const&) = delete;
  ~CudaStream() { cudaStreamDestroy(stream_); }
  operator cudaStream_t() const { return stream_; }
  void synchronize() const { check_cuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize"); }

 private:
  cudaStream_t stream_ = nullptr;
};

/// An owned event with timing.
class CudaEvent {
 public:
  CudaEvent() { check_cuda(cudaEventCreate(&event_), "cudaEventCreate"); }
  CudaEvent(CudaEvent const&) = delete;
  CudaEvent& operator=(CudaEvent const&) = delete;
  ~CudaEvent() { cudaEventDestroy(event_); }
  void record(cudaStream_t stream) { check_cuda(cudaEventRecord(event_, stream), "cudaEventRecord"); }
  /// Milliseconds from `earlier` to this event; waits for this event.
  float since(CudaEvent const& earlier) const {
    check_cuda(cudaEventSynchronize(event_), "cudaEventSynchronize");
    float ms = 0.0F;
    check_cuda(cudaEventElapsedTime(&ms, earlier.event_, event_), "cudaEventElapsedTime");
    return ms;
  }

 private:
  cudaEvent_t event_ = nullptr;
};

/// An owned event without a time: a point of a stream.
class CudaMark {
 public:
  CudaMark() { check_cuda(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "cudaEventCreateWithFlags"); }
  CudaMark(CudaMark const&) = delete;
  CudaMark& operator=(CudaMark const&) = delete;
  ~CudaMark() { cudaEventDestroy(event_); }
  operator cudaEvent_t() const { return event_; }
  void record(cudaStream_t stream) const { check_cuda(cudaEventRecord(event_, stream), "cudaEventRecord"); }
  /// Makes later work of `stream` wait for the recorded point.
  void make_wait(cudaStream_t stream) const { check_cuda(cudaStreamWaitEvent(stream, event_, 0), "cudaStreamWaitEvent"); }

 private:
  cudaEvent_t event_ = nullptr;
};

template <>
class Fence<space::cuda> {
 public:
  void record(cudaStream_t stream) { event_.record(stream); }
  bool done() const {
    cudaError_t const status = cudaEventQuery(event_);
    if (status == cudaErrorNotReady) {
      cudaGetLastError();  // not an error: it must not look like a failed launch later
      return false;
    }
    check_cuda(status, "cudaEventQuery");
    return true;
  }

 private:
  CudaMark event_;
};

/// In pinned memory. Unified addressing: the same pointer on the device.
template <class T>
class HostVisible<T, space::cuda> {
 public:
  HostVisible() {
    void* p = nullptr;
    check_cuda(cudaHostAlloc(&p, sizeof(T), cudaHostAllocMapped), "cudaHostAlloc");
    value_ = new (p) T{};
  }
  HostVisible(HostVisible const&) = delete;
  HostVisible& operator=(HostVisible const&) = delete;
  ~HostVisible() { cudaFreeHost(value_); }
  T* get() { return value_; }

 private:
  T* value_ = nullptr;
};

/// Pinned memory.
template <class T>
class HostArray<T, space::cuda> {
 public:
  explicit HostArray(std::size_t n) : size_(n) {
    if (n == 0) return;
    void* p = nullptr;
    check_cuda(cudaHostAlloc(&p, n * sizeof(T), cudaHostAllocDefault), "cudaHostAlloc");
    values_ = static_cast<T*>(p);
    std::memset(p, 0, n * sizeof(T));
  }
  HostArray(HostArray const&) = delete;
  HostArray& operator=(HostArray const&) = delete;
  ~HostArray() { cudaFreeHost(values_); }
  T* data() { return values_; }
  std::size_t size() const { return size_; }

 private:
  T* values_ = nullptr;
  std::size_t size_;
};

/// The error that a kernel records when it cannot continue; the host throws it at its next check. Zero: no error.
struct DeviceStatus {
  int code = 0;  ///< 1 + ErrorCode
  int rank = -1;
  int peer = -1;
  int phase = 0;
  long long expected = 0;
  long long observed = 0;
};

/// One DeviceStatus in pinned memory that kernels and the host both see.
class StatusWord {
 public:
  StatusWord() {
    check_cuda(cudaHostAlloc(reinterpret_cast<void**>(&status_), sizeof(DeviceStatus), cudaHostAllocMapped), "cudaHostAlloc");
    *status_ = {};
  }
  StatusWord(StatusWord const&) = delete;
  StatusWord& operator=(StatusWord const&) = delete;
  ~StatusWord() { cudaFreeHost(status_); }
  DeviceStatus* device() const { return status_; }  ///< unified addressing: the same pointer on the device
  DeviceStatus const& value() const { return *status_; }
  void clear() { *status_ = {}; }

 private:
  DeviceStatus* status_ = nullptr;
};

/// Compute capability of the current device as major * 10 + minor, for example 90. E_CUDA if there is no device.
inline int device_architecture() {
  int device = 0;
  int major = 0;
  int minor = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute");
  check_cuda(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), "cudaDeviceGetAttribute");
  return major * 10 + minor;
}

/// Whether this process can use a GPU at all.
inline bool has_device() {
  int count = 0;
  cudaError_t const status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess) {
    cudaGetLastError();
  }
  return status == cudaSuccess && count > 0;
}

}  // namespace moe
