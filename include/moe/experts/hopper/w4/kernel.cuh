// SPDX-License-Identifier: Apache-2.0
// experts/hopper/w4/kernel.cuh: both products of one MoE layer with 4-bit weights in one persistent, warp-specialised kernel.
//
// Consumer warpgroups hold the weight rows of their bricks as wgmma's A operand in registers, converted from codes while the product
// before runs; the token rows are B in shared memory. One producer warp draws units and copies bricks, three gather rows. GEMM1 leaves
// activated rows in `inter`, sorted by expert; a counter per token tile tells GEMM2's loaders when they are whole. Four warpgroups where
// rows are few and converting is the work, two where the products are.
#pragma once

#include <cstdint>

#include "moe/core/ptx/mma.cuh"
#include "moe/core/ptx/wgmma_registers.cuh"
#include "moe/experts/hopper/common/reduce.cuh"
#include "moe/experts/hopper/w4/brick_registers.cuh"
#include "moe/experts/hopper/w4/epilogue.cuh"
#include "moe/experts/hopper/w4/layout.cuh"

namespace moe::hopper::w4 {

/// One thread: draws units, announces each, and copies its bricks. Weights depend on nothing, so it runs ahead of the rows.
template <class L>
__device__ void load_weights(Params const& p, Memory<L> const& memory) {
  Control const control = *memory.control();
  std::uint64_t const once = policy_evict_first();
  std::uint64_t const again = policy_evict_normal();
  RingState<L::kStages> ring;
  RingState<kUnitSlots> slot;
  int number = static_cast<int>(blockIdx.x);
  while (true) {
    Unit const unit = decode_unit(p.space, control, p.tiles, number, 1, 0);
    if (unit.phase >= 0) number = atomicAdd(p.next_unit, 1);
    wait_parity(memory.unit_empty(slot.stage), slot.parity ^ 1u);
    *memory.unit(slot.stage) = unit;
    arrive(memory.unit_full(slot.stage));
    slot.advance();
    if (unit.phase < 0) return;
    Span const span = span_of(p, unit);
    bool const first = unit.phase == 0;
    long long const steps = first ? p.steps[0] : p.steps[1];
    long long const matrix = steps * (first ? p.bricks[0] : p.bricks[1]);
    int const step_bytes = span.side * L::kBrickBytes;
    std::uint8_t const* from =
        (first ? p.weights[0] : p.weights[1]) +
        (matrix * unit.expert + steps * span.first + static_cast<long long>(span.k_begin) * span.side) * L::kBrickBytes;
    std::uint64_t const policy = unit.shared != 0 ? again : once;
    for (int k = 0; k < span.k_count; k += L::kDepth) {
      int const bytes = min(L::kDepth, span.k_count - k) * step_bytes;
      wait_parity(memory.empty(ring.stage), ring.parity ^ 1u);
      ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared, memory.full(ring.stage),
                                     static_cast<std::uint32_t>(bytes));
      bulk_load(memory.bricks(ring.stage), from, static_cast<std::uint32_t>(bytes), memory.full(ring.stage), policy);
      from += bytes;
      ring.advance();
    }
  }
}

/// Three warps: rows of x by token in phase 0, rows of the intermediate in phase 1 once all their columns are there. Eight lanes fetch
/// the 128 bytes of a row, in the 128-byte swizzle that wgmma reads.
template <int MaxRows, class L>
__device__ void load_rows(Params const& p, Memory<L> const& memory, int gather_warp) {
  constexpr int kFetches = (MaxRows / 4 + kGatherWarps - 1) / kGatherWarps;  // of 4 rows, per warp
  int const lane = thread_index() & 31;
  int const first_row = 4 * gather_warp + (lane >> 3);
  int const chunk = lane & 7;
  // Rows of this lane are an odd multiple of 4 apart, so they alternate between two places in the swizzle.
  std::uint32_t const even = static_cast<std::uint32_t>(first_row * 128 + ((chunk ^ (first_row & 7)) << 4));
  std::uint32_t const odd = static_cast<std::uint32_t>(first_row * 128 + ((chunk ^ ((first_row + 4) & 7)) << 4));
  RingState<L::kStages> ring;
  RingState<kUnitSlots> slot;
  while (true) {
    Unit const unit = next_unit(memory, slot);
    __syncwarp();
    if (unit.phase < 0) return;
    Span const span = span_of(p, unit);
    bool const first = unit.phase == 0;
    long long const width = 2 * (first ? p.x_stride : p.intermediate);
    char const* const base = static_cast<char const*>(first ? p.x : p.inter) + chunk * 16 + span.k_begin * 128;
    int const mine = (unit.rows - first_row + 4 * kGatherWarps - 1) / (4 * kGatherWarps);  // rows of this lane
    char const* source[kFetches];
#pragma unroll
    for (int g = 0; g < kFetches; ++g) {
      int const row = unit.first_row + first_row + 4 * kGatherWarps * g;
      source[g] = g < mine ? base + (first ? input_row(p, p.sorted_rows[row].slot) : row) * width : nullptr;
    }
    if (!first) {
      if (lane == 0) {
        int const target = L::kGroups * p.space.weight_tiles[0];
        std::uint32_t spin = 0;
        while (load_acquire_gpu(p.counters + unit.token_tile) < target) {
          __nanosleep(64);
          if (++spin > 40'000'000u) __trap();
        }
      }
      __syncwarp();
    }
    for (int k = 0; k < span.k_count; k += L::kDepth) {
      wait_parity(memory.empty(ring.stage), ring.parity ^ 1u);
#pragma unroll
      for (int d = 0; d < L::kDepth; ++d) {
        if (k + d >= span.k_count) break;
        std::uint32_t const target = smem_address(memory.rows(ring.stage) + d * L::kRowBytes);
#pragma unroll
        for (int g = 0; g < kFetches; ++g) {
          if (g < mine)
            cp_async_16(target + ((g & 1) != 0 ? odd : even) + static_cast<std::uint32_t>(g * 4 * kGatherWarps * 128), source[g]);
          source[g] += 128;
        }
      }
      cp_async_arrive(memory.full(ring.stage));
      ring.advance();
    }
  }
}

/// Every lane releases what it has read.
template <class L>
__device__ inline void release(Memory<L> const& memory, int stage) {
  arrive(memory.empty(stage));
  __syncwarp();
}

/// Passes over a unit in which this warpgroup has no weight rows.
template <class L>
__device__ inline void skip(Memory<L> const& memory, RingState<L::kStages>& ring, int k_count) {
  for (int k = 0; k < k_count; k += L::kDepth) {
    wait_parity(memory.full(ring.stage), ring.parity);
    release(memory, ring.stage);
    ring.advance();
  }
}

/// total += the warpgroup's brick rows times 8 or 16 activation rows, over the unit's part of K, by the warps' own products: they take
/// fewer cycles and instructions than a warpgroup's do for so few rows.
template <W4Scheme S, class L, int N>
__device__ inline void multiply_few(Memory<L> const& memory, RingState<L::kStages>& ring, int group, Span const& span,
                                    float (&total)[N / 2]) {
  static_assert(N == 8 || N == 16);
  constexpr bool kScaled = S != W4Scheme::mxfp4;
  constexpr int kLoads = N / 4;  // of four matrices, for a brick: with 8 rows two steps at a time, else one
  int const thread = thread_index() & 127;
  int const lane = thread & 31;
  int const row = N == 8 ? lane & 7 : (lane & 7) + 8 * (lane >> 4);
  int const chunk = N == 8 ? lane >> 3 : (lane >> 3) & 1;
  std::uint32_t const lane_rows = static_cast<std::uint32_t>(row * 128 + ((chunk ^ (row & 7)) << 4));
  auto const compute = [&](BrickRegisters<S> const& brick, std::uint32_t rows) {
    std::uint32_t b[kLoads][4];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) load_matrix_x4(b[i], rows ^ static_cast<std::uint32_t>(i * (128 / kLoads)));
    [[maybe_unused]] float part[kScaled ? N / 2 : 1] = {};
    std::uint32_t a[16];
    brick.template convert<0, 4>(a);
#pragma unroll
    for (int q = 0; q < 4; ++q) {
#pragma unroll
      for (int j = 0; j < N / 8; ++j) {
        std::uint32_t const(&from)[4] = b[N == 8 ? q / 2 : q];
        int const at = N == 8 ? 2 * (q & 1) : 2 * j;
        std::uint32_t const values[4] = {a[4 * q], a[4 * q + 1], a[4 * q + 2], a[4 * q + 3]};
        mma_bf16((kScaled ? part : total) + 4 * j, values, from[at], from[at + 1]);
      }
    }
    if constexpr (kScaled) {
      float2 const scale = brick.sum_scales();
#pragma unroll
      for (int j = 0; j < N / 8; ++j) {
        total[4 * j] = fmaf(part[4 * j], scale.x, total[4 * j]);
        total[4 * j + 1] = fmaf(part[4 * j + 1], scale.x, total[4 * j + 1]);
        total[4 * j + 2] = fmaf(part[4 * j + 2], scale.y, total[4 * j + 2]);
        total[4 * j + 3] = fmaf(part[4 * j + 3], scale.y, total[4 * j + 3]);
      }
    }
  };
  for (int k = 0; k < span.k_count; k += L::kDepth) {
    wait_parity(memory.full(ring.stage), ring.parity);
    std::uint32_t const rows = smem_address(memory.rows(ring.stage)) + lane_rows;
    std::uint32_t const bricks = smem_address(memory.bricks(ring.stage)) + static_cast<std::uint32_t>(group * L::kBrickBytes);
    std::uint32_t const step_bytes = static_cast<std::uint32_t>(span.side * L::kBrickBytes);
    int const deep = min(L::kDepth, span.k_count - k);
    if (deep == L::kDepth) {
      BrickRegisters<S> brick[2];
      brick[0].load(bricks, thread);
#pragma unroll
      for (int d = 0; d < L::kDepth; ++d) {
        if (d + 1 < L::kDepth) brick[(d + 1) & 1].load(bricks + static_cast<std::uint32_t>(d + 1) * step_bytes, thread);
        compute(brick[d & 1], rows + static_cast<std::uint32_t>(d * L::kRowBytes));
      }
    } else {
      for (int d = 0; d < deep; ++d) {
        BrickRegisters<S> brick;
        brick.load(bricks + static_cast<std::uint32_t>(d) * step_bytes, thread);
        compute(brick, rows + static_cast<std::uint32_t>(d * L::kRowBytes));
      }
    }
    release(memory, ring.stage);
    ring.advance();
  }
}

/// total[b] += the warpgroup's brick rows b times the N activation rows, over the unit's part of K. Of few rows, a brick is converted while
/// the products of the brick before run; else the registers are needed for sums, and one warpgroup converts while another multiplies.
template <W4Scheme S, class L, int N>
__device__ inline void multiply(Memory<L> const& memory, RingState<L::kStages>& ring, int group, Span const& span,
                                float (&total)[L::kBricks][N / 2]) {
  constexpr bool kScaled = S != W4Scheme::mxfp4;
  constexpr bool kOverlap = N <= (kScaled ? 16 : 32) && L::kBricks == 1;
  int const thread = thread_index() & 127;
  [[maybe_unused]] float part[2][kScaled ? N / 2 : 1];
  [[maybe_unused]] std::uint32_t scales[2] = {0, 0};
  if constexpr (kScaled) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) part[0][i] = part[1][i] = 0.0F;
  }
  auto const add = [&](int slot, float (&sum)[N / 2]) {
    if constexpr (kScaled) {
      float2 const scale = __half22float2(*reinterpret_cast<__half2 const*>(&scales[slot]));
#pragma unroll
      for (int j = 0; j < N / 8; ++j) {
        sum[4 * j] = fmaf(part[slot][4 * j], scale.x, sum[4 * j]);
        sum[4 * j + 1] = fmaf(part[slot][4 * j + 1], scale.x, sum[4 * j + 1]);
        sum[4 * j + 2] = fmaf(part[slot][4 * j + 2], scale.y, sum[4 * j + 2]);
        sum[4 * j + 3] = fmaf(part[slot][4 * j + 3], scale.y, sum[4 * j + 3]);
      }
    }
  };
  // Converts steps First … of a brick and starts their products.
  auto const start = [&]<int First, int Steps>(BrickRegisters<S> const& brick, float (&sum)[N / 2], std::uint32_t rows,
                                               std::uint32_t (&a)[4 * Steps]) {
    brick.template convert<First, Steps>(a);
    pin(sum);
    wgmma_arrive();
#pragma unroll
    for (int q = 0; q < Steps; ++q) WgmmaFromRegisters<N>::run(sum, a + 4 * q, rows + 2 * (First + q), kScaled && First + q == 0 ? 0 : 1);
    wgmma_commit();
    pin(sum);
  };
  for (int k = 0; k < span.k_count; k += L::kDepth) {
    wait_parity(memory.full(ring.stage), ring.parity);
    ptx::fence_proxy_async(ptx::space_shared);  // rows were written by cp.async, which is not of the async proxy
    // Broadcast, so that the compiler knows it for the same in all lanes and keeps descriptors in uniform registers.
    std::uint32_t const rows = __shfl_sync(0xFFFFFFFFu, descriptor_low(smem_address(memory.rows(ring.stage))), 0);
    std::uint32_t const bricks = smem_address(memory.bricks(ring.stage)) + static_cast<std::uint32_t>(group * L::kBricks * L::kBrickBytes);
    std::uint32_t const step_bytes = static_cast<std::uint32_t>(span.side * L::kBrickBytes);
    int const deep = min(L::kDepth, span.k_count - k);
    if (kOverlap && deep == L::kDepth) {
      std::uint32_t a[2][16];
#pragma unroll
      for (int d = 0; d < L::kDepth; ++d) {
        BrickRegisters<S> brick;
        brick.load(bricks + static_cast<std::uint32_t>(d) * step_bytes, thread);
        float (&sum)[N / 2] = [&]() -> float (&)[N / 2] {
          if constexpr (kScaled) {
            return part[d & 1];
          } else {
            return total[0];
          }
        }();
        if constexpr (kScaled) scales[d & 1] = brick.scales;
        start.template operator()<0, 4>(brick, sum, rows + static_cast<std::uint32_t>(d * (L::kRowBytes / 16)), a[d & 1]);
        if (d > 0) {
          wgmma_wait<1>();
          if constexpr (kScaled) pin(part[(d + 1) & 1]);
          add((d + 1) & 1, total[0]);
        }
      }
      wgmma_wait<0>();
      if constexpr (kScaled) pin(part[(L::kDepth + 1) & 1]);
      pin(total[0]);
      add((L::kDepth + 1) & 1, total[0]);
    } else {
      for (int d = 0; d < deep; ++d) {
#pragma unroll
        for (int b = 0; b < L::kBricks; ++b) {
          BrickRegisters<S> brick;
          brick.load(bricks + static_cast<std::uint32_t>(d) * step_bytes + static_cast<std::uint32_t>(b * L::kBrickBytes), thread);
          std::uint32_t const rows_at = rows + static_cast<std::uint32_t>(d * (L::kRowBytes / 16));
          if constexpr (kScaled) scales[0] = brick.scales;
          float (&sum)[N / 2] = [&]() -> float (&)[N / 2] {
            if constexpr (kScaled) {
              return part[0];
            } else {
              return total[b];
            }
          }();
          if constexpr (N > 96) {  // fragments of half a brick at a time fit beside the sums
            std::uint32_t a[8];
            start.template operator()<0, 2>(brick, sum, rows_at, a);
            wgmma_wait<0>();
            pin(sum);
            start.template operator()<2, 2>(brick, sum, rows_at, a);
          } else {
            std::uint32_t a[16];
            start.template operator()<0, 4>(brick, sum, rows_at, a);
          }
          wgmma_wait<0>();
          pin(sum);
          add(0, total[b]);
        }
      }
    }
    release(memory, ring.stage);
    ring.advance();
  }
}

template <W4Scheme S, class L, int MaxRows, int N>
__device__ inline void consume_unit(Params const& p, Memory<L> const& memory, RingState<L::kStages>& ring, Unit const& unit, int group) {
  Span const span = span_of(p, unit);
  int const mine = span.side - group * L::kBricks;  // bricks of this warpgroup, or fewer than one
  float total[L::kBricks][N / 2];
  // A register that is read before it is written counts as live everywhere, so sums start from written zeros, on every path.
#pragma unroll
  for (int b = 0; b < L::kBricks; ++b) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) total[b][i] = 0.0F;
  }
  if (mine > 0) {
    if constexpr (N <= 16 && L::kBricks == 1) {
      multiply_few<S, L, N>(memory, ring, group, span, total[0]);
    } else {
      multiply<S, L, N>(memory, ring, group, span, total);
    }
  } else {
    skip(memory, ring, span.k_count);
  }
  if constexpr (MaxRows <= kMostSplitRows) {
    if (unit.splits > 1 && !sum_splits<L, N>(p, memory, unit, group, mine > 0, total)) return;
  }
  if (unit.phase == 0) {
    store_activated<L, N>(p, memory, unit, span.first + group * L::kBricks, mine, group, total);
  } else if (mine > 0) {
    store_outputs<L, MaxRows, N>(p, memory, unit, span.first + group * L::kBricks, mine, group, total);
  }
}

template <W4Scheme S, int Groups, int Depth, int Stages, int MaxRows>
__global__ void __launch_bounds__(Groups * 128 + kProducerThreads, 1) layer_kernel(__grid_constant__ Params const p) {
  using L = Layout<S, Groups, Depth, Stages, MaxRows>;
  extern __shared__ char w4_smem[];
  Memory<L> const memory{w4_smem + ((1024u - (smem_address(w4_smem) & 1023u)) & 1023u)};
  int const warp = static_cast<int>(threadIdx.x) >> 5;
  if (threadIdx.x == 0) {
    for (int s = 0; s < Stages; ++s) {
      ptx::mbarrier_init(memory.full(s), 1 + 32 * kGatherWarps);
      ptx::mbarrier_init(memory.empty(s), 128 * Groups);
    }
    for (int s = 0; s < kUnitSlots; ++s) {
      ptx::mbarrier_init(memory.unit_full(s), 1);
      ptx::mbarrier_init(memory.unit_empty(s), 32 * kGatherWarps + 128 * Groups);
    }
    ptx::fence_mbarrier_init(ptx::sem_release, ptx::scope_cluster);
    ptx::fence_proxy_async(ptx::space_shared);
  }
  launch_dependents();
  wait_for_dependencies();
  if (warp == 0) {
    Control const control = split_plan(p);
    if (threadIdx.x == 0) *memory.control() = control;
  }
  __syncthreads();

  // Registers at launch: 168 each of 384 threads, or 96 each of 640.
  if (warp >= 4 * Groups) {
    give_registers<Groups == 2 ? 88 : 56>();
    if (warp == 4 * Groups) {
      if (threadIdx.x == L::kConsumers) load_weights<L>(p, memory);
    } else {
      load_rows<MaxRows, L>(p, memory, warp - 4 * Groups - 1);
    }
  } else {
    take_registers<Groups == 2 ? 208 : 104>();
    int const group = warp >> 2;
    if (p.standard && p.topk == 1 && memory.control()->missing > 0) hopper::detail::zero_rows<__nv_bfloat16, L::kConsumers / 32>(p, false);
    RingState<Stages> ring;
    RingState<kUnitSlots> slot;
    while (true) {
      Unit const unit = next_unit(memory, slot);
      __syncwarp();
      if (unit.phase < 0) break;
      auto const run = [&]<int N>() {
        if constexpr (N <= MaxRows) consume_unit<S, L, MaxRows, N>(p, memory, ring, unit, group);
      };
      switch ((unit.rows + 7) / 8) {
        case 0:
        case 1: run.template operator()<8>(); break;
        case 2: run.template operator()<16>(); break;
        case 3:
        case 4: run.template operator()<32>(); break;
        case 5:
        case 6:
        case 7:
        case 8: run.template operator()<64>(); break;
        case 9:
        case 10: run.template operator()<80>(); break;
        case 11:
        case 12: run.template operator()<96>(); break;
        default: run.template operator()<128>(); break;
      }
    }
  }
}

}  // namespace moe::hopper::w4
