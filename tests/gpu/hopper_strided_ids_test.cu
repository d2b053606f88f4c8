// SPDX-License-Identifier: Apache-2.0
// tests/gpu/hopper_strided_ids_test.cu: ids and weights in rows that are longer than k, as exchanges hand them out in their records, give
// the same bits as packed ones.
#include <gtest/gtest.h>

#include "tests/gpu/hopper_reference.cuh"

namespace {

using namespace moe_test;
using moe::hopper::ContiguousLayer;

void expect_equal(Scheme scheme, int topk, int tokens, Pattern pattern) {
  Problem const p({8, 256, 256, topk}, scheme, tokens, pattern, 17);
  ContiguousLayer const layer(p.shape, scheme, p.layer_weights());
  TypedMemory<char> workspace(static_cast<std::size_t>(layer.workspace_bytes(tokens)));
  std::size_t const bytes = static_cast<std::size_t>(tokens) * 256 * 2;
  TypedMemory<char> packed(bytes), strided(bytes);
  packed.fill_bytes(0xff);
  strided.fill_bytes(0xff);
  layer.forward(p.call(packed.data()), workspace.data(), nullptr);
  // The gaps hold experts that exist: reading one would change the result.
  auto const spread = [&](auto const& from, int stride) {
    auto const host = from.download();
    std::vector<std::remove_cvref_t<decltype(host[0])>> to(static_cast<std::size_t>(tokens * stride), host[0]);
    for (int i = 0; i < tokens * topk; ++i) to[static_cast<std::size_t>(i / topk * stride + i % topk)] = host[static_cast<std::size_t>(i)];
    TypedMemory<std::remove_cvref_t<decltype(host[0])>> device(to.size());
    device.upload(to);
    return device;
  };
  auto const ids = spread(p.ids, topk + 13);
  auto const weights = spread(p.weights, topk + 5);
  moe::hopper::LayerCall call = p.call(strided.data());
  call.topk_ids = ids.data();
  call.id_stride = topk + 13;
  call.topk_weights = weights.data();
  call.weight_stride = topk + 5;
  layer.forward(call, workspace.data(), nullptr);
  moe::check_cuda(cudaDeviceSynchronize(), "layer");
  EXPECT_EQ(packed.download(), strided.download()) << tokens << " tokens, top " << topk;
  call.id_stride = -1;
  EXPECT_THROW(layer.forward(call, workspace.data(), nullptr), moe::Error);
}

TEST(HopperStridedIds, EqualsPacked) {
  int major = 0;
  ASSERT_EQ(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0), cudaSuccess);
  if (major != 9) GTEST_SKIP() << "needs compute capability 9.0";
  for (Scheme scheme : {Scheme::bf16, Scheme::fp8_block}) {
    for (int tokens : {1, 9, 40, 700}) {
      expect_equal(scheme, 2, tokens, Pattern::random);
      expect_equal(scheme, 2, tokens, Pattern::some_missing);
      expect_equal(scheme, 1, tokens, Pattern::some_missing);
    }
  }
}

}  // namespace
