// SPDX-License-Identifier: Apache-2.0
// tests/gpu/hopper_reference.cuh: the layer by its definition in float32 on the device, for sampled tokens; random inputs; comparison.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "moe/experts/hopper/problem.hpp"
#include "moe/experts/hopper/tensor_map.cuh"
#include "moe/experts/hopper_contiguous.hpp"

namespace moe_test {

using moe::hopper::LayerShape;
using moe::hopper::Scheme;

/// Device memory of one type.
template <class T>
class DeviceArray {
 public:
  DeviceArray() = default;
  explicit DeviceArray(std::size_t count) : count_(count) {
    moe::hopper::check_cuda(cudaMalloc(&data_, std::max<std::size_t>(count, 64) * sizeof(T)), "cudaMalloc");
  }
  ~DeviceArray() { cudaFree(data_); }
  DeviceArray(DeviceArray&& other) noexcept : data_(other.data_), count_(other.count_) { other.data_ = nullptr; }
  DeviceArray& operator=(DeviceArray&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(count_, other.count_);
    return *this;
  }
  T* data() const { return data_; }
  std::size_t size() const { return count_; }
  std::size_t bytes() const { return count_ * sizeof(T); }
  void fill_bytes(int value) const { moe::hopper::check_cuda(cudaMemset(data_, value, bytes()), "cudaMemset"); }
  void upload(std::vector<T> const& host) const {
    moe::hopper::check_cuda(cudaMemcpy(data_, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  std::vector<T> download() const {
    std::vector<T> host(count_);
    moe::hopper::check_cuda(cudaMemcpy(host.data(), data_, bytes(), cudaMemcpyDeviceToHost), "cudaMemcpy");
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

struct ReferenceArgs {
  LayerShape shape;
  Scheme scheme;
  void const* x;
  void const* w13;
  void const* w2;
  float const* w13_scales;
  float const* w2_scales;
  std::int32_t const* ids;
  float const* weights;
  int const* tokens;  ///< sampled
  int count;
  float* inter;  ///< [count·k, I]
  float* out;    ///< [count, H]
};

__device__ inline float load(Scheme scheme, void const* data, long long i) {
  switch (scheme) {
    case Scheme::bf16: return __bfloat162float(static_cast<__nv_bfloat16 const*>(data)[i]);
    case Scheme::f16: return __half2float(static_cast<__half const*>(data)[i]);
    default: return static_cast<float>(static_cast<__nv_fp8_e4m3 const*>(data)[i]);
  }
}

__device__ inline float warp_sum(float v) {
  for (int offset = 16; offset > 0; offset /= 2) v += __shfl_xor_sync(0xFFFFFFFFu, v, offset);
  return v;
}

/// Weight element of [depth, rows, columns] with its block scale.
__device__ inline float weight(ReferenceArgs const& a, bool second, long long matrix, long long row, int column, int rows, int columns) {
  float const v = load(a.scheme, second ? a.w2 : a.w13, (matrix * rows + row) * columns + column);
  if (a.scheme != Scheme::fp8_block) return v;
  float const* const scales = second ? a.w2_scales : a.w13_scales;
  return v * scales[(matrix * (rows / 128) + row / 128) * (columns / 128) + column / 128];
}

__device__ inline float dequantized(float v, float scale) { return static_cast<float>(__nv_fp8_e4m3(v / scale)) * scale; }

/// One block per (sampled slot); dynamic shared memory holds the row of x.
__global__ void reference_gemm1(ReferenceArgs const a) {
  extern __shared__ float row[];
  int const k = a.shape.topk;
  int const sample = static_cast<int>(blockIdx.x) / k;
  int const token = a.tokens[sample];
  int const expert = a.ids[static_cast<long long>(token) * k + blockIdx.x % k];
  if (static_cast<unsigned>(expert) >= static_cast<unsigned>(a.shape.num_experts)) return;
  int const hidden = a.shape.hidden;
  int const inter = a.shape.intermediate;
  int const warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  bool const fp8 = a.scheme == Scheme::fp8_block;
  for (int i = threadIdx.x; i < hidden; i += blockDim.x)
    row[i] = load(fp8 ? Scheme::bf16 : a.scheme, a.x, static_cast<long long>(token) * hidden + i);
  __syncthreads();
  if (fp8) {
    for (int g = warp; g < hidden / 128; g += warps) {
      float amax = 0;
      for (int i = lane; i < 128; i += 32) amax = fmaxf(amax, fabsf(row[g * 128 + i]));
      for (int offset = 16; offset > 0; offset /= 2) amax = fmaxf(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, offset));
      float const scale = fmaxf(amax, 1e-10F) / 448.0F;
      for (int i = lane; i < 128; i += 32) row[g * 128 + i] = dequantized(row[g * 128 + i], scale);
    }
    __syncthreads();
  }
  for (int i = warp; i < inter; i += warps) {
    float gate = 0, up = 0;
    for (int h = lane; h < hidden; h += 32) {
      gate += row[h] * weight(a, false, expert, i, h, 2 * inter, hidden);
      up += row[h] * weight(a, false, expert, inter + i, h, 2 * inter, hidden);
    }
    gate = warp_sum(gate);
    up = warp_sum(up);
    if (lane == 0) a.inter[static_cast<long long>(blockIdx.x) * inter + i] = gate / (1.0F + expf(-gate)) * up;
  }
}

/// One block per sampled token.
__global__ void reference_gemm2(ReferenceArgs const a) {
  int const k = a.shape.topk;
  int const token = a.tokens[blockIdx.x];
  int const hidden = a.shape.hidden;
  int const inter = a.shape.intermediate;
  int const warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  float* const rows = a.inter + static_cast<long long>(blockIdx.x) * k * inter;
  if (a.scheme == Scheme::fp8_block) {
    for (int g = warp; g < k * inter / 128; g += warps) {
      float amax = 0;
      for (int i = lane; i < 128; i += 32) amax = fmaxf(amax, fabsf(rows[g * 128 + i]));
      for (int offset = 16; offset > 0; offset /= 2) amax = fmaxf(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, offset));
      float const scale = fmaxf(amax, 1e-10F) / 448.0F;
      for (int i = lane; i < 128; i += 32) rows[g * 128 + i] = dequantized(rows[g * 128 + i], scale);
    }
    __syncthreads();
  }
  for (int h = blockIdx.y * warps + warp; h < hidden; h += warps * gridDim.y) {
    float sum = 0;
    for (int j = 0; j < k; ++j) {
      int const expert = a.ids[static_cast<long long>(token) * k + j];
      if (static_cast<unsigned>(expert) >= static_cast<unsigned>(a.shape.num_experts)) continue;
      float dot = 0;
      for (int i = lane; i < inter; i += 32)
        dot += rows[static_cast<long long>(j) * inter + i] * weight(a, true, expert, h, i, hidden, inter);
      sum += warp_sum(dot) * a.weights[static_cast<long long>(token) * k + j];
    }
    if (lane == 0) a.out[static_cast<long long>(blockIdx.x) * hidden + h] = sum;
  }
}

/// How slots choose experts.
enum class Pattern { random, one_expert, some_missing, all_missing, few_experts };

inline std::vector<std::int32_t> make_ids(LayerShape const& s, int tokens, Pattern pattern, std::uint64_t seed) {
  std::mt19937_64 engine(seed);
  std::vector<std::int32_t> ids(static_cast<std::size_t>(tokens) * s.topk);
  std::vector<std::int32_t> pool(s.num_experts);
  for (int e = 0; e < s.num_experts; ++e) pool[e] = e;
  int const used = pattern == Pattern::few_experts ? std::max(s.topk, s.num_experts / 4) : s.num_experts;
  for (int t = 0; t < tokens; ++t) {
    for (int j = 0; j < s.topk; ++j) std::swap(pool[j], pool[j + engine() % (used - j)]);
    for (int j = 0; j < s.topk; ++j) {
      std::int32_t id = pool[j];
      if (pattern == Pattern::one_expert && j == 0) id = s.num_experts - 1;
      if (pattern == Pattern::one_expert && j > 0) id = j - 1;
      if (pattern == Pattern::some_missing && engine() % 3 == 0) id = -1;
      if (pattern == Pattern::all_missing) id = -1;
      ids[static_cast<std::size_t>(t) * s.topk + j] = id;
    }
  }
  return ids;
}

/// One layer's weights and one batch, random.
struct Problem {
  LayerShape shape;
  Scheme scheme;
  int tokens;
  DeviceArray<char> x, w13, w2;
  DeviceArray<float> w13_scales, w2_scales, weights;
  DeviceArray<std::int32_t> ids;

  Problem(LayerShape s, Scheme scheme_, int tokens_, Pattern pattern, std::uint64_t seed) : shape(s), scheme(scheme_), tokens(tokens_) {
    bool const fp8 = moe::hopper::is_fp8(scheme);
    std::size_t const e13 = std::size_t(2) * s.num_experts * s.intermediate * s.hidden;
    std::size_t const e2 = e13 / 2;
    std::size_t const element = fp8 ? 1 : 2;
    w13 = DeviceArray<char>(e13 * element);
    w2 = DeviceArray<char>(e2 * element);
    x = DeviceArray<char>(std::size_t(tokens) * s.hidden * 2);
    weights = DeviceArray<float>(std::size_t(tokens) * s.topk);
    ids = DeviceArray<std::int32_t>(std::size_t(tokens) * s.topk);
    if (fp8) {
      fill_normal<<<1024, 256>>>(reinterpret_cast<__nv_fp8_e4m3*>(w13.data()), e13, seed + 1, 100.0F);
      fill_normal<<<1024, 256>>>(reinterpret_cast<__nv_fp8_e4m3*>(w2.data()), e2, seed + 2, 100.0F);
      w13_scales = DeviceArray<float>(e13 / 16384 + 1);
      w2_scales = DeviceArray<float>(e2 / 16384 + 1);
      float const a = 0.01F / std::sqrt(float(s.hidden)), b = 0.01F / std::sqrt(float(s.intermediate));
      fill_positive<<<256, 256>>>(w13_scales.data(), w13_scales.size(), seed + 3, 0.5F * a, 1.5F * a);
      fill_positive<<<256, 256>>>(w2_scales.data(), w2_scales.size(), seed + 4, 0.5F * b, 1.5F * b);
      fill_normal<<<1024, 256>>>(reinterpret_cast<__nv_bfloat16*>(x.data()), std::int64_t(tokens) * s.hidden, seed + 5, 1.0F);
    } else if (scheme == Scheme::bf16) {
      fill_normal<<<1024, 256>>>(reinterpret_cast<__nv_bfloat16*>(w13.data()), e13, seed + 1, 1.0F / std::sqrt(float(s.hidden)));
      fill_normal<<<1024, 256>>>(reinterpret_cast<__nv_bfloat16*>(w2.data()), e2, seed + 2, 1.0F / std::sqrt(float(s.intermediate)));
      fill_normal<<<1024, 256>>>(reinterpret_cast<__nv_bfloat16*>(x.data()), std::int64_t(tokens) * s.hidden, seed + 5, 1.0F);
    } else {
      fill_normal<<<1024, 256>>>(reinterpret_cast<__half*>(w13.data()), e13, seed + 1, 1.0F / std::sqrt(float(s.hidden)));
      fill_normal<<<1024, 256>>>(reinterpret_cast<__half*>(w2.data()), e2, seed + 2, 1.0F / std::sqrt(float(s.intermediate)));
      fill_normal<<<1024, 256>>>(reinterpret_cast<__half*>(x.data()), std::int64_t(tokens) * s.hidden, seed + 5, 1.0F);
    }
    fill_positive<<<256, 256>>>(weights.data(), weights.size(), seed + 6, 0.05F, 1.0F);
    if (tokens > 0) ids.upload(make_ids(s, tokens, pattern, seed + 7));
    moe::hopper::check_cuda(cudaDeviceSynchronize(), "random inputs");
  }
  moe::hopper::LayerWeights layer_weights() const { return {w13.data(), w2.data(), w13_scales.data(), w2_scales.data()}; }
  moe::hopper::LayerCall call(void* out) const {
    moe::hopper::LayerCall c{};
    c.x = x.data();
    c.topk_ids = ids.data();
    c.topk_weights = weights.data();
    c.out = out;
    c.max_tokens = tokens;
    return c;
  }
};

struct Difference {
  double relative = 0;  ///< ‖out − ref‖ / ‖ref‖; NaN if out has one
  double norm = 0;      ///< ‖ref‖
};

/// Compares `out` [tokens, H] (bf16, or fp16 for f16) with the reference on the tokens given.
inline Difference compare(Problem const& p, void const* out, std::vector<int> const& tokens) {
  int const count = static_cast<int>(tokens.size());
  DeviceArray<int> device_tokens(count);
  device_tokens.upload(tokens);
  DeviceArray<float> inter(std::size_t(count) * p.shape.topk * p.shape.intermediate), reference(std::size_t(count) * p.shape.hidden);
  inter.fill_bytes(0);
  ReferenceArgs a{p.shape,      p.scheme,         p.x.data(),           p.w13.data(), p.w2.data(),  p.w13_scales.data(), p.w2_scales.data(),
                  p.ids.data(), p.weights.data(), device_tokens.data(), count,        inter.data(), reference.data()};
  reference_gemm1<<<count * p.shape.topk, 512, p.shape.hidden * 4>>>(a);
  reference_gemm2<<<dim3(count, 1), 1024>>>(a);
  moe::hopper::check_cuda(cudaDeviceSynchronize(), "reference");
  std::vector<float> const expected = reference.download();
  std::vector<std::uint16_t> row(p.shape.hidden);
  double error = 0, norm = 0;
  for (int i = 0; i < count; ++i) {
    moe::hopper::check_cuda(cudaMemcpy(row.data(), static_cast<char const*>(out) + std::size_t(tokens[i]) * p.shape.hidden * 2,
                                       p.shape.hidden * 2, cudaMemcpyDeviceToHost),
                            "cudaMemcpy");
    for (int h = 0; h < p.shape.hidden; ++h) {
      float value = 0;
      if (p.scheme == Scheme::f16) {
        value = __half2float(__ushort_as_half(row[h]));
      } else {
        std::uint32_t const bits = std::uint32_t(row[h]) << 16;
        std::memcpy(&value, &bits, 4);
      }
      double const r = expected[std::size_t(i) * p.shape.hidden + h];
      error += (value - r) * (value - r);
      norm += r * r;
    }
  }
  return {norm > 0 ? std::sqrt(error / norm) : std::sqrt(error), std::sqrt(norm)};
}

/// The same on up to `samples` tokens spread over the batch.
inline Difference compare(Problem const& p, void const* out, int samples) {
  int const count = std::min(samples, p.tokens);
  if (count == 0) return {};
  std::vector<int> tokens(count);
  for (int i = 0; i < count; ++i) tokens[i] = static_cast<int>(std::int64_t(i) * p.tokens / count);
  tokens[count - 1] = p.tokens - 1;
  return compare(p, out, tokens);
}

}  // namespace moe_test
