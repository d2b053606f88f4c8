// SPDX-License-Identifier: Apache-2.0
// experts/hopper/common/align.cuh: one cluster of CTAs sorts the slots by expert (stable), cuts the rows into tiles and plans the work
// list.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "moe/core/ptx/convert.cuh"
#include "moe/experts/hopper/common/schedule.cuh"
#include "moe/experts/hopper/common/slots.cuh"

namespace moe::hopper {

/// Arguments of the aligning kernel. Batched format: `counts` is given and `ids` is null; expert e owns rows [e·capacity, e·capacity +
/// counts[e]) of x and of the output. Standard format: `ids` [M, k].
struct AlignArgs {
  std::int32_t const* ids;
  float const* weights;
  int id_gap;  ///< elements between the rows of ids, beyond k
  int weight_gap;
  std::int32_t const* num_tokens;
  std::int32_t const* counts;
  int capacity;
  int max_tokens;
  int topk;
  int num_experts;
  PlanArgs plan;
  Control* control;
  int* next_unit;  ///< the counter that clusters draw from; starts at the number of clusters, each of which begins with its own index
  int* counters;   ///< ready counters [max_tiles], then split counters of phase 0 and 1
  int max_tiles;
  SortedRow* sorted_rows;
  // fp8_block: CTAs past the first cluster quantise x meanwhile, or copy rows that are codes already into the sorted order. Where the layer
  // kernel plans for itself, it quantises x.
  void const* x;  ///< [M, H] bf16, or e4m3 with given_scales
  long long x_row_bytes;
  float const* given_scales;  ///< [M, H / 128], or null
  long long given_scale_stride;
  int hidden;
  std::uint8_t* x_codes;  ///< [M, H] e4m3
  float* x_scales;        ///< [M, H / 128]
  // Sorted codes: with `positions`, x_codes is [slots, H] and x_scales [H / 128, scale_stride], both in the sorted order.
  std::int32_t* positions;  ///< [slots] place of a slot in the sorted order, or -1; written by the sort
  int* sorted;              ///< sorting CTAs that are done; zero on entry
  int scale_stride;
};

inline constexpr int kAlignThreads = 1024;
inline constexpr int kAlignWarps = kAlignThreads / 32;
inline constexpr int kAlignCluster = 8;

/// Dynamic shared memory of the aligning kernel.
constexpr int align_smem_bytes(int num_experts) { return (kAlignWarps + 2) * num_experts * 4 + 256; }

namespace detail {

/// Larger magnitude of each half of two pairs of bf16 numbers.
__device__ inline std::uint32_t max_magnitudes(std::uint32_t a, std::uint32_t b) {
  __nv_bfloat162 const m =
      __hmax2(__habs2(*reinterpret_cast<__nv_bfloat162 const*>(&a)), __habs2(*reinterpret_cast<__nv_bfloat162 const*>(&b)));
  return *reinterpret_cast<std::uint32_t const*>(&m);
}

/// e4m3 codes of a 1×128 group of bf16 numbers, of which eight neighbouring lanes have sixteen each, and the group's scale =
/// max(amax, 1e-10) / 448; codes from the correctly rounded quotient (values of few bits often lie midway between two codes).
__device__ inline float quantize_group(std::uint32_t const (&word)[8], std::uint32_t (&code)[4]) {
  std::uint32_t most = max_magnitudes(word[0], word[1]);
#pragma unroll
  for (int i = 2; i < 8; ++i) most = max_magnitudes(most, word[i]);
#pragma unroll
  for (int offset = 1; offset < 8; offset *= 2) most = max_magnitudes(most, __shfl_xor_sync(0xFFFFFFFFu, most, offset));
  float const amax = fmaxf(__uint_as_float(most << 16), __uint_as_float(most & 0xFFFF0000u));
  float const scale = e4m3_scale(fmaxf(amax, 1e-10F));
  float const inverse = 1.0F / scale;
  auto const two = [&](std::uint32_t w) {
    return pack_e4m3(quotient(__uint_as_float(w << 16), scale, inverse), quotient(__uint_as_float(w & 0xFFFF0000u), scale, inverse));
  };
#pragma unroll
  for (int i = 0; i < 4; ++i) code[i] = two(word[2 * i]) | (two(word[2 * i + 1]) << 16);
  return scale;
}

/// Codes and scales of all groups of x. Of a group each of eight lanes has the chunks of eight numbers `lane` and `lane + 8`.
template <int Threads>
__device__ inline void quantize_groups(AlignArgs const& a, int worker, int workers) {
  int const tokens = a.num_tokens != nullptr ? min(max(*a.num_tokens, 0), a.max_tokens) : a.max_tokens;
  unsigned const blocks = static_cast<unsigned>(a.hidden) / 128;
  long long const groups = static_cast<long long>(tokens) * blocks;
  long long const step = static_cast<long long>(workers) * (Threads / 8);
  int const lane = static_cast<int>(threadIdx.x) & 7;
  constexpr int kBatch = 2;
  struct Batch {
    uint4 words[kBatch][2];
    int position[kBatch];  ///< of slot `lane` of the group's token
  };
  Batch now;
  Batch next;
  auto const load = [&](Batch& to, long long base) {
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      long long const group = base + b * step;
      uint4 const* const from = static_cast<uint4 const*>(a.x) + group * 16 + lane;
      to.words[b][0] = group < groups ? __ldcs(from) : make_uint4(0, 0, 0, 0);
      to.words[b][1] = group < groups ? __ldcs(from + 8) : make_uint4(0, 0, 0, 0);
    }
  };
  auto const load_positions = [&](Batch& to, long long base) {
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      long long const group = base + b * step;
      bool const there = group < groups && lane < a.topk;
      to.position[b] = there ? __ldcg(a.positions + static_cast<long long>(static_cast<unsigned>(group) / blocks) * a.topk + lane) : -1;
    }
  };
  int const own = static_cast<int>(threadIdx.x) >> 3;
  long long base = static_cast<long long>(worker) * (Threads / 8) + own;
  load(now, base);
  if (a.positions != nullptr) {
    if (threadIdx.x == 0) wait_counter(a.sorted, kAlignCluster);
    __syncthreads();
    load_positions(now, base);
  }
  for (; base - own < groups; base += kBatch * step) {
    load(next, base + kBatch * step);  // on its way while this batch is converted
    if (a.positions != nullptr) load_positions(next, base + kBatch * step);
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      long long const group = base + b * step;
      std::uint32_t const word[8] = {now.words[b][0].x, now.words[b][0].y, now.words[b][0].z, now.words[b][0].w,
                                     now.words[b][1].x, now.words[b][1].y, now.words[b][1].z, now.words[b][1].w};
      std::uint32_t code[4];
      float const scale = quantize_group(word, code);
      auto const store = [&](long long row, unsigned block, float* scale_to) {
        uint2* const to = reinterpret_cast<uint2*>(a.x_codes) + (row * blocks + block) * 16 + lane;
        to[0] = make_uint2(code[0], code[1]);
        to[8] = make_uint2(code[2], code[3]);
        if (lane == 0) *scale_to = scale;
      };
      if (a.positions == nullptr) {
        if (group < groups) store(0, static_cast<unsigned>(group), a.x_scales + group);
        continue;
      }
      unsigned const token = static_cast<unsigned>(group) / blocks;
      unsigned const block = static_cast<unsigned>(group) - token * blocks;
      for (int first = 0; first < a.topk; first += 8) {
        int position = now.position[b];
        if (first > 0) {
          bool const there = group < groups && first + lane < a.topk;
          position = there ? __ldcg(a.positions + static_cast<long long>(token) * a.topk + first + lane) : -1;
        }
        for (int j = 0; j < min(8, a.topk - first); ++j) {
          int const at = __shfl_sync(0xFFFFFFFFu, position, j, 8);
          if (at >= 0) store(at, block, a.x_scales + static_cast<long long>(block) * a.scale_stride + at);
        }
      }
    }
    now = next;
  }
}

/// Copies rows of codes and their scales to the places of their slots, a warp one row at a time.
template <int Threads>
__device__ inline void sort_codes(AlignArgs const& a, int worker, int workers) {
  int const tokens = a.num_tokens != nullptr ? min(max(*a.num_tokens, 0), a.max_tokens) : a.max_tokens;
  int const blocks = a.hidden / 128;
  int const chunks = a.hidden / 16;
  int const lane = static_cast<int>(threadIdx.x) & 31;
  constexpr int kWarps = Threads / 32;
  constexpr int kBatch = 7;  // of 14 chunks a lane has at 7168 columns
  if (threadIdx.x == 0) wait_counter(a.sorted, kAlignCluster);
  __syncthreads();
  for (int token = worker * kWarps + (static_cast<int>(threadIdx.x) >> 5); token < tokens; token += workers * kWarps) {
    auto const* const row = reinterpret_cast<uint4 const*>(static_cast<char const*>(a.x) + token * a.x_row_bytes);
    float const* const scales = a.given_scales + token * a.given_scale_stride;
    for (int first = 0; first < a.topk; first += 32) {
      int const own = first + lane < a.topk ? __ldcg(a.positions + static_cast<long long>(token) * a.topk + first + lane) : -1;
      unsigned const slots = __ballot_sync(0xFFFFFFFFu, own >= 0);
      if (slots == 0) continue;
      for (int base = lane; base - lane < chunks; base += 32 * kBatch) {
        uint4 held[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          if (base + 32 * i < chunks) held[i] = __ldcs(row + base + 32 * i);
        }
        for (unsigned rest = slots; rest != 0; rest &= rest - 1) {
          long long const at = __shfl_sync(0xFFFFFFFFu, own, __ffs(static_cast<int>(rest)) - 1);
          uint4* const to = reinterpret_cast<uint4*>(a.x_codes) + at * chunks;
#pragma unroll
          for (int i = 0; i < kBatch; ++i) {
            if (base + 32 * i < chunks) to[base + 32 * i] = held[i];
          }
        }
      }
      for (int block = lane; block - lane < blocks; block += 32) {
        float const scale = block < blocks ? __ldg(scales + block) : 0.0F;
        for (unsigned rest = slots; rest != 0; rest &= rest - 1) {
          int const at = __shfl_sync(0xFFFFFFFFu, own, __ffs(static_cast<int>(rest)) - 1);
          if (block < blocks) a.x_scales[static_cast<long long>(block) * a.scale_stride + at] = scale;
        }
      }
    }
  }
}

}  // namespace detail

/// Grid: Cluster CTAs that sort, then any number of whole clusters that quantise or copy.
template <int Cluster>
__global__ void __launch_bounds__(kAlignThreads, 1) align_kernel(AlignArgs const a) {
  extern __shared__ int align_smem[];
  int const experts = a.num_experts;
  int* const scratch = align_smem;  // 64
  int* const totals = align_smem + 64;
  int* const row_begin = totals + experts;
  int* const histogram = row_begin + experts;  // [warps][E]
  int const thread = static_cast<int>(threadIdx.x);
  int const lane = thread & 31;
  int const warp = thread >> 5;
  launch_dependents();
  if (blockIdx.x >= Cluster) {
    wait_for_dependencies();
    int const worker = static_cast<int>(blockIdx.x) - Cluster;
    int const workers = static_cast<int>(gridDim.x) - Cluster;
    if (a.given_scales != nullptr) {
      detail::sort_codes<kAlignThreads>(a, worker, workers);
    } else {
      detail::quantize_groups<kAlignThreads>(a, worker, workers);
    }
    return;
  }
  int const rank = static_cast<int>(ptx::get_sreg_cluster_ctarank());
  for (int i = lane; i < experts; i += 32) histogram[warp * experts + i] = 0;
  wait_for_dependencies();

  int const tokens = a.num_tokens != nullptr ? min(max(*a.num_tokens, 0), a.max_tokens) : a.max_tokens;
  int const slots = a.ids != nullptr ? tokens * a.topk : 0;
  int const chunk = ((slots + Cluster * kAlignThreads - 1) / (Cluster * kAlignThreads)) * 32;  // per warp, whole groups of 32
  int const begin = min((rank * kAlignWarps + warp) * chunk, slots);
  int const end = min(begin + chunk, slots);
  int* const mine = histogram + warp * experts;
  __syncwarp();

  constexpr int kBatch = 4;
  for (int base = begin; base < end; base += 32 * kBatch) {
    int id[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      int const slot = base + 32 * i + lane;
      id[i] = slot < end ? slot_value(a.ids, slot, a.topk, a.id_gap) : -1;
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (static_cast<unsigned>(id[i]) < static_cast<unsigned>(experts)) atomicAdd(&mine[id[i]], 1);
    }
  }
  __syncthreads();
  // Thread e owns expert e (E is at most 1024): starts of its rows within this CTA, then over the cluster.
  int rows = 0;
  if (thread < experts) {
    if (a.counts != nullptr) {
      rows = min(max(a.counts[thread], 0), a.capacity);
    } else {
#pragma unroll 8
      for (int w = 0; w < kAlignWarps; ++w) {
        int const count = histogram[w * experts + thread];
        histogram[w * experts + thread] = rows;
        rows += count;
      }
      totals[thread] = rows;
    }
  }
  cluster_arrive_release();
  cluster_wait();
  int before = 0;
  if (thread < experts && a.counts == nullptr) {
    rows = 0;
#pragma unroll
    for (int r = 0; r < Cluster; ++r) {
      int const count = load_cluster(totals + thread, static_cast<std::uint32_t>(r));
      if (r < rank) before += count;
      rows += count;
    }
  }
  cluster_arrive_release();  // every CTA has read the others' totals when the last thread waits at the end

  int first_row = 0;
  Control const control = detail::plan_tiles<kAlignThreads>(a.plan, rows, slots, rank == 0, scratch, first_row);
  if (thread < experts) row_begin[thread] = first_row + before;
  if (rank == 1) {
    for (int i = thread; i < control.token_tiles * a.plan.cluster; i += kAlignThreads) a.counters[i] = 0;
  }
  if (rank >= 2 && rank < 4) {
    int const phase = rank - 2;
    int const splits = phase == 0 ? control.splits[0] : control.splits[1];
    if (splits > 1) {
      int const used = 2 * (phase == 0 ? control.units[0] : control.units[1]) / splits;
      for (int i = thread; i < used; i += kAlignThreads) a.counters[a.max_tiles + phase * a.plan.max_units + i] = 0;
    }
  }
  if (rank == 0 && thread == 0) {
    *a.control = control;
    *a.next_unit = a.plan.workers;
  }
  __syncthreads();

  if (a.counts != nullptr) {
    for (int expert = rank * kAlignWarps + warp; expert < experts; expert += Cluster * kAlignWarps) {
      int const base = row_begin[expert];
      int const count = min(max(a.counts[expert], 0), a.capacity);
      for (int r = lane; r < count; r += 32) {
        a.sorted_rows[base + r] = SortedRow{expert * a.capacity + r, 1.0F};
      }
    }
  }
  for (int base = begin; base < end; base += 32 * kBatch) {
    int id[kBatch];
    float weight[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      int const slot = base + 32 * i + lane;
      id[i] = slot < end ? slot_value(a.ids, slot, a.topk, a.id_gap) : -1;
      weight[i] = slot < end ? slot_value(a.weights, slot, a.topk, a.weight_gap) : 0.0F;
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      int const slot = base + 32 * i + lane;
      bool const valid = static_cast<unsigned>(id[i]) < static_cast<unsigned>(experts);
      unsigned const peers = __match_any_sync(0xFFFFFFFFu, valid ? id[i] : -1);
      int const place = __popc(peers & ((1u << lane) - 1u));
      int const start = valid ? mine[id[i]] : 0;
      __syncwarp();
      if (valid) {
        int const position = row_begin[id[i]] + start + place;
        if (place == 0) mine[id[i]] = start + __popc(peers);
        a.sorted_rows[position] = SortedRow{slot, weight[i]};
        if (a.positions != nullptr) a.positions[slot] = position;
      } else if (a.positions != nullptr && slot < end) {
        a.positions[slot] = -1;
      }
      __syncwarp();
    }
  }
  if (a.positions != nullptr) {
    __syncthreads();
    if (thread == 0) {
      fence_device();
      atomicAdd(a.sorted, 1);
    }
    __syncwarp();
  }
  cluster_wait();
}

/// The same by one CTA of the layer kernel for at most `kSelfAlignSlots` slots, in the standard format. Every CTA does it and writes the
/// same values to the same places, of which it then reads its own, so that no kernel runs before and no CTA waits for another.
inline constexpr int kSelfAlignSlots = 128;

/// One warp plans for at most 32 slots: places by comparing all pairs of lanes, no histogram. All lanes return the plan.
__device__ inline Control self_align_warp(AlignArgs const& a) {
  int const lane = static_cast<int>(threadIdx.x) & 31;
  int const tokens = a.num_tokens != nullptr ? min(max(*a.num_tokens, 0), a.max_tokens) : a.max_tokens;
  int const slots = tokens * a.topk;
  int id = lane < slots ? slot_value(a.ids, lane, a.topk, a.id_gap) : -1;
  float const weight = lane < slots ? slot_value(a.weights, lane, a.topk, a.weight_gap) : 0.0F;
  bool const valid = static_cast<unsigned>(id) < static_cast<unsigned>(a.num_experts);
  if (!valid) id = 0x7FFFFFFF;
  unsigned const peers = __match_any_sync(0xFFFFFFFFu, id);
  int const place = __popc(peers & ((1u << lane) - 1u));
  int const rows = __popc(peers);
  int const tiles = valid ? (rows + a.plan.tile_rows - 1) / a.plan.tile_rows : 0;
  int first_row = 0;
  int first_tile = 0;
#pragma unroll
  for (int other = 0; other < 32; ++other) {
    int const other_id = __shfl_sync(0xFFFFFFFFu, id, other);
    int const other_tiles = __shfl_sync(0xFFFFFFFFu, place == 0 ? tiles : 0, other);
    if (other_id < id) {
      ++first_row;
      first_tile += other_tiles;
    }
  }
  Control control{};
  control.rows = __popc(__ballot_sync(0xFFFFFFFFu, valid));
  control.missing = slots - control.rows;
  control.token_tiles = static_cast<int>(__reduce_add_sync(0xFFFFFFFFu, place == 0 ? static_cast<unsigned>(tiles) : 0u));
  if (valid) {
    a.sorted_rows[first_row + place] = SortedRow{lane, weight};
    if (place == 0) {
      int const step = a.plan.row_step;
      int const per_tile = ((rows + tiles - 1) / tiles + step - 1) / step * step;
      for (int t = 0; t < tiles; ++t) a.plan.tiles[first_tile + t] = TokenTile{id, first_row, rows, first_tile, tiles, per_tile, {0, 0}};
    }
  }
  detail::plan_units(a.plan, control);
  return control;
}

template <int Threads>
__device__ inline Control self_align(AlignArgs const& a, int* shared_ids, int* counts, int* scratch) {
  int const thread = static_cast<int>(threadIdx.x);
  int const tokens = a.num_tokens != nullptr ? min(max(*a.num_tokens, 0), a.max_tokens) : a.max_tokens;
  int const slots = tokens * a.topk;
  constexpr int kOwn = (kSelfAlignSlots + Threads - 1) / Threads;
  int id[kOwn];
  float weight[kOwn];
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    int const slot = thread + i * Threads;
    id[i] = slot < slots ? slot_value(a.ids, slot, a.topk, a.id_gap) : -1;
    weight[i] = slot < slots ? slot_value(a.weights, slot, a.topk, a.weight_gap) : 0.0F;
  }
  if (thread < a.num_experts) counts[thread] = 0;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    int const slot = thread + i * Threads;
    if (static_cast<unsigned>(id[i]) >= static_cast<unsigned>(a.num_experts)) id[i] = -1;
    if (slot < kSelfAlignSlots) shared_ids[slot] = id[i];
    if (id[i] >= 0) atomicAdd(&counts[id[i]], 1);
  }
  __syncthreads();
  int first_row = 0;
  int const rows = thread < a.num_experts ? counts[thread] : 0;
  Control const control = detail::plan_tiles<Threads>(a.plan, rows, slots, true, scratch, first_row);
  if (thread < a.num_experts) counts[thread] = first_row;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    int const slot = thread + i * Threads;
    if (id[i] < 0) continue;
    int place = 0;
    for (int other = 0; other < slot; ++other) place += shared_ids[other] == id[i] ? 1 : 0;
    a.sorted_rows[counts[id[i]] + place] = SortedRow{slot, weight[i]};
  }
  __syncthreads();
  return control;
}

}  // namespace moe::hopper
