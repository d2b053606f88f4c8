// SPDX-License-Identifier: Apache-2.0
// tests/gpu/eplb_layer_test.cu: a captured layer continues with new expert maps and moved weights: the same addresses (case B15 of
// docs/semantics/eplb.md), the same outputs, load counted with the map in use. One rank: experts move between its expert slots.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

#include "moe/activation/activation.hpp"
#include "moe/backends/collective/device/no_expert_parallel.cuh"
#include "moe/comm/self.hpp"
#include "moe/core/cuda_graph.hpp"
#include "moe/eplb/map_tables.hpp"
#include "moe/eplb/rearrange.hpp"
#include "moe/experts/cuda_reference.cuh"
#include "moe/experts/weights.hpp"
#include "moe/modular_kernel.hpp"
#include "moe/quantization/none.hpp"
#include "moe/routing/device/route.cuh"
#include "moe/routing/softmax_topk.hpp"
#include "tests/numbers.hpp"

namespace {

using namespace moe;
using eplb::ExpertMaps;
using eplb::Table;
using moe_test::normal;
using Space = space::cuda;
struct Config : LayerDefaults {
  using Activation = activation::Silu;
};
using Layer = ModularKernel<Config, routing::SoftmaxTopK<routing::Renormalize::yes>, quantization::None, backends::NoExpertParallel<Space>,
                            experts::CudaReference>;
using Store = experts::WeightStore<Config, quantization::None, Space>;

constexpr int kHidden = 64, kIntermediate = 32, kExperts = 8, kSlots = 12, kTopK = 2;
constexpr std::int64_t kTokens = 40;

Store loaded(std::vector<std::int32_t> const& expert_of_slot) {
  Store store(static_cast<std::int64_t>(expert_of_slot.size()), kHidden, kIntermediate, true);
  for (std::size_t s = 0; s < expert_of_slot.size(); ++s) {
    int const seed = 10 * expert_of_slot[s];
    store.set_expert(static_cast<std::int64_t>(s), normal(seed, 2 * kIntermediate * kHidden, 0.12F).data(),
                     normal(seed + 1, kHidden * kIntermediate, 0.18F).data());
    store.set_bias(static_cast<std::int64_t>(s), normal(seed + 2, 2 * kIntermediate, 0.1F).data(), normal(seed + 3, kHidden, 0.1F).data());
  }
  return store;
}
std::vector<std::int32_t> row(ExpertMaps const& maps) {
  auto const r = maps.physical_to_logical().row(0);
  return {r.begin(), r.end()};
}

/// Inputs and output of one layer's calls.
struct Io {
  Buffer<float, Space> hidden{kTokens * kHidden}, logits{kTokens * kExperts}, output{kTokens * kHidden};
  void draw(unsigned seed) {
    hidden.copy_from_host(normal(seed, kTokens * kHidden).data());
    logits.copy_from_host(normal(seed + 1, kTokens * kExperts, 2.0F).data());
  }
  void forward(Layer& layer, Stream<Space> stream) {
    layer.forward(make_rows(static_cast<float const*>(hidden.data()), kTokens, kHidden),
                  make_rows(static_cast<float const*>(logits.data()), kTokens, kExperts), make_rows(output.data(), kTokens, kHidden), {},
                  stream);
  }
  std::vector<float> result() const {
    std::vector<float> out(kTokens * kHidden);
    output.copy_to_host(out.data());
    return out;
  }
};

TEST(EplbLayer, B15_CapturedLayerUsesTheNewMap) {
  comm::Self<Space> self;
  std::vector<std::int32_t> plain(kExperts);
  std::iota(plain.begin(), plain.end(), 0);
  Store plain_store = loaded(plain);
  Layer direct(self, plain_store.view(),
               {.shape = {kHidden, kIntermediate, kExperts, kTopK, false},
                .max_tokens_per_rank = kTokens,
                .placement = ExpertPlacement(kExperts, 1),
                .router = {kExperts, kTopK}});

  ExpertMaps maps = ExpertMaps::initial(1, kExperts, kSlots - kExperts);
  eplb::MapTables<Space> tables(maps);
  Store store = loaded(row(maps));
  Layer layer(self, store.view(),
              {.shape = {kHidden, kIntermediate, kExperts, kTopK, false},
               .max_tokens_per_rank = kTokens,
               .placement = ExpertPlacement::from_physical_to_logical(maps.physical_to_logical().row(0), kExperts, 1),
               .router = {kExperts, kTopK},
               .mapping = tables.mapping(0, 0, 1),
               .load = {tables.load_counter(0)}});

  CudaStream stream;
  Io io;
  io.draw(1);
  check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  io.forward(layer, stream);  // modules load outside the capture
  io.forward(direct, stream);
  stream.synchronize();
  Table<std::int32_t> load(1, kSlots);
  tables.take_load(load);
  CudaGraph const graph(stream, [&] { io.forward(layer, stream); });

  eplb::WeightMover<comm::Self<Space>> mover(self, {eplb::expert_tensors(store)}, kSlots);
  eplb::SelfGroup group;
  std::mt19937 random(3);
  for (unsigned round = 0; round < 6; ++round) {
    io.draw(100 + round);
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    io.forward(direct, stream);
    stream.synchronize();
    std::vector<float> const want = io.result();
    graph.launch(stream);
    stream.synchronize();
    EXPECT_EQ(io.result(), want) << "round " << round;

    tables.take_load(load);
    std::vector<std::int32_t> ids(kTokens * kTopK), expected(kSlots, 0);
    Memory<Space>::copy_to_host(ids.data(), layer.topk_ids().data_handle(), ids.size() * sizeof(std::int32_t));
    routing::ExpertMapping host = tables.mapping(0, 0, 1);  // the same rule, over the maps in use
    host.logical_to_physical = maps.logical_to_physical().row(0).data();
    host.replica_count = maps.replica_count().row(0).data();
    for (std::size_t i = 0; i < ids.size(); ++i) {
      ++expected[static_cast<std::size_t>(
          routing::map_expert(host, ids[i], static_cast<std::int64_t>(i) / kTopK, static_cast<int>(i) % kTopK, kTopK))];
    }
    EXPECT_EQ(load.flat(), expected) << "round " << round;

    // Another map: every expert once, the other expert slots drawn at random; then all of them shuffled.
    std::vector<std::int32_t> next_row = plain;
    while (next_row.size() < kSlots) next_row.push_back(static_cast<std::int32_t>(random() % kExperts));
    std::shuffle(next_row.begin(), next_row.end(), random);
    ExpertMaps const next(Table<std::int32_t>(std::vector<std::vector<std::int32_t>>{next_row}), kExperts);
    eplb::rearrange(
        mover, maps, next, group,
        [&](int l) {
          maps.set_layer(l, next);
          tables.publish(l, next, stream);
          layer.weights_changed(stream);  // these experts hold the weights in float32 too
        },
        stream);
  }
  EXPECT_GT(mover.stats().slots_changed, 0);
}

}  // namespace
