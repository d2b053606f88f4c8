// SPDX-License-Identifier: Apache-2.0
// experts/hopper/w4/arguments.cuh: from the arguments of the layers of packed weights to the parameters of their kernels, as far as it is
// the same for all of them.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

#include "moe/core/error.hpp"
#include "moe/experts/hopper/common/align_launch.cuh"
#include "moe/experts/hopper/common/enqueue.cuh"
#include "moe/experts/hopper/w4/batched_call.hpp"
#include "moe/experts/hopper/w4/layout.cuh"
#include "moe/experts/hopper/w4/problem.hpp"

namespace moe::hopper::w4 {

/// E_ARG unless memory for packed weights is there and aligned.
inline void check_packed(void const* packed) {
  if (packed == nullptr || reinterpret_cast<std::uintptr_t>(packed) % 16 != 0) {
    throw Error(ErrorCode::argument, text("address ", packed, " of the packed weights is null or not a multiple of 16 bytes"));
  }
}

/// The multiprocessors of the current device, at most `most` of them if that is positive. E_CONFIG for a negative number.
inline int workers_of(char const* policy, int most) {
  if (most < 0) throw Error(ErrorCode::config, text(policy, ": workers ", most, " must be at least 0"));
  int const all = hopper::detail::hopper_multiprocessors();
  return most == 0 ? all : std::min(most, all);
}

inline long long x_stride(LayerCall const& call, LocalShape const& shape) { return call.x_stride != 0 ? call.x_stride : shape.hidden; }

/// E_ARG for a call that no kernel can read. Rows of x are whole vectors of `vector` elements; tiles have at most `most_rows`.
inline void check_call(Request const& r, LocalShape const& shape, W4Tuning const& tuning, int vector, int most_rows) {
  detail::check_request(r);
  if (long long const stride = x_stride(r.call, shape); stride < shape.hidden || stride % vector != 0) {
    throw Error(ErrorCode::argument, text("x_stride ", stride, " is not a multiple of ", vector, " of at least ", shape.hidden));
  }
  if (tuning.tile_rows < 8 || tuning.tile_rows > most_rows || tuning.tile_rows % 8 != 0) {
    throw Error(ErrorCode::argument, text("tile_rows ", tuning.tile_rows, " is not a multiple of 8 in [8, ", most_rows, "]"));
  }
}

/// A layer whose tokens are slots, as in the batched format.
inline LocalShape of_slots(LocalShape shape) {
  shape.topk = 1;
  return shape;
}
/// The number of tokens for which a batch's tiles are chosen.
inline int expected_tokens(LocalShape const& shape, BatchedCall const& batch) {
  return shape.num_experts * std::clamp(batch.expected_rows, 1, std::max(1, batch.capacity));
}
/// A batch as a call of slots. E_ARG without counts.
inline LayerCall call_of(LocalShape const& shape, BatchedCall const& batch) {
  LayerCall call{};
  call.x = batch.x;
  call.x_scales = batch.x_scales;
  call.out = batch.out;
  call.max_tokens = shape.num_experts * batch.capacity;
  call.gather = batch.gather;
  if (call.max_tokens > 0 && batch.counts == nullptr) throw Error(ErrorCode::argument, "counts is null");
  return call;
}

/// The slots and the work list. `gate_features`: features of a weight tile of w13.
inline AlignArgs align_args(Request const& r, LocalShape const& shape, Constants const& c, W4Workspace const& space, W4Tuning const& tuning,
                            int workers, int gate_features) {
  AlignArgs a = detail::align_args(r, shape, space, tuning.tile_rows);
  a.plan.row_step = 1;  // the kernels have too few numbers of columns to round to one of them
  a.plan.cluster = 1;
  a.plan.workers = workers;
  a.plan.max_splits = 1;  // the layer kernel chooses the parts of K itself
  a.plan.space = {{(c.bricks[0] + kTileBricks - 1) / kTileBricks, (c.bricks[1] + kTileBricks - 1) / kTileBricks},
                  {(c.steps[0] + kCoarse - 1) / kCoarse, (c.steps[1] + kCoarse - 1) / kCoarse},
                  std::max(1, tuning.raster),
                  gate_features};
  return a;
}

/// Fills `p` with what every kernel takes. `splits`: most parts of K.
inline void set_params(Params& p, Request const& r, LocalShape const& shape, Constants const& c, W4Workspace const& space,
                       AlignArgs const& align, int splits) {
  p.layer = c;
  p.align = align;
  p.max_splits = splits;
  p.standard = !r.batched();
  p.x = r.call.x;
  p.x_stride = x_stride(r.call, shape);
  p.gather = r.batched() ? r.call.gather : nullptr;
  p.inter = detail::at<char>(r.workspace, space.inter);
  p.rows_out = align.topk > 1 ? static_cast<void*>(detail::at<char>(r.workspace, space.slot_rows)) : r.call.out;
  p.out = r.call.out;
  p.partials = detail::at<float>(r.workspace, space.partials);
}

}  // namespace moe::hopper::w4
