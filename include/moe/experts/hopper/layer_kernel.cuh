// SPDX-License-Identifier: Apache-2.0
// experts/hopper/layer_kernel.cuh: both products of one MoE layer in one persistent, warp-specialised kernel.
//
// Warps 0-3 load: warp 0 draws units and streams weights, warps 1-3 gather rows. Warps 4-11 are two consumer warpgroups, each with half of
// a 256-row weight tile. GEMM1 leaves activated rows in `inter`, sorted by expert; a counter per token tile tells GEMM2's loaders when
// they are whole. Nothing waits for a grid-wide barrier, so the tail of GEMM1 is filled with GEMM2.
#pragma once

#include <cstdint>

#include "moe/experts/hopper/epilogue.cuh"
#include "moe/experts/hopper/loaders.cuh"
#include "moe/experts/hopper/mainloop.cuh"

namespace moe::hopper {

namespace detail {

template <Scheme S, int Stages, int MaxRows, int N, class Memory, class Activation>
__device__ inline void consume_unit(LayerParams<Activation> const& p, Memory const& memory, RingState<Stages>& ring, Unit const& unit,
                                    int group) {
  using Traits = SchemeTraits<S>;
  using Layout = SmemLayout<S, Stages, MaxRows>;
  using Output = typename Traits::Output;
  int const thread = thread_index() & 127;
  char* const staging = memory.base + Layout::kStaging + group * Layout::kStagingBytes;
  int* const targets = reinterpret_cast<int*>(memory.base + Layout::kTargets) + group * MaxRows;
  float* const weights = reinterpret_cast<float*>(memory.base + Layout::kWeights) + group * MaxRows;
  int* const flags = reinterpret_cast<int*>(memory.base + Layout::kFlags);

  int target = 0;
  float weight = 0.0F;
  if (unit.phase == 1 && thread < unit.rows) {
    target = p.target_row[unit.first_row + thread];
    weight = p.row_weight[unit.first_row + thread];
  }
  float total[2][N / 2];
  multiply<S, Stages, MaxRows, N>(memory, ring, group, unit.k_count, total);
  if constexpr (MaxRows <= kMaxSplitRows) {
    if (unit.splits > 1 && !sum_splits<N, Traits::kBlock>(p, unit, group, flags, total)) return;
  }
  if constexpr (S == Scheme::fp8_row) apply_row_scales<N>(p, unit, group, total);

  int const feature = unit.feature + 64 * group;
  if (unit.phase == 0) {
    if constexpr (Traits::kBlock) {
#pragma unroll
      for (int i = 0; i < N / 2; ++i) total[0][i] = p.activation(total[0][i], total[1][i]);
      store_quantized<N>(p, unit, total[0], memory.base + Layout::kStaging, staging, group);
    } else {
      Output* const inter = static_cast<Output*>(p.inter) + static_cast<long long>(unit.first_row) * p.intermediate + feature;
      auto const activate = [&](int j) {
        float const* const gate = &total[0][4 * j];
        float const* const up = &total[1][4 * j];
        return make_float4(p.activation(gate[0], up[0]), p.activation(gate[1], up[1]), p.activation(gate[2], up[2]),
                           p.activation(gate[3], up[3]));
      };
      store_rows<Output, N>(activate, staging, group, unit.rows, p.intermediate - feature,
                            [&](int row) { return inter + static_cast<long long>(row) * p.intermediate; });
    }
    if (thread == 0) {  // the barrier at the end of store_rows ordered the other threads' stores before this fence
      __threadfence();
      atomicAdd(p.counters + unit.token_tile, 1);
    }
  } else {
    if (thread < unit.rows) {
      targets[thread] = target;
      weights[thread] = weight;
    }
    group_barrier(group);
    Output* const out = static_cast<Output*>(p.rows_out);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int const column = feature + 128 * half;
      if (column < p.hidden) {
        store_rows<Output, N>([&](int j) { return scale_columns(weights, j, &total[half][4 * j]); }, staging, group, unit.rows,
                              p.hidden - column, [&](int row) { return out + static_cast<long long>(targets[row]) * p.hidden + column; });
      }
    }
  }
}

/// One row per token and no slot for some tokens: their output rows are zero.
template <class Output, class Params>
__device__ inline void zero_missing_rows(Params const& p) {
  int const tokens = p.num_tokens != nullptr ? min(*p.num_tokens, p.max_tokens) : p.max_tokens;
  int const warp = (static_cast<int>(threadIdx.x) - 128) >> 5;
  int const lane = thread_index() & 31;
  for (int token = static_cast<int>(blockIdx.x) * 8 + warp; token < tokens; token += static_cast<int>(gridDim.x) * 8) {
    if (static_cast<unsigned>(p.ids[token]) < static_cast<unsigned>(p.num_experts)) continue;
    uint4* const row = reinterpret_cast<uint4*>(static_cast<Output*>(p.rows_out) + static_cast<long long>(token) * p.hidden);
    for (int i = lane; i < p.hidden / 8; i += 32) row[i] = make_uint4(0, 0, 0, 0);
  }
}

}  // namespace detail

template <Scheme S, int Stages, int MaxRows, class Activation>
__global__ void __launch_bounds__(kLayerThreads, 1) layer_kernel(__grid_constant__ LayerParams<Activation> const p) {
  using Layout = SmemLayout<S, Stages, MaxRows>;
  extern __shared__ char layer_smem[];
  Shared<Layout, Stages> const memory{layer_smem + ((1024u - (smem_address(layer_smem) & 1023u)) & 1023u)};
  int const warp = static_cast<int>(threadIdx.x) >> 5;
  if (threadIdx.x == 0) {
    prefetch_tensor_map(&p.w13);
    prefetch_tensor_map(&p.w2);
    for (int s = 0; s < Stages; ++s) {
      ptx::mbarrier_init(memory.full(s), 1 + 32 * kGatherWarps);
      ptx::mbarrier_init(memory.empty(s), 8);
    }
    for (int s = 0; s < kUnitSlots; ++s) {
      ptx::mbarrier_init(memory.unit_full(s), 1);
      ptx::mbarrier_init(memory.unit_empty(s), kGatherWarps + 8);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    ptx::fence_proxy_async(ptx::space_shared);
  }
  launch_dependents();
  __syncthreads();
  wait_for_dependencies();

  if (warp < 4) {
    give_registers<56>();
    if (warp == 0) {
      if (threadIdx.x == 0) load_weights<S, Stages>(p, memory);
    } else {
      load_rows<S, Stages, MaxRows>(p, memory, warp - 1);
    }
  } else {
    take_registers<224>();
    int const group = (warp >> 2) - 1;
    if (p.standard && p.topk == 1 && p.control->missing > 0) detail::zero_missing_rows<typename SchemeTraits<S>::Output>(p);
    RingState<Stages> ring;
    RingState<kUnitSlots> slot;
    while (true) {
      wait_parity(memory.unit_full(slot.stage), slot.parity);
      Unit const unit = *memory.unit(slot.stage);
      __syncwarp();
      if ((threadIdx.x & 31u) == 0) arrive(memory.unit_empty(slot.stage));
      slot.advance();
      if (unit.phase < 0) break;
      auto const run = [&]<int N>() { detail::consume_unit<S, Stages, MaxRows, N>(p, memory, ring, unit, group); };
      int const rows = unit.rows;
      if (rows <= 8) {
        run.template operator()<8>();
      } else if (rows <= 16) {
        if constexpr (MaxRows >= 16) run.template operator()<16>();
      } else if (rows <= 32) {
        if constexpr (MaxRows >= 32) run.template operator()<32>();
      } else if (rows <= 48) {
        if constexpr (MaxRows >= 48) run.template operator()<48>();
      } else if (rows <= 64) {
        if constexpr (MaxRows >= 64) run.template operator()<64>();
      } else if (rows <= 80) {
        if constexpr (MaxRows >= 80) run.template operator()<80>();
      } else if (rows <= 96) {
        if constexpr (MaxRows >= 96) run.template operator()<96>();
      } else if (rows <= 112) {
        if constexpr (MaxRows >= 112) run.template operator()<112>();
      } else {
        if constexpr (MaxRows >= 128) run.template operator()<128>();
      }
    }
  }
}

/// out[t] = sum over j, in order, of the rows of the slots that were computed; topk > 1. One thread sums 8 columns.
template <class Output>
__global__ void __launch_bounds__(256) reduce_kernel(Output const* rows, std::int32_t const* ids, std::int32_t const* num_tokens,
                                                     int max_tokens, int topk, int num_experts, int hidden, Output* out) {
  launch_dependents();
  wait_for_dependencies();
  int const tokens = num_tokens != nullptr ? min(*num_tokens, max_tokens) : max_tokens;
  int const chunks = hidden / 8;
  long long const total = static_cast<long long>(tokens) * chunks;
  for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < total;
       i += static_cast<long long>(gridDim.x) * blockDim.x) {
    long long const token = i / chunks;
    int const chunk = static_cast<int>(i - token * chunks);
    float sum[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    auto const slot_ids = ids + token * topk;
    auto const slot_rows = reinterpret_cast<uint4 const*>(rows + token * topk * hidden) + chunk;
    for (int j0 = 0; j0 < topk; j0 += 4) {
      uint4 value[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        bool const there =
            j0 + j < topk && static_cast<unsigned>(slot_ids[j0 + j < topk ? j0 + j : 0]) < static_cast<unsigned>(num_experts);
        value[j] = there ? __ldcs(slot_rows + static_cast<long long>(j0 + j) * chunks) : make_uint4(0, 0, 0, 0);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        std::uint32_t const word[4] = {value[j].x, value[j].y, value[j].z, value[j].w};
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          if constexpr (std::is_same_v<Output, __half>) {
            float2 const f = __half22float2(*reinterpret_cast<__half2 const*>(&word[w]));
            sum[2 * w] += f.x;
            sum[2 * w + 1] += f.y;
          } else {
            sum[2 * w] += __uint_as_float(word[w] << 16);
            sum[2 * w + 1] += __uint_as_float(word[w] & 0xFFFF0000u);
          }
        }
      }
    }
    reinterpret_cast<uint4*>(out + token * hidden)[chunk] =
        make_uint4(pack<Output>(sum[0], sum[1]), pack<Output>(sum[2], sum[3]), pack<Output>(sum[4], sum[5]), pack<Output>(sum[6], sum[7]));
  }
}

}  // namespace moe::hopper
