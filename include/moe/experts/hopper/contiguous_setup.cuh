// SPDX-License-Identifier: Apache-2.0
// experts/hopper/contiguous_setup.cuh: what ContiguousLayer makes once from a layer's weights: checks, and the kernels' constants.
#pragma once

#include <cstdint>

#include "moe/core/error.hpp"
#include "moe/experts/hopper/common/matrix_layout.hpp"
#include "moe/experts/hopper/common/tensor_map.cuh"
#include "moe/experts/hopper/contiguous_layer.hpp"
#include "moe/experts/hopper/layer/layer_params.cuh"
#include "moe/experts/hopper/layer/row_codes.cuh"

namespace moe::hopper::detail {

/// Row-scaled: how the warps that quantise rows of the intermediate divide them.
template <Scheme S>
inline void divide_rows(int intermediate, IntermediateRows& inter) {
  inter.lane_chunks = (intermediate / RowCodes<S>::kValues + 31) / 32;
  inter.rows_together = RowCodes<S>::kHeld / inter.lane_chunks;
}

/// E_ARG, E_UNSUPPORTED for weights that the kernels of a scheme cannot read.
inline void check_weights(LayerWeights const& w, Scheme scheme, bool interleaved) {
  if (interleaved && scheme == Scheme::fp8_block) {
    throw Error(
        ErrorCode::unsupported,
        "hopper experts: interleaved gate and up rows share scale blocks in fp8_block. De-interleave the weights when loading them");
  }
  if (is_scaled(scheme) && (w.w13_scales == nullptr || w.w2_scales == nullptr)) {
    throw Error(ErrorCode::argument, text("hopper experts: w13_scales or w2_scales is null, ", name(scheme), " needs both"));
  }
  for (void const* pointer : {w.w13, w.w2}) {
    if (pointer == nullptr) throw Error(ErrorCode::argument, "hopper experts: w13 or w2 is null");
  }
}

inline LayerConstants layer_constants(LocalShape const& shape, Scheme scheme, LayerWeights const& w, LayerOptions const& options,
                                      GateUp order) {
  int const bytes = element_bytes(scheme);
  std::int64_t const experts = shape.num_experts;
  LayerConstants c{};
  c.w13 = make_tensor_map(w.w13, bytes, order == GateUp::halves ? 2 * experts : experts, shape.intermediate,
                          order == GateUp::interleaved ? 2LL * shape.hidden : shape.hidden, 128);
  c.w2 = make_tensor_map(w.w2, bytes, experts, shape.hidden, shape.intermediate, 128);
  c.matrix[0] = w13_layout(shape, order);
  c.matrix[1] = w2_layout(shape);
  c.intermediate = shape.intermediate;
  c.tensor_scales = w.tensor_scales;
  c.w13_scales = w.w13_scales;
  c.w2_scales = w.w2_scales;
  c.w13_bias = w.w13_bias;
  c.w2_bias = w.w2_bias;
  c.static_scale = options.static_scale;
  c.scale_floor = options.scale_floor;
  c.amax_bound = options.amax_bound;
  c.activation = activation_params(options.activation, options.constants);
  return c;
}

}  // namespace moe::hopper::detail
