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

#include "moe/experts/hopper/common/enqueue.cuh"
#include "moe/experts/hopper/common/problem.hpp"
#include "moe/experts/hopper/contiguous_layer.hpp"
#include "tests/gpu/typed_memory.cuh"

namespace moe_test {

using moe::hopper::is_row_scaled;
using moe::hopper::is_scaled;
using moe::hopper::LocalShape;
using moe::hopper::Scheme;

/// Features of a layer besides the plain SwiGLU of its scheme.
struct Features {
  moe::hopper::LayerOptions options{};
  bool bias = false;
  bool interleaved = false;
  bool tensor_scales = false;
  bool quantized_x = false;  ///< fp8_block: x is given as codes with scales; fp8_row and int8_row: always
};

struct ReferenceArgs {
  LocalShape shape;
  Scheme scheme;
  Features features;
  float const* x_scales;
  float const* w13_bias;
  float const* w2_bias;
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
    case Scheme::int8_row: return static_cast<float>(static_cast<std::int8_t const*>(data)[i]);
    default: return static_cast<float>(static_cast<__nv_fp8_e4m3 const*>(data)[i]);
  }
}

__device__ inline float warp_sum(float v) {
  for (int offset = 16; offset > 0; offset /= 2) v += __shfl_xor_sync(0xFFFFFFFFu, v, offset);
  return v;
}

/// Weight element of [experts, rows, columns] with its scale.
__device__ inline float weight(ReferenceArgs const& a, bool second, long long expert, long long row, int column, int rows, int columns) {
  float const v = load(a.scheme, second ? a.w2 : a.w13, (expert * rows + row) * columns + column);
  float const* const scales = second ? a.w2_scales : a.w13_scales;
  if (is_row_scaled(a.scheme)) return v * scales[a.features.tensor_scales ? expert : expert * rows + row];
  if (a.scheme != Scheme::fp8_block) return v;
  int const blocks = (columns + 127) / 128;
  return v * scales[(expert * ((rows + 127) / 128) + row / 128) * blocks + column / 128];
}

__device__ inline float int8_code(float v, float scale) { return rintf(fminf(fmaxf(v / scale, -127.0F), 127.0F)); }
__device__ inline float dequantized(Scheme scheme, float v, float scale) {
  return (scheme == Scheme::int8_row ? int8_code(v, scale) : static_cast<float>(__nv_fp8_e4m3(v / scale))) * scale;
}
/// The largest magnitude of a code.
__device__ inline float most_code(Scheme scheme) { return scheme == Scheme::int8_row ? 127.0F : 448.0F; }

/// Rounds `count` values at `row` to codes as the scheme does, by one warp per group of 128, or by warp 0 for the row; no barrier.
__device__ inline void quantize_values(ReferenceArgs const& a, float* row, int count) {
  int const warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  bool const block = a.scheme == Scheme::fp8_block;
  int const group = block ? 128 : count;
  for (int first = warp * group; first < count; first += warps * group) {
    int const end = min(count, first + group);
    float amax = 0;
    for (int i = first + lane; i < end; i += 32) {
      // fp8_row: rows are stored in 16 bits before their amax is known.
      if (a.scheme == Scheme::fp8_row) row[i] = __bfloat162float(__float2bfloat16_rn(row[i]));
      amax = fmaxf(amax, fabsf(row[i]));
    }
    for (int offset = 16; offset > 0; offset /= 2) amax = fmaxf(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, offset));
    float scale = fmaxf(fminf(amax, a.features.options.amax_bound) / most_code(a.scheme), a.features.options.scale_floor);
    if (!block && a.features.options.static_scale > 0) scale = a.features.options.static_scale;
    for (int i = first + lane; i < end; i += 32) row[i] = dequantized(a.scheme, row[i], scale);
  }
}

/// One block per (sampled slot); dynamic shared memory holds the row of x.
__global__ void reference_gemm1(ReferenceArgs const a) {
  extern __shared__ float row[];
  int const k = a.shape.topk;
  int const sample = static_cast<int>(blockIdx.x) / k;
  long long const token = a.tokens[sample];
  int const expert = a.ids[token * k + blockIdx.x % k];
  if (static_cast<unsigned>(expert) >= static_cast<unsigned>(a.shape.num_experts)) return;
  int const hidden = a.shape.hidden;
  int const inter = a.shape.intermediate;
  int const warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  bool const scaled = is_scaled(a.scheme);
  for (int i = threadIdx.x; i < hidden; i += blockDim.x) {
    bool const codes = scaled && (a.x_scales != nullptr || is_row_scaled(a.scheme));
    row[i] = load(scaled && !codes ? Scheme::bf16 : a.scheme, a.x, token * hidden + i);
    if (codes) {
      row[i] *= a.scheme == Scheme::fp8_block ? a.x_scales[token * ((hidden + 127) / 128) + i / 128]
                : a.x_scales != nullptr       ? a.x_scales[token]
                                              : a.features.options.static_scale;
    }
  }
  __syncthreads();
  if (a.scheme == Scheme::fp8_block && a.x_scales == nullptr) {
    quantize_values(a, row, hidden);
    __syncthreads();
  }
  bool const gated = moe::activation::gated(a.features.options.activation);
  int const rows = gated ? 2 * inter : inter;
  float const factor = a.features.options.weight_on_input ? a.weights[token * k + blockIdx.x % k] : 1.0F;
  for (int i = warp; i < inter; i += warps) {
    int const gate_row = a.features.interleaved ? 2 * i : i;
    int const up_row = a.features.interleaved ? 2 * i + 1 : inter + i;
    float gate = 0, up = 0;
    for (int h = lane; h < hidden; h += 32) {
      gate += row[h] * weight(a, false, expert, gate_row, h, rows, hidden);
      if (gated) up += row[h] * weight(a, false, expert, up_row, h, rows, hidden);
    }
    gate = warp_sum(gate) * factor;
    up = warp_sum(up) * factor;
    if (a.w13_bias != nullptr) {
      gate += a.w13_bias[static_cast<long long>(expert) * rows + gate_row];
      if (gated) up += a.w13_bias[static_cast<long long>(expert) * rows + up_row];
    }
    if (lane == 0) {
      a.inter[static_cast<long long>(blockIdx.x) * inter + i] =
          moe::activation::apply(a.features.options.activation, a.features.options.constants, gate, up);
    }
  }
}

/// One block per sampled token.
__global__ void reference_gemm2(ReferenceArgs const a) {
  int const k = a.shape.topk;
  long long const token = a.tokens[blockIdx.x];
  int const hidden = a.shape.hidden;
  int const inter = a.shape.intermediate;
  int const warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  float* const rows = a.inter + static_cast<long long>(blockIdx.x) * k * inter;
  if (is_scaled(a.scheme)) {
    for (int j = 0; j < k; ++j) quantize_values(a, rows + static_cast<long long>(j) * inter, inter);
    __syncthreads();
  }
  for (int h = blockIdx.y * warps + warp; h < hidden; h += warps * gridDim.y) {
    float sum = 0;
    for (int j = 0; j < k; ++j) {
      int const expert = a.ids[token * k + j];
      if (static_cast<unsigned>(expert) >= static_cast<unsigned>(a.shape.num_experts)) continue;
      float dot = 0;
      for (int i = lane; i < inter; i += 32)
        dot += rows[static_cast<long long>(j) * inter + i] * weight(a, true, expert, h, i, hidden, inter);
      dot = warp_sum(dot) + (a.w2_bias != nullptr ? a.w2_bias[static_cast<long long>(expert) * hidden + h] : 0.0F);
      sum += a.features.options.weight_on_input ? dot : dot * a.weights[token * k + j];
    }
    if (lane == 0) a.out[static_cast<long long>(blockIdx.x) * hidden + h] = sum;
  }
}

/// bf16 rows → e4m3 or int8 codes with a scale per 128 values (`group`) or per row (0), or under a scale given (static_scale over 0). A
/// warp a group.
__global__ void quantize_x(Scheme scheme, __nv_bfloat16 const* x, int tokens, int hidden, int group, float static_scale, char* codes,
                           float* scales) {
  int const lane = threadIdx.x % 32;
  int const width = group == 0 ? hidden : group;
  int const groups = (hidden + width - 1) / width;
  for (int task = (blockIdx.x * blockDim.x + threadIdx.x) / 32; task < tokens * groups; task += gridDim.x * blockDim.x / 32) {
    long long const row = static_cast<long long>(task / groups) * hidden;
    int const first = task % groups * width;
    int const end = min(hidden, first + width);
    float amax = 0;
    for (int i = first + lane; i < end; i += 32) amax = fmaxf(amax, fabsf(__bfloat162float(x[row + i])));
    for (int offset = 16; offset > 0; offset /= 2) amax = fmaxf(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, offset));
    float const scale = static_scale > 0 ? static_scale : fmaxf(amax, 1e-10F) / most_code(scheme);
    for (int i = first + lane; i < end; i += 32) {
      float const v = __bfloat162float(x[row + i]);
      codes[row + i] = scheme == Scheme::int8_row ? static_cast<char>(static_cast<std::int8_t>(int8_code(v, scale)))
                                                  : static_cast<char>(__nv_fp8_e4m3(v / scale).__x);
    }
    if (lane == 0) scales[task] = scale;
  }
}

/// How slots choose experts.
enum class Pattern { random, one_expert, some_missing, all_missing, few_experts };

inline std::vector<std::int32_t> make_ids(LocalShape const& s, int tokens, Pattern pattern, std::uint64_t seed) {
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
  LocalShape shape;
  Scheme scheme;
  int tokens;
  Features features;
  TypedMemory<char> x, w13, w2;
  TypedMemory<float> x_scales, w13_scales, w2_scales, w13_bias, w2_bias, weights;
  TypedMemory<std::int32_t> ids;

  Problem(LocalShape s, Scheme scheme_, int tokens_, Pattern pattern, std::uint64_t seed, Features const& features_ = {})
      : shape(s), scheme(scheme_), tokens(tokens_), features(features_) {
    bool const scaled = is_scaled(scheme);
    std::size_t const rows13 = std::size_t(moe::activation::gated(features.options.activation) ? 2 : 1) * s.intermediate;
    std::size_t const e13 = s.num_experts * rows13 * s.hidden;
    std::size_t const e2 = std::size_t(s.num_experts) * s.intermediate * s.hidden;
    std::size_t const element = moe::hopper::element_bytes(scheme);
    w13 = TypedMemory<char>(e13 * element);
    w2 = TypedMemory<char>(e2 * element);
    x = TypedMemory<char>(std::size_t(tokens) * s.hidden * 2);
    weights = TypedMemory<float>(std::size_t(tokens) * s.topk);
    ids = TypedMemory<std::int32_t>(std::size_t(tokens) * s.topk);
    float const in_sigma = 1.0F / std::sqrt(float(s.hidden)), mid_sigma = 1.0F / std::sqrt(float(s.intermediate));
    if (scaled) {
      if (scheme == Scheme::int8_row) {
        normal<std::int8_t>(w13, e13, seed + 1, 40.0F);
        normal<std::int8_t>(w2, e2, seed + 2, 40.0F);
      } else {
        normal<__nv_fp8_e4m3>(w13, e13, seed + 1, 100.0F);
        normal<__nv_fp8_e4m3>(w2, e2, seed + 2, 100.0F);
      }
      float const of_code = scheme == Scheme::int8_row ? 2.5F : 1.0F;  // weights of the same size
      auto const count = [&](std::size_t rows, int columns) {
        std::size_t const block = (rows + 127) / 128 * std::size_t((columns + 127) / 128);
        return s.num_experts * (scheme == Scheme::fp8_block ? block : features.tensor_scales ? 1 : rows);
      };
      w13_scales = TypedMemory<float>(count(rows13, s.hidden));
      w2_scales = TypedMemory<float>(count(s.hidden, s.intermediate));
      fill_positive<<<256, 256>>>(w13_scales.data(), w13_scales.size(), seed + 3, 0.005F * of_code * in_sigma, 0.015F * of_code * in_sigma);
      fill_positive<<<256, 256>>>(w2_scales.data(), w2_scales.size(), seed + 4, 0.005F * of_code * mid_sigma, 0.015F * of_code * mid_sigma);
      normal<__nv_bfloat16>(x, std::size_t(tokens) * s.hidden, seed + 5, 1.0F);
      if (is_row_scaled(scheme) || features.quantized_x) quantize();
    } else if (scheme == Scheme::bf16) {
      fill16<__nv_bfloat16>(e13, e2, seed, in_sigma, mid_sigma);
    } else {
      fill16<__half>(e13, e2, seed, in_sigma, mid_sigma);
    }
    if (features.bias) {
      w13_bias = TypedMemory<float>(s.num_experts * rows13);
      w2_bias = TypedMemory<float>(std::size_t(s.num_experts) * s.hidden);
      fill_normal<<<256, 256>>>(w13_bias.data(), static_cast<long long>(w13_bias.size()), seed + 8, 0.5F);
      fill_normal<<<256, 256>>>(w2_bias.data(), static_cast<long long>(w2_bias.size()), seed + 9, 0.5F);
    }
    fill_positive<<<256, 256>>>(weights.data(), weights.size(), seed + 6, 0.05F, 1.0F);
    if (tokens > 0) ids.upload(make_ids(s, tokens, pattern, seed + 7));
    moe::check_cuda(cudaDeviceSynchronize(), "random inputs");
  }
  moe::hopper::LayerWeights layer_weights() const {
    return {w13.data(),      w2.data(),      w13_scales.data(),    w2_scales.data(),
            w13_bias.data(), w2_bias.data(), features.interleaved, features.tensor_scales};
  }
  moe::hopper::LayerCall call(void* out) const {
    moe::hopper::LayerCall c{};
    c.x = x.data();
    c.x_scales = x_scales.data();
    c.topk_ids = ids.data();
    c.topk_weights = weights.data();
    c.out = out;
    c.max_tokens = tokens;
    return c;
  }

 private:
  template <class T>
  static void normal(TypedMemory<char> const& to, std::size_t count, std::uint64_t seed, float sigma) {
    fill_normal<<<1024, 256>>>(reinterpret_cast<T*>(to.data()), static_cast<long long>(count), seed, sigma);
  }
  template <class T>
  void fill16(std::size_t e13, std::size_t e2, std::uint64_t seed, float in_sigma, float mid_sigma) {
    normal<T>(w13, e13, seed + 1, in_sigma);
    normal<T>(w2, e2, seed + 2, mid_sigma);
    normal<T>(x, std::size_t(tokens) * shape.hidden, seed + 5, 1.0F);
  }
  void quantize() {
    int const group = scheme == Scheme::fp8_block ? 128 : 0;
    TypedMemory<char> codes(std::size_t(tokens) * shape.hidden);
    TypedMemory<float> scales(std::size_t(tokens) * (group == 0 ? 1 : (shape.hidden + 127) / 128));
    quantize_x<<<256, 256>>>(scheme, reinterpret_cast<__nv_bfloat16*>(x.data()), tokens, shape.hidden, group, features.options.static_scale,
                             codes.data(), scales.data());
    moe::check_cuda(cudaDeviceSynchronize(), "quantize_x");
    x = std::move(codes);
    if (features.options.static_scale <= 0.0F) x_scales = std::move(scales);
  }
};

struct Difference {
  double relative = 0;  ///< ‖out − ref‖ / ‖ref‖; NaN if out has one
  double norm = 0;      ///< ‖ref‖
};

/// The bound for `relative`. In a batch of few tokens one e4m3 code that rounds differently is a large part of the output.
/// bf16 and fp16: rounding of the inputs of the second product and of the slots; int8: of the slots, codes are those of the reference but
/// where a value lies within the error of a float32 sum of the middle between two. fp8 against equally quantised activations; with few
/// values, one e4m3 code of the intermediate that rounds differently is a large error.
inline double tolerance(Scheme scheme, int tokens) { return !moe::hopper::is_fp8(scheme) ? 5e-3 : tokens < 8 ? 4e-2 : 1e-2; }

/// Compares `out` [tokens, H] (bf16, or fp16 for f16) with the reference on the tokens given.
inline Difference compare(Problem const& p, void const* out, std::vector<int> const& tokens) {
  int const count = static_cast<int>(tokens.size());
  TypedMemory<int> device_tokens(count);
  device_tokens.upload(tokens);
  TypedMemory<float> inter(std::size_t(count) * p.shape.topk * p.shape.intermediate), reference(std::size_t(count) * p.shape.hidden);
  inter.fill_bytes(0);
  ReferenceArgs a{
      p.shape,      p.scheme,     p.features,          p.x_scales.data(),  p.w13_bias.data(), p.w2_bias.data(), p.x.data(),
      p.w13.data(), p.w2.data(),  p.w13_scales.data(), p.w2_scales.data(), p.ids.data(),      p.weights.data(), device_tokens.data(),
      count,        inter.data(), reference.data()};
  int const row_bytes = p.shape.hidden * 4;  // of shared memory
  moe::check_cuda(cudaFuncSetAttribute(reference_gemm1, cudaFuncAttributeMaxDynamicSharedMemorySize, row_bytes), "reference");
  reference_gemm1<<<count * p.shape.topk, 512, row_bytes>>>(a);
  moe::check_cuda(cudaGetLastError(), "reference");
  reference_gemm2<<<dim3(count, 1), 1024>>>(a);
  moe::check_cuda(cudaDeviceSynchronize(), "reference");
  std::vector<float> const expected = reference.download();
  std::vector<std::uint16_t> row(p.shape.hidden);
  double error = 0, norm = 0;
  for (int i = 0; i < count; ++i) {
    moe::check_cuda(cudaMemcpy(row.data(), static_cast<char const*>(out) + std::size_t(tokens[i]) * p.shape.hidden * 2, p.shape.hidden * 2,
                               cudaMemcpyDeviceToHost),
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

/// The same on up to `samples` tokens spread over the first `batch` tokens; -1: over all.
inline Difference compare(Problem const& p, void const* out, int samples, int batch = -1) {
  if (batch < 0) batch = p.tokens;
  int const count = std::min(samples, batch);
  if (count == 0) return {};
  std::vector<int> tokens(count);
  for (int i = 0; i < count; ++i) tokens[i] = static_cast<int>(std::int64_t(i) * batch / count);
  tokens[count - 1] = batch - 1;
  return compare(p, out, tokens);
}

}  // namespace moe_test
