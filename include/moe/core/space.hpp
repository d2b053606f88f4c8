// SPDX-License-Identifier: Apache-2.0
// core/space.hpp: what a memory space provides: memory, copies, and a stream that orders work. The CUDA half is core/cuda_space.hpp.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <new>
#include <vector>

#include "moe/core/error.hpp"
#include "moe/core/types.hpp"

struct CUstream_st;  // cudaStream_t is a pointer to it; naming it here keeps host-only builds free of CUDA's headers

namespace moe {

/// The stream type of a space: host work is done when a call returns, so its stream is empty.
struct HostStream {};
template <class Space>
struct StreamOf;
template <>
struct StreamOf<space::host> {
  using type = HostStream;
};
template <>
struct StreamOf<space::cuda> {
  using type = CUstream_st*;
};
template <class Space>
using Stream = typename StreamOf<Space>::type;

/// Allocation and blocking copies of a space. The primary template is specialised for each space.
template <class Space>
struct Memory;

template <>
struct Memory<space::host> {
  static constexpr std::size_t kAlign = 64;  ///< one cache line; also oneDNN's preferred alignment

  /// Uninitialised bytes; E_CAPACITY if they cannot be had.
  static void* allocate(std::size_t bytes) {
    std::size_t const rounded = (bytes + kAlign - 1) / kAlign * kAlign;
    void* p = std::aligned_alloc(kAlign, rounded);
    if (p == nullptr) {
      throw Error(ErrorCode::capacity, text("host memory: cannot allocate ", bytes, " bytes"));
    }
    return p;
  }
  static void release(void* p) noexcept { std::free(p); }
  static void copy_from_host(void* to, void const* from, std::size_t bytes) { std::memcpy(to, from, bytes); }
  static void copy_to_host(void* to, void const* from, std::size_t bytes) { std::memcpy(to, from, bytes); }
  /// As the CUDA space's copies in stream order; the host's are done when the call returns.
  static void copy_async(void* to, void const* from, std::size_t bytes, HostStream) { std::memcpy(to, from, bytes); }
  static void copy_from_host_async(void* to, void const* from, std::size_t bytes, HostStream) { std::memcpy(to, from, bytes); }
  static void copy_to_host_async(void* to, void const* from, std::size_t bytes, HostStream) { std::memcpy(to, from, bytes); }
  static void fill_async(void* p, int byte, std::size_t bytes, HostStream) { std::memset(p, byte, bytes); }
  static void fill(void* p, int byte, std::size_t bytes) { std::memset(p, byte, bytes); }
};

/// A point in a stream's work that the host can query without waiting. A point that was never recorded counts as reached.
template <class Space>
class Fence;

template <>
class Fence<space::host> {
 public:
  void record(HostStream) {}
  bool done() const { return true; }
};

/// One T that the work of a space writes and the host reads at any time.
template <class T, class Space>
class HostVisible;

template <class T>
class HostVisible<T, space::host> {
 public:
  T* get() { return &value_; }

 private:
  T value_{};
};

/// Host memory of n values of T that a space's asynchronous copies read and write. Zero at construction.
template <class T, class Space>
class HostArray;

template <class T>
class HostArray<T, space::host> {
 public:
  explicit HostArray(std::size_t n) : values_(n) {}
  T* data() { return values_.data(); }
  std::size_t size() const { return values_.size(); }

 private:
  std::vector<T> values_;
};

}  // namespace moe
