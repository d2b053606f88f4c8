// SPDX-License-Identifier: Apache-2.0
// tests/gpu/typed_memory.cuh: device memory of one type, and random values in it.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>
#include <utility>
#include <vector>

#include "moe/experts/hopper/common/enqueue.cuh"

namespace moe_test {

/// Device memory of one type.
template <class T>
class TypedMemory {
 public:
  TypedMemory() = default;
  explicit TypedMemory(std::size_t count) : count_(count) {
    moe::check_cuda(cudaMalloc(&data_, std::max<std::size_t>(count, 64) * sizeof(T)), "cudaMalloc");
  }
  ~TypedMemory() { cudaFree(data_); }
  TypedMemory(TypedMemory&& other) noexcept : data_(other.data_), count_(other.count_) { other.data_ = nullptr; }
  TypedMemory& operator=(TypedMemory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(count_, other.count_);
    return *this;
  }
  T* data() const { return data_; }
  std::size_t size() const { return count_; }
  std::size_t bytes() const { return count_ * sizeof(T); }
  void fill_bytes(int value) const { moe::check_cuda(cudaMemset(data_, value, bytes()), "cudaMemset"); }
  void upload(std::vector<T> const& host) const {
    moe::check_cuda(cudaMemcpy(data_, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  std::vector<T> download() const {
    std::vector<T> host(count_);
    moe::check_cuda(cudaMemcpy(host.data(), data_, bytes(), cudaMemcpyDeviceToHost), "cudaMemcpy");
    return host;
  }

 private:
  T* data_ = nullptr;
  std::size_t count_ = 0;
};

__device__ inline std::uint64_t mix(std::uint64_t z) {
  z += 0x9E3779B97F4A7C15ULL;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
  return z ^ (z >> 31);
}

/// Approximately normal numbers of standard deviation `sigma`.
template <class T>
__global__ void fill_normal(T* data, long long count, std::uint64_t seed, float sigma) {
  for (long long i = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x; i < count;
       i += static_cast<long long>(gridDim.x) * blockDim.x) {
    std::uint64_t const r = mix(seed * 0x632BE59BD9B4E019ULL + static_cast<std::uint64_t>(i));
    float const u = (static_cast<float>(r & 0xFFFFFFu) + 0.5F) / 16777216.0F;
    float const v = static_cast<float>((r >> 24) & 0xFFFFFFu) / 16777216.0F;
    float const value = sigma * sqrtf(-2.0F * logf(u)) * cospif(2.0F * v);
    if constexpr (std::is_same_v<T, float>) {
      data[i] = value;
    } else if constexpr (std::is_same_v<T, __half>) {
      data[i] = __float2half_rn(value);
    } else if constexpr (std::is_same_v<T, __nv_fp8_e4m3>) {
      data[i] = __nv_fp8_e4m3(value);
    } else if constexpr (std::is_same_v<T, std::int8_t>) {
      data[i] = static_cast<std::int8_t>(rintf(fminf(fmaxf(value, -127.0F), 127.0F)));
    } else {
      data[i] = __float2bfloat16_rn(value);
    }
  }
}

__global__ void fill_positive(float* data, long long count, std::uint64_t seed, float low, float high) {
  for (long long i = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x; i < count;
       i += static_cast<long long>(gridDim.x) * blockDim.x) {
    data[i] = low + (high - low) * static_cast<float>(mix(seed + static_cast<std::uint64_t>(i)) & 0xFFFFFFu) / 16777216.0F;
  }
}

}  // namespace moe_test
