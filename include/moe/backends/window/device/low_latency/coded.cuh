// SPDX-License-Identifier: Apache-2.0
// backends/window/device/low_latency/coded.cuh: expert outputs that travel as e4m3 or LogFMT-10: the expert's rank codes them into the
// window, the reader decodes while it sums. The same codes as combine_format.hpp on the host. docs/semantics/exchange.md §8.2.
#pragma once

#include "moe/backends/window/device/low_latency/combine.cuh"

namespace moe::detail {

/// Codes sixteen bf16 values of a group of 128, which eight neighbouring lanes hold, to `row` at value 16 u; `valid`: the values are part
/// of the row. All 32 lanes must call it.
template <CombineFormat kFormat>
__device__ inline void code_sixteen(uint4 const (&v)[2], char* row, std::uint32_t* headers, int u, bool valid) {
  if constexpr (kFormat == CombineFormat::fp8) {
    float scale;
    uint4 const codes = quantize_sixteen(v, 1e-4F, false, scale);
    if (valid) {
      reinterpret_cast<uint4*>(row)[u] = codes;
      if (u % 8 == 0) {
        headers[u / 8] = __float_as_uint(scale);
      }
    }
  } else {
    std::uint32_t const words[8] = {v[0].x, v[0].y, v[0].z, v[0].w, v[1].x, v[1].y, v[1].z, v[1].w};
    std::uint32_t amax = 0;
    std::uint32_t amin = 0x7fff7fffU;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      std::uint32_t const m = words[i] & 0x7fff7fffU;
      amax = __vmaxu2(amax, m);
      amin = __vminu2(amin, m | (__vcmpeq2(m, 0U) & 0x7fff7fffU));
    }
#pragma unroll
    for (int o = 4; o > 0; o >>= 1) {
      amax = __vmaxu2(amax, __shfl_xor_sync(0xffffffffU, amax, o));
      amin = __vminu2(amin, __shfl_xor_sync(0xffffffffU, amin, o));
    }
    std::uint32_t const header = max(amax & 0xffffU, amax >> 16) | (min(amin & 0xffffU, amin >> 16) << 16);
    LogFmt const code(header);
    if (!valid) {
      return;
    }
    if (u % 8 == 0) {
      headers[u / 8] = header;
    }
    char* const group = row + (u / 8) * kLogFmtGroupBytes;
    if (!code.used()) {
      *reinterpret_cast<uint4*>(group + 16 * (u % 8)) = v[0];
      *reinterpret_cast<uint4*>(group + 128 + 16 * (u % 8)) = v[1];
      return;
    }
    std::uint32_t low[4] = {};
    std::uint32_t high = 0;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      std::uint32_t const bits = (words[i / 2] >> (16 * (i % 2))) & 0xffffU;
      std::uint32_t const c = code.encode(__uint_as_float((bits & 0x7fffU) << 16));
      low[i / 4] |= (c & 0xffU) << (8 * (i % 4));
      high |= ((c >> 8) | ((bits >> 15) << 1)) << (2 * i);
    }
    *reinterpret_cast<uint4*>(group + 16 * (u % 8)) = make_uint4(low[0], low[1], low[2], low[3]);
    *reinterpret_cast<std::uint32_t*>(group + 128 + 4 * (u % 8)) = high;
  }
}

/// acc += weight * the sixteen values at 16 u of a coded row.
template <CombineFormat kFormat>
__device__ inline void accumulate_coded(float (&acc)[16], char const* row, std::uint32_t const* headers, int u, float weight) {
  std::uint32_t const header = comm::detail::load_peer(headers + u / 8);
  if constexpr (kFormat == CombineFormat::fp8) {
    uint4 const codes = comm::detail::load_peer(reinterpret_cast<uint4 const*>(row) + u);
    std::uint32_t const words[4] = {codes.x, codes.y, codes.z, codes.w};
    float const scale = __uint_as_float(header);
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      acc[i] = fmaf(weight, quantization::decode_e4m3(static_cast<std::uint8_t>(words[i / 4] >> (8 * (i % 4)))) * scale, acc[i]);
    }
  } else {
    char const* const group = row + (u / 8) * kLogFmtGroupBytes;
    uint4 const front = comm::detail::load_peer(reinterpret_cast<uint4 const*>(group) + u % 8);
    std::uint32_t const words[4] = {front.x, front.y, front.z, front.w};
    LogFmt const code(header);
    if (code.used()) {
      std::uint32_t const high = comm::detail::load_peer(reinterpret_cast<std::uint32_t const*>(group + 128) + u % 8);
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        std::uint32_t const top = high >> (2 * i);
        float const m = code.decode(((words[i / 4] >> (8 * (i % 4))) & 0xffU) | ((top & 1U) << 8));
        acc[i] = fmaf(weight, (top & 2U) != 0 ? -m : m, acc[i]);
      }
    } else {
      uint4 const back = comm::detail::load_peer(reinterpret_cast<uint4 const*>(group + 128) + u % 8);
      float part[2][8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        part[0][i] = acc[i];
        part[1][i] = acc[8 + i];
      }
      accumulate_eight(part[0], front, weight);
      accumulate_eight(part[1], back, weight);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        acc[i] = part[0][i];
        acc[8 + i] = part[1][i];
      }
    }
  }
}

template <CombineFormat kFormat, bool kPerRank>
__global__ void __launch_bounds__(kLowLatencyThreads, 1) low_latency_combine_coded(LowLatencyCombine const __grid_constant__ a) {
  combine_with<kPerRank, true>(a, [&](int t, int from, int values, CombineTerms const& terms) {
    uint4* const out = reinterpret_cast<uint4*>(a.out + t * a.out_stride + from);
    for (int u = static_cast<int>(threadIdx.x); u < values / 16; u += kLowLatencyThreads) {
      float acc[16] = {};
#pragma unroll 4
      for (int i = 0; i < terms.count; ++i) {
        accumulate_coded<kFormat>(acc, terms.row[i], terms.headers[i], from / 16 + u, terms.weight[i]);
      }
      float half[2][8];
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        half[i / 8][i % 8] = acc[i];
      }
      out[2 * u] = round_eight(half[0]);
      out[2 * u + 1] = round_eight(half[1]);
    }
  });
}

/// Converts the valid rows of every expert's batch to outputs(parity), coded or rounded to bf16. Blocks are distributed over the experts.
struct LowLatencyOutputs : LowLatencyKernelParams {
  int batches = 1;  ///< of `capacity` rows: one for each local expert, or one
  int parity = 0;
  void const* y = nullptr;            ///< [batches][C][H] bf16, or float
  std::int32_t const* num = nullptr;  ///< [batches]
};

/// Sixteen values at 16 u of a row, as bf16.
template <class T>
__device__ inline void read_sixteen(T const* row, int u, uint4 (&v)[2]) {
  if constexpr (sizeof(T) == 2) {
    v[0] = reinterpret_cast<uint4 const*>(row)[2 * u];
    v[1] = reinterpret_cast<uint4 const*>(row)[2 * u + 1];
  } else {
    float f[2][8];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      f[i / 8][i % 8] = row[16 * u + i];
    }
    v[0] = round_eight(f[0]);
    v[1] = round_eight(f[1]);
  }
}

template <CombineFormat kFormat, class T>
__global__ void __launch_bounds__(256) low_latency_outputs(LowLatencyOutputs const __grid_constant__ a) {
  using namespace comm::detail;
  begin_dependent_kernel();
  int const le = static_cast<int>(blockIdx.x) % a.batches;
  int const step = static_cast<int>(gridDim.x) / a.batches;
  int const lane = static_cast<int>(threadIdx.x) % 32;
  int const sixteens = a.hidden / 16;
  for (int i = static_cast<int>(blockIdx.x) / a.batches; i < a.num[le]; i += step) {
    std::size_t const row = static_cast<std::size_t>(le) * a.capacity + i;
    char* const to = own<char>(a.window, a.at.outputs[a.parity]) + row * a.at.output_bytes;
    for (int u0 = static_cast<int>(threadIdx.x) - lane; u0 < sixteens; u0 += static_cast<int>(blockDim.x)) {
      int const u = u0 + lane;
      uint4 v[2] = {};
      if (u < sixteens) {
        read_sixteen(static_cast<T const*>(a.y) + row * a.hidden, u, v);
      }
      if constexpr (kFormat == CombineFormat::plain) {
        if (u < sixteens) {
          reinterpret_cast<uint4*>(to)[2 * u] = v[0];
          reinterpret_cast<uint4*>(to)[2 * u + 1] = v[1];
        }
      } else {
        std::uint32_t* const headers = own<std::uint32_t>(a.window, a.at.headers[a.parity]) + row * ((a.hidden + 127) / 128);
        code_sixteen<kFormat>(v, to, headers, u, u < sixteens);
      }
    }
  }
}

/// Per-rank layout: weights and sums the expert outputs of one received row over this rank's choices, in choice order, into the row that
/// its source reads. Blocks take rows in turn.
struct LowLatencyReduce : LowLatencyKernelParams {
  int parity = 0;
  void const* y = nullptr;  ///< [L*C][H] expert outputs, bf16 or float
};

template <CombineFormat kFormat, class T>
__global__ void __launch_bounds__(256) low_latency_reduce(LowLatencyReduce const __grid_constant__ a) {
  using namespace comm::detail;
  comm::WindowView const& w = a.window;
  begin_dependent_kernel();
  int const K = a.topk;
  int const lane = static_cast<int>(threadIdx.x) % 32;
  int const sixteens = a.hidden / 16;
  std::uint32_t const round = *own<std::uint32_t>(w, a.at.round_of[a.parity]);
  std::uint32_t const* const present = own<std::uint32_t>(w, a.at.present[a.parity]);
  for (int row = static_cast<int>(blockIdx.x); row < w.size * a.max_tokens; row += static_cast<int>(gridDim.x)) {
    if (present[row] != round) {
      continue;  // the token has no choice on this rank
    }
    std::int32_t const* const record = own<std::int32_t>(w, a.at.choices[a.parity]) + static_cast<std::size_t>(row) * 2 * K;
    float const* const weight = reinterpret_cast<float const*>(record + K);
    char* const to = own<char>(w, a.at.outputs[a.parity]) + static_cast<std::size_t>(row) * a.at.output_bytes;
    for (int u0 = static_cast<int>(threadIdx.x) - lane; u0 < sixteens; u0 += static_cast<int>(blockDim.x)) {
      int const u = u0 + lane;
      float acc[2][8] = {};
      for (int j = 0; j < K && u < sixteens; ++j) {
        if (int const s = record[j]; s >= 0) {
          T const* const y = static_cast<T const*>(a.y) + static_cast<std::size_t>(s) * a.hidden;
          float const by = a.weight_on_input ? 1.0F : weight[j];
          if constexpr (sizeof(T) == 2) {
            accumulate_eight(acc[0], reinterpret_cast<uint4 const*>(y)[2 * u], by);
            accumulate_eight(acc[1], reinterpret_cast<uint4 const*>(y)[2 * u + 1], by);
          } else {
#pragma unroll
            for (int i = 0; i < 16; ++i) {
              acc[i / 8][i % 8] = fmaf(by, y[16 * u + i], acc[i / 8][i % 8]);
            }
          }
        }
      }
      uint4 const v[2] = {round_eight(acc[0]), round_eight(acc[1])};
      if constexpr (kFormat == CombineFormat::plain) {
        if (u < sixteens) {
          reinterpret_cast<uint4*>(to)[2 * u] = v[0];
          reinterpret_cast<uint4*>(to)[2 * u + 1] = v[1];
        }
      } else {
        std::uint32_t* const headers =
            own<std::uint32_t>(w, a.at.headers[a.parity]) + static_cast<std::size_t>(row) * ((a.hidden + 127) / 128);
        code_sixteen<kFormat>(v, to, headers, u, u < sixteens);
      }
    }
  }
}

/// Per-rank layout in standard format: local ids and weights of every row [R*T][k]; missing rows have no expert.
struct LowLatencyRankMajor : LowLatencyKernelParams {
  int parity = 0;
  std::int32_t* ids = nullptr;
  float* weights = nullptr;
};

static __global__ void __launch_bounds__(256) low_latency_rank_major(LowLatencyRankMajor const __grid_constant__ a) {
  using namespace comm::detail;
  comm::WindowView const& w = a.window;
  begin_dependent_kernel();
  int const K = a.topk;
  std::uint32_t const round = *own<std::uint32_t>(w, a.at.round_of[a.parity]);
  std::uint32_t const* const present = own<std::uint32_t>(w, a.at.present[a.parity]);
  std::int32_t const* const choices = own<std::int32_t>(w, a.at.choices[a.parity]);
  int const n = w.size * a.max_tokens * K;
  for (int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x); i < n; i += static_cast<int>(gridDim.x * blockDim.x)) {
    int const row = i / K;
    int const j = i % K;
    std::int32_t const* const choice = choices + static_cast<std::size_t>(row) * 2 * K;
    int const position = present[row] == round ? choice[j] : -1;
    a.ids[i] = position < 0 ? -1 : position / a.capacity;
    a.weights[i] = position < 0 ? 0.0F : __int_as_float(choice[K + j]);
  }
}

}  // namespace moe::detail
