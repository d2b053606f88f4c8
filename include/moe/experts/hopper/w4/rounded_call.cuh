// SPDX-License-Identifier: Apache-2.0
// experts/hopper/w4/rounded_call.cuh: the steps of a call of quantised rows: rows to bf16, then the products of one phase at a time with
// the rounding of the intermediate between them.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "moe/core/error.hpp"
#include "moe/experts/hopper/w4/arguments.cuh"
#include "moe/experts/hopper/w4/rounded_kernel.cuh"
#include "moe/experts/hopper/w4/rounded_rows.cuh"

namespace moe::hopper::w4 {

/// E_CONFIG unless a layer of these sizes can have such rows.
inline void check_rows(char const* policy, LocalShape const& s, W4Rows const& rows) {
  if (!(rows.global_scale > 0.0F) || std::isinf(rows.global_scale)) {
    throw Error(ErrorCode::config, text(policy, ": the rows' global scale ", rows.global_scale, " must be finite and positive"));
  }
  visit_rows(rows, [&](auto scheme) {
    constexpr int kGroup = decltype(scheme)::kActGroup;
    if (kGroup != 0 && s.intermediate % std::max(kGroup, 1) != 0) {
      throw Error(ErrorCode::config, text(policy, ": intermediate ", s.intermediate, " must be a multiple of ", kGroup,
                                          ", the group of the rows. Pad it, or use the experts cuda_reference"));
    }
  });
}

/// E_ARG for rows that the kernels cannot read.
inline void check_codes(W4Rows const& rows, LocalShape const& s, W4Codes const& codes) {
  visit_rows(rows, [&](auto scheme) {
    using Rows = decltype(scheme);
    std::int64_t const width = Rows::payload_cols(s.hidden);
    std::int64_t const groups = Rows::scale_cols(s.hidden);
    if (codes.codes == nullptr || codes.scales == nullptr || codes.stride < width || codes.scale_stride < groups) {
      throw Error(ErrorCode::argument, text("codes ", codes.codes, " with row stride ", codes.stride, " and scales ", codes.scales,
                                            " with row stride ", codes.scale_stride, ", expected rows of ", width, " and ", groups));
    }
  });
}

/// Fills what AnyParams lacks.
inline void set_rounded(RoundedParams& p, W4Rows const& rows, RoundedWorkspace const& space, void* workspace) {
  p.wide = hopper::detail::at<float>(workspace, space.wide);
  p.factor = common_part(rows);
  visit_rows(rows, [&](auto scheme) {
    if constexpr (kHasRowFactors<decltype(scheme)>) {
      p.row_factors[0] = hopper::detail::at<float>(workspace, space.x_factors);
      p.row_factors[1] = hopper::detail::at<float>(workspace, space.inter_factors);
    }
  });
}

/// The same call with the units of one phase. Rows of the other are complete before, so nothing waits for them.
inline RoundedParams only_phase(RoundedParams p, int phase) {
  p.align.plan.space.weight_tiles[1 - phase] = 0;
  return p;
}

/// Enqueues the kernel that makes p.x of the codes. `r`: the call with the caller's rows.
inline void widen_rows(Request const& r, W4Rows const& rows, W4Codes const& codes, RoundedParams const& p, int workers,
                       cudaStream_t stream) {
  visit_rows(rows, [&](auto scheme) {
    using Rows = decltype(scheme);
    WidenArgs<Rows> a{};
    a.from = codes;
    a.num_tokens = r.call.num_tokens;
    a.counts = r.batch_counts;
    a.gather = r.batched() ? r.call.gather : nullptr;
    a.capacity = r.capacity;
    a.rows = r.call.max_tokens;
    a.hidden = p.align.hidden;
    a.to = static_cast<bf16*>(const_cast<void*>(p.x));  // in the workspace
    a.factors = p.row_factors[0];
    widen_codes<Rows><<<rounding_blocks(a.rows, workers), 32 * kRoundingWarps, 0, stream>>>(a);
  });
  check_cuda(cudaGetLastError(), "widen_codes");
}

/// Enqueues the rounding of the intermediate, of `width` columns that count, from p.wide to p.inter.
inline void round_rows(W4Rows const& rows, RoundedParams const& p, int width, int workers, cudaStream_t stream) {
  visit_rows(rows, [&](auto scheme) {
    using Rows = decltype(scheme);
    RoundArgs<Rows> a{};
    a.scheme = scheme;
    a.from = p.wide;
    a.width = width;
    a.padded = p.layer.intermediate;
    a.to = static_cast<bf16*>(p.inter);
    a.factors = p.row_factors[1];
    a.control = p.align.control;
    a.next_unit = p.align.next_unit;
    a.workers = workers;
    long long const slots = static_cast<long long>(p.align.max_tokens) * p.align.topk;
    round_intermediate<Rows><<<rounding_blocks(slots, workers), 32 * kRoundingWarps, 0, stream>>>(a);
  });
  check_cuda(cudaGetLastError(), "round_intermediate");
}

}  // namespace moe::hopper::w4
