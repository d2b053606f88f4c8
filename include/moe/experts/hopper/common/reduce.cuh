// SPDX-License-Identifier: Apache-2.0
// experts/hopper/common/reduce.cuh: rows of the output that no product writes: the sum over the slots of each token, in slot order, in
// float32, one rounding; zeros for tokens without a local expert.
#pragma once

#include <cstdint>
#include <type_traits>

#include "moe/core/ptx/convert.cuh"
#include "moe/experts/hopper/common/align_args.cuh"
#include "moe/experts/hopper/common/slots.cuh"
#include "moe/experts/hopper/common/wait.cuh"

namespace moe::hopper {

namespace detail {

/// Adds eight columns of the rows of four slots, in order.
template <class Output>
__device__ inline void add_four(uint4 const (&value)[4], float (&sum)[8]) {
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

/// Adds eight columns of the rows of a token's slots that were computed, in order.
template <class Output>
__device__ inline void add_slots(Output const* rows, SlotIds ids, long long token, int topk, int num_experts, int hidden, int column,
                                 float (&sum)[8]) {
  auto const slot_ids = ids.row(token, topk);
  auto const slot_rows = reinterpret_cast<uint4 const*>(rows + token * topk * hidden + column);
  for (int j0 = 0; j0 < topk; j0 += 4) {
    uint4 value[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      bool const there = j0 + j < topk && static_cast<unsigned>(slot_ids[j0 + j < topk ? j0 + j : 0]) < static_cast<unsigned>(num_experts);
      value[j] = there ? __ldcg(slot_rows + static_cast<long long>(j0 + j) * (hidden / 8)) : make_uint4(0, 0, 0, 0);
    }
    add_four<Output>(value, sum);
  }
}

template <class Output>
__device__ inline void store_sum(Output* to, float const (&sum)[8]) {
  *reinterpret_cast<uint4*>(to) =
      make_uint4(pack<Output>(sum[0], sum[1]), pack<Output>(sum[2], sum[3]), pack<Output>(sum[4], sum[5]), pack<Output>(sum[6], sum[7]));
}

/// Zeroes output rows that nothing else writes: with `all` every row, else (topk 1) those of tokens whose slot no local expert computes.
/// Runs on the first `Warps` warps of each thread block.
template <class Output, int Warps>
__device__ inline void zero_rows(AlignArgs const& a, void* out, bool all) {
  int const tokens = a.num_tokens != nullptr ? min(*a.num_tokens, a.max_tokens) : a.max_tokens;
  int const warp = thread_index() >> 5;
  int const lane = thread_index() & 31;
  for (int token = static_cast<int>(blockIdx.x) * Warps + warp; token < tokens; token += static_cast<int>(gridDim.x) * Warps) {
    if (!all && static_cast<unsigned>(a.ids[token * (1LL + a.id_gap)]) < static_cast<unsigned>(a.num_experts)) continue;
    uint4* const row = reinterpret_cast<uint4*>(static_cast<Output*>(out) + static_cast<long long>(token) * a.hidden);
    for (int i = lane; i < a.hidden / 8; i += 32) row[i] = make_uint4(0, 0, 0, 0);
  }
}

}  // namespace detail

/// Parameters of reduce_kernel.
template <class Output>
struct ReduceArgs {
  Output const* rows;  ///< device [max_tokens * topk, hidden] the second product of each slot; those without a local expert are not read
  SlotIds ids;         ///< device [max_tokens, topk] local ids; an id outside [0, num_experts): no local expert
  std::int32_t const* num_tokens;  ///< device: tokens, or null: max_tokens
  int max_tokens;
  int topk;         ///< more than 1
  int num_experts;  ///< of this rank
  int hidden;       ///< a multiple of 8
  Output* out;      ///< device [max_tokens, hidden]
};

/// out[t] = sum over j, in order, of the rows of the slots that were computed. One thread sums 8 columns.
template <class Output>
__global__ void __launch_bounds__(256) reduce_kernel(ReduceArgs<Output> const a) {
  launch_dependents();
  wait_for_dependencies();
  int const tokens = a.num_tokens != nullptr ? min(*a.num_tokens, a.max_tokens) : a.max_tokens;
  int const chunks = a.hidden / 8;
  long long const total = static_cast<long long>(tokens) * chunks;
  for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < total;
       i += static_cast<long long>(gridDim.x) * blockDim.x) {
    long long const token = i / chunks;
    int const chunk = static_cast<int>(i - token * chunks);
    float sum[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    detail::add_slots<Output>(a.rows, a.ids, token, a.topk, a.num_experts, a.hidden, 8 * chunk, sum);
    detail::store_sum<Output>(a.out + token * a.hidden + 8 * chunk, sum);
  }
}

}  // namespace moe::hopper
