// SPDX-License-Identifier: Apache-2.0
// experts/hopper/common/align_args.cuh: the arguments of the aligning kernel. The layer kernels take the same struct for the slots of a
// call and the work list.
#pragma once

#include <cstdint>

#include "moe/comm/arrivals.hpp"
#include "moe/experts/hopper/common/divisor.hpp"
#include "moe/experts/hopper/common/schedule.cuh"

namespace moe::hopper {

inline constexpr int kAlignCluster = 8;  ///< CTAs that sort

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
  Divisor per_token;  ///< of topk: the token of a slot
  int num_experts;
  PlanArgs plan;
  Control* control;
  int* next_unit;  ///< the counter that clusters draw units from; starts at the number of clusters, since cluster i begins with unit i
  int* counters;   ///< ready counters [max_tiles], then split counters of phase 0 and 1
  int max_tiles;
  SortedRow* sorted_rows;
  // fp8_block: meanwhile, CTAs past the first cluster quantise x, or copy rows that are codes already into the sorted order. A layer kernel
  // that plans for itself quantises x itself.
  void const* x;  ///< [M, H] bf16, or e4m3 with given_scales
  long long x_row_bytes;
  float const* given_scales;  ///< [M, H / 128], or null
  long long given_scale_stride;
  int hidden;
  std::uint8_t* x_codes;  ///< [M, H] e4m3
  float* x_scales;        ///< [M, H / 128]
  // Sorted codes: with `positions`, x_codes is [slots, H] and x_scales [H / 128, scale_stride], both in the sorted order.
  std::int32_t* positions;  ///< [slots] row position of a slot in the sorted order, or -1; written by the sort, in the standard format
  int* sorted;              ///< with `positions` or `beside_dispatch`: sorting CTAs that are done; zero on entry, and after a layer kernel
  int scale_stride;
  /// Beside the dispatch, sorted codes: [token tiles] rows of each tile that are in x_codes and x_scales; the sort clears it. Or null.
  int* copied;
  comm::Arrivals arrivals;  ///< beside the dispatch
  /// Do not wait for the end of the kernel before this one: it has triggered with all that the sort reads complete, or the sort has counted
  /// in `sorted` (batched format, whose sort waits for the end of the dispatch).
  bool beside_dispatch;
};

}  // namespace moe::hopper
