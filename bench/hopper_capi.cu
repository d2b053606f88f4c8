// SPDX-License-Identifier: Apache-2.0
// bench/hopper_capi.cu: the Hopper layer behind a C interface, for bench/compare.py: target moe_hopper_capi, with the kernels of
// moe_hopper_kernels in it.
#include <cstdio>
#include <exception>

#include "moe/experts/hopper/contiguous_layer.hpp"

using namespace moe::hopper;

static_assert(static_cast<int>(Scheme::fp8_block) == 2 && static_cast<int>(Scheme::int8_row) == 4);

extern "C" {

/// A layer, or null after printing the error. `scheme`: 0 bf16, 1 fp16, 2 fp8 blocks, 3 fp8 rows, 4 int8 rows.
void* moe_hopper_create(int scheme, int num_experts, int hidden, int intermediate, int topk, void const* w13, void const* w2,
                        float const* w13_scales, float const* w2_scales) try {
  return new ContiguousLayer(LocalShape{num_experts, hidden, intermediate, topk}, static_cast<Scheme>(scheme),
                             LayerWeights{w13, w2, w13_scales, w2_scales});
} catch (std::exception const& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return nullptr;
}

void moe_hopper_destroy(void* layer) { delete static_cast<ContiguousLayer*>(layer); }

long long moe_hopper_workspace_bytes(void* layer, int max_tokens) {
  return static_cast<ContiguousLayer*>(layer)->workspace_bytes(max_tokens);
}

/// 0, or 1 after printing the error. x_scales: of rows that are quantised already, else null.
int moe_hopper_forward(void* layer, void const* x, float const* x_scales, int const* topk_ids, float const* topk_weights, int tokens,
                       void* out, void* workspace, void* stream) try {
  LayerCall call{};
  call.x = x;
  call.x_scales = x_scales;
  call.topk_ids = topk_ids;
  call.topk_weights = topk_weights;
  call.out = out;
  call.max_tokens = tokens;
  static_cast<ContiguousLayer*>(layer)->forward(call, workspace, static_cast<CUstream_st*>(stream));
  return 0;
} catch (std::exception const& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
}
