// SPDX-License-Identifier: Apache-2.0
// experts/cublas_grouped/row_kernels.cuh: the kernels around cuBLAS's grouped products: slots in the order of experts, the group list, rows
// gathered, activated and summed.
#pragma once

#include <algorithm>
#include <cstdint>

#include "moe/core/types.hpp"

namespace moe::experts::cublas {

inline constexpr int kThreads = 256;
inline unsigned blocks_for(std::int64_t threads) {
  return static_cast<unsigned>(std::clamp<std::int64_t>((threads + kThreads - 1) / kThreads, 1, 1 << 20));
}

/// The slots of a standard batch; rows from *num_rows on have none.
struct Slots {
  std::int32_t const* ids;  // [R, k]
  std::int64_t ids_stride;
  float const* weights;  // [R, k]
  std::int64_t weights_stride;
  std::int32_t const* num_rows;
  std::int64_t rows;
  std::int64_t topk;
  std::int64_t num_local;

  __device__ int expert(std::int64_t slot) const {
    std::int64_t const row = slot / topk;
    if (num_rows != nullptr && row >= *num_rows) return kNoExpert;
    int const id = ids[row * ids_stride + slot % topk];
    return id >= 0 && id < num_local ? id : kNoExpert;
  }
  __device__ float weight(std::int64_t slot) const { return weights[slot / topk * weights_stride + slot % topk]; }
};

/// One block per expert: the positions of its slots among them, in slot order, and their number.
template <int Threads>
__global__ void __launch_bounds__(Threads) position_slots(Slots slots, std::int32_t* positions, std::int32_t* counts) {
  static_assert(Threads == 1024, "as many warps as a warp has lanes");
  __shared__ int warp_sums[32];
  int const expert = static_cast<int>(blockIdx.x);
  int const lane = static_cast<int>(threadIdx.x) & 31;
  int const warp = static_cast<int>(threadIdx.x) >> 5;
  int before = 0;
  for (std::int64_t base = 0; base < slots.rows * slots.topk; base += Threads) {
    std::int64_t const slot = base + threadIdx.x;
    bool const mine = slot < slots.rows * slots.topk && slots.expert(slot) == expert;
    unsigned const votes = __ballot_sync(0xFFFFFFFFU, mine);
    if (lane == 0) warp_sums[warp] = __popc(votes);
    __syncthreads();
    int const sum = warp_sums[lane];
    int const earlier = static_cast<int>(__reduce_add_sync(0xFFFFFFFFU, lane < warp ? static_cast<unsigned>(sum) : 0U));
    if (mine) positions[slot] = before + earlier + __popc(votes & ((1U << lane) - 1U));
    before += static_cast<int>(__reduce_add_sync(0xFFFFFFFFU, static_cast<unsigned>(sum)));
    __syncthreads();
  }
  if (threadIdx.x == 0) counts[expert] = before;
}

/// The inputs of the group list. Element sizes are of one element type.
struct PlanArgs {
  std::int32_t const* given;  // [L] counts of a batched call, or null
  std::int64_t capacity;      // batched or fixed groups: rows of a block; else 0
  std::int64_t num_local;
  std::int64_t hidden, intermediate, rows13;
  std::int64_t element;  // bytes
  char const* x;
  char* gate_up;
  char* inter;
  char* y;
  char const* w13;
  char const* w2;
  std::int32_t* counts;
  std::int64_t* offsets;
  void const** pointers;  // [6, L]: w13, x, gate_up, w2, inter, y of each expert with rows, in expert order
};

/// One block: first row of each expert, and the operands of the experts that have rows.
template <int Threads>
__global__ void __launch_bounds__(Threads) plan_groups(PlanArgs a) {
  if (a.given != nullptr) {
    for (std::int64_t e = threadIdx.x; e < a.num_local; e += blockDim.x) {
      a.counts[e] = min(max(a.given[e], 0), static_cast<std::int32_t>(a.capacity));
    }
    __syncthreads();
  }
  for (std::int64_t e = threadIdx.x; e < a.num_local; e += blockDim.x) {
    std::int64_t offset = 0;
    std::int64_t group = 0;
    for (std::int64_t other = 0; other < e; ++other) {
      int const count = a.counts[other];
      offset += count;
      group += count > 0 ? 1 : 0;
    }
    if (a.capacity > 0) offset = e * a.capacity;
    a.offsets[e] = offset;
    if (a.counts[e] == 0) continue;
    a.pointers[group] = a.w13 + e * a.rows13 * a.hidden * a.element;
    a.pointers[a.num_local + group] = a.x + offset * a.hidden * a.element;
    a.pointers[2 * a.num_local + group] = a.gate_up + offset * a.rows13 * a.element;
    a.pointers[3 * a.num_local + group] = a.w2 + e * a.hidden * a.intermediate * a.element;
    a.pointers[4 * a.num_local + group] = a.inter + offset * a.intermediate * a.element;
    a.pointers[5 * a.num_local + group] = a.y + offset * a.hidden * a.element;
  }
}

/// Slots in the order of their experts. Device addresses.
struct SortedSlots {
  Slots slots;
  std::int64_t const* offsets;    // [L] first row of each expert
  std::int32_t const* positions;  // [R k] of a slot among those of its expert

  __device__ std::int64_t row(std::int64_t slot, int expert) const { return offsets[expert] + positions[slot]; }
};

/// Parameters of gather_rows. Device addresses.
template <class T>
struct GatherRowsArgs {
  SortedSlots sorted;
  T const* x;           // [R, hidden]
  std::int64_t stride;  // elements between rows of x
  std::int64_t hidden;
  T* to;                     // [rows, hidden] in the order of experts, as the next two
  std::int32_t* row_expert;  // [rows] local id
  float* row_weight;         // [rows] router weight
};

/// One warp per slot: copies its row of x to its position.
template <class T>
__global__ void gather_rows(GatherRowsArgs<T> const a) {
  Slots const& slots = a.sorted.slots;
  int const lane = static_cast<int>(threadIdx.x) & 31;
  std::int64_t const warps = static_cast<std::int64_t>(gridDim.x) * (kThreads / 32);
  bool const wide = reinterpret_cast<std::uintptr_t>(a.x) % 16 == 0 && a.stride * sizeof(T) % 16 == 0 && a.hidden * sizeof(T) % 16 == 0;
  for (std::int64_t slot = static_cast<std::int64_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32; slot < slots.rows * slots.topk;
       slot += warps) {
    int const expert = slots.expert(slot);
    if (expert < 0) continue;
    std::int64_t const row = a.sorted.row(slot, expert);
    T const* const from = a.x + slot / slots.topk * a.stride;
    if (wide) {
      std::int64_t const words = a.hidden * static_cast<std::int64_t>(sizeof(T)) / 16;
      for (std::int64_t i = lane; i < words; i += 32) {
        reinterpret_cast<uint4*>(a.to + row * a.hidden)[i] = reinterpret_cast<uint4 const*>(from)[i];
      }
    } else {
      for (std::int64_t i = lane; i < a.hidden; i += 32) a.to[row * a.hidden + i] = from[i];
    }
    if (lane == 0) {
      a.row_expert[row] = expert;
      a.row_weight[row] = slots.weight(slot);
    }
  }
}

/// Rows in blocks of `capacity`, of which the first counts[e] of block e are valid; with capacity 0 all of [0, rows).
struct BlockRows {
  std::int32_t const* counts;  // [L] device
  std::int64_t capacity;
  std::int64_t rows;  // of all blocks
};

/// Parameters of gather_blocks. Device addresses.
template <class T>
struct GatherBlocksArgs {
  BlockRows blocks;
  std::int32_t const* gather;  // [L, capacity] rows of x
  T const* x;                  // [., hidden]
  std::int64_t hidden;
  T* to;  // [L, capacity, hidden]
};

/// One warp per row of a batch: to[e, i] = x[gather[e, i]] for the valid rows of each block.
template <class T>
__global__ void gather_blocks(GatherBlocksArgs<T> const a) {
  BlockRows const& b = a.blocks;
  int const lane = static_cast<int>(threadIdx.x) & 31;
  std::int64_t const warps = static_cast<std::int64_t>(gridDim.x) * (kThreads / 32);
  for (std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32; row < b.rows; row += warps) {
    if (row % b.capacity >= b.counts[row / b.capacity]) continue;
    T const* const from = a.x + a.gather[row] * a.hidden;
    for (std::int64_t i = lane; i < a.hidden; i += 32) a.to[row * a.hidden + i] = from[i];
  }
}

/// Parameters of activate_rows. Device addresses.
template <class T, class Activation>
struct ActivateRowsArgs {
  Activation activation;
  BlockRows blocks;
  T const* gate_up;                // [rows, rows13] the first product
  float const* bias;               // [L, rows13], or null
  float const* weights;            // [rows] factors of the products, or null
  std::int32_t const* row_expert;  // [rows] local id; with a capacity not read
  std::int64_t width;              // I
  T* inter;                        // [rows, width]
};

/// inter[r, i] = act(gate + bias, up + bias) for the valid rows, products scaled by the row's weight first if `weights` is given.
template <class T, class Activation>
__global__ void activate_rows(ActivateRowsArgs<T, Activation> const a) {
  BlockRows const& b = a.blocks;
  std::int64_t const width = a.width;
  bool const gated = a.activation.gated();
  std::int64_t const rows13 = gated ? 2 * width : width;
  std::int64_t const step = static_cast<std::int64_t>(gridDim.x) * kThreads;
  for (std::int64_t task = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; task < b.rows * width; task += step) {
    std::int64_t const row = task / width;
    std::int64_t const i = task - row * width;
    if (b.capacity > 0 && row % b.capacity >= b.counts[row / b.capacity]) continue;
    std::int64_t const expert = b.capacity > 0 ? row / b.capacity : a.row_expert[row];
    float const scale = a.weights != nullptr ? a.weights[row] : 1.0F;
    float gate = scale * to_float(a.gate_up[row * rows13 + i]);
    float up = gated ? scale * to_float(a.gate_up[row * rows13 + width + i]) : 0.0F;
    if (a.bias != nullptr) {
      gate += a.bias[expert * rows13 + i];
      if (gated) up += a.bias[expert * rows13 + width + i];
    }
    a.inter[task] = from_float<T>(a.activation(gate, up));
  }
}

/// Parameters of sum_slots. Device addresses.
template <class T>
struct SumSlotsArgs {
  SortedSlots sorted;
  T const* out;       // [rows, hidden] the second product, in the order of experts
  float const* bias;  // [L, hidden], or null
  std::int64_t hidden;
  bool weighted;        // false: w_j is 1
  T* y;                 // [R, hidden]
  std::int64_t stride;  // elements between rows of y
};

/// y[r] = Σ_j w_j (out[row of slot j] + bias), in slot order; every row is written.
template <class T>
__global__ void __launch_bounds__(kThreads) sum_slots(SumSlotsArgs<T> const a) {
  Slots const& slots = a.sorted.slots;
  std::int64_t const hidden = a.hidden;
  std::int64_t const step = static_cast<std::int64_t>(gridDim.x) * kThreads;
  for (std::int64_t task = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; task < slots.rows * hidden; task += step) {
    std::int64_t const r = task / hidden;
    std::int64_t const c = task - r * hidden;
    float sum = 0.0F;
    for (std::int64_t slot = r * slots.topk; slot < (r + 1) * slots.topk; ++slot) {
      int const expert = slots.expert(slot);
      if (expert < 0) continue;
      float v = to_float(a.out[a.sorted.row(slot, expert) * hidden + c]);
      if (a.bias != nullptr) v += a.bias[expert * hidden + c];
      sum += a.weighted ? slots.weight(slot) * v : v;
    }
    a.y[r * a.stride + c] = from_float<T>(sum);
  }
}

/// y[e, i] += bias[e] for the valid rows of each block.
template <class T>
__global__ void add_bias(BlockRows const b, float const* bias, std::int64_t hidden, T* y) {
  std::int64_t const step = static_cast<std::int64_t>(gridDim.x) * kThreads;
  for (std::int64_t task = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; task < b.rows * hidden; task += step) {
    std::int64_t const row = task / hidden;
    if (row % b.capacity >= b.counts[row / b.capacity]) continue;
    y[task] = from_float<T>(to_float(y[task]) + bias[row / b.capacity * hidden + (task - row * hidden)]);
  }
}

}  // namespace moe::experts::cublas
