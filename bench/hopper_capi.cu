// SPDX-License-Identifier: Apache-2.0
// bench/hopper_capi.cu: the Hopper layers behind a C interface, for bench/compare.py: target moe_hopper_capi, with the kernels of
// moe_hopper_kernels in it.
#include <cstdint>
#include <cstdio>
#include <exception>
#include <memory>
#include <string_view>

#include "bench/w4_launchers.hpp"
#include "moe/core/buffer.hpp"
#include "moe/core/cuda_space.hpp"
#include "moe/core/device_facts.hpp"
#include "moe/experts/hopper/contiguous_layer.hpp"
#include "moe/experts/hopper/w4a16_layer.hpp"
#include "moe/experts/hopper/w4a8_layer.hpp"

using namespace moe::hopper;

static_assert(static_cast<int>(Scheme::fp8_block) == 2 && static_cast<int>(Scheme::int8_row) == 4);

namespace {

/// A layer of any scheme, as the functions below pass it around.
struct AnyLayer {
  virtual ~AnyLayer() = default;
  virtual std::int64_t workspace_bytes(int max_tokens) const = 0;
  virtual void forward(LayerCall const& call, void* workspace, CUstream_st* stream) const = 0;
};

template <class Layer>
struct Holder : AnyLayer {
  moe::Buffer<char, moe::space::cuda> packed;  ///< the layer's own form of 4- or 8-bit weights, else empty
  std::unique_ptr<Layer> layer;
  std::int64_t workspace_bytes(int max_tokens) const override { return layer->workspace_bytes(max_tokens); }
  void forward(LayerCall const& call, void* workspace, CUstream_st* stream) const override { layer->forward(call, workspace, stream); }
};

/// Calls make(), prints an error and returns null.
template <class Make>
void* created(Make const& make) {
  try {
    std::unique_ptr<AnyLayer> made = make();
    return made.release();
  } catch (std::exception const& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return nullptr;
  }
}

/// Reads `count` vectors of 16 bytes once. `sink` is written only if all of them are zero.
__global__ void read_all(uint4 const* data, long long count, unsigned* sink) {
  unsigned seen = 0;
  for (long long i = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x; i < count;
       i += static_cast<long long>(gridDim.x) * blockDim.x) {
    uint4 const v = __ldcs(data + i);
    seen |= v.x | v.y | v.z | v.w;
  }
  if (seen == 0) *sink = 1;
}

}  // namespace

extern "C" {

/// W4Weights and W4Activation for C. bench/compare_library.py has the same members in the same order.
struct moe_hopper_packed {
  std::uint8_t const* w13;
  std::uint8_t const* w2;
  void const* w13_scales;
  void const* w2_scales;
  float const* b13;
  float const* b2;
  std::int32_t w13_group;
  std::int32_t w2_group;
  float alpha;
  float beta;
  float limit;
};

/// A layer, or null after printing the error. `scheme`: 0 bf16, 1 fp16, 2 fp8 blocks, 3 fp8 rows, 4 int8 rows.
void* moe_hopper_create(int scheme, int num_experts, int hidden, int intermediate, int topk, void const* w13, void const* w2,
                        float const* w13_scales, float const* w2_scales) {
  return created([&] {
    auto made = std::make_unique<Holder<ContiguousLayer>>();
    made->layer = std::make_unique<ContiguousLayer>(LocalShape{num_experts, hidden, intermediate, topk}, static_cast<Scheme>(scheme),
                                                    LayerWeights{w13, w2, w13_scales, w2_scales});
    return made;
  });
}

/// The same of weights in 4 or 8 bits, which are packed into memory of the layer's own. `scheme`: a name of W4Scheme (bf16 activations), or
/// one with "_fp8" behind it (rows of e4m3 codes with a scale per 128; mxfp4 and int4).
void* moe_hopper_create_packed(char const* scheme, int num_experts, int hidden, int intermediate, int topk,
                               moe_hopper_packed const* weights) {
  moe_hopper_packed const& w = *weights;
  LocalShape const shape{num_experts, hidden, intermediate, topk};
  W4Weights const stored{w.w13, w.w2, w.w13_scales, w.w2_scales, w.w13_group, w.w2_group, w.b13, w.b2};
  W4Activation const activation{w.alpha, w.beta, w.limit};
  return created([&] {
    std::string_view name = scheme;
    bool const fp8_rows = name.ends_with("_fp8");
    if (fp8_rows) name.remove_suffix(4);
    auto const found = moe_bench::find_w4_scheme(name);
    if (!found || (fp8_rows && moe_bench::fp8_launcher_of(*found) == nullptr)) {
      throw moe::Error(moe::ErrorCode::argument, moe::text("moe_hopper_create_packed: no scheme ", scheme));
    }
    auto const make = [&]<class Layer>(auto launcher) -> std::unique_ptr<AnyLayer> {
      auto made = std::make_unique<Holder<Layer>>();
      made->packed = moe::Buffer<char, moe::space::cuda>(Layer::packed_bytes(shape, *found));
      made->layer = std::make_unique<Layer>(shape, *found, stored, activation, made->packed.data(), launcher);
      return made;
    };
    return fp8_rows ? make.template operator()<W4A8Layer>(moe_bench::fp8_launcher_of(*found))
                    : make.template operator()<W4A16Layer>(moe_bench::launcher_of(*found));
  });
}

void moe_hopper_destroy(void* layer) { delete static_cast<AnyLayer*>(layer); }

long long moe_hopper_workspace_bytes(void* layer, int max_tokens) { return static_cast<AnyLayer*>(layer)->workspace_bytes(max_tokens); }

/// 0, or 1 after printing the error. x_scales: of rows that are quantised already, else null; x_scale_stride: elements between its rows.
int moe_hopper_forward(void* layer, void const* x, float const* x_scales, long long x_scale_stride, int const* topk_ids,
                       float const* topk_weights, int tokens, void* out, void* workspace, void* stream) try {
  LayerCall call{};
  call.x = x;
  call.x_scales = x_scales;
  call.x_scale_stride = x_scale_stride;
  call.topk_ids = topk_ids;
  call.topk_weights = topk_weights;
  call.out = out;
  call.max_tokens = tokens;
  static_cast<AnyLayer*>(layer)->forward(call, workspace, static_cast<CUstream_st*>(stream));
  return 0;
} catch (std::exception const& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}

/// Enqueues one read of `bytes` bytes (a multiple of 16) on every multiprocessor, for the read rate. 0, or 1 after printing the error.
int moe_hopper_read(void const* data, long long bytes, unsigned* sink, void* stream) try {
  int const blocks = 16 * moe::device_facts().num_sms;
  read_all<<<blocks, 512, 0, static_cast<CUstream_st*>(stream)>>>(static_cast<uint4 const*>(data), bytes / 16, sink);
  moe::check_cuda(cudaGetLastError(), "moe_hopper_read");
  return 0;
} catch (std::exception const& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
}
