// SPDX-License-Identifier: Apache-2.0
// tests/mpi/runner_description_test.cpp: the lines that a runner gives for a log: what it was built of, its passes, and its memory.
// moe-ranks: 1 2
#include "moe/runner/description.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <type_traits>
#include <vector>

#include "moe/backends/all_to_all_v.hpp"
#include "moe/backends/window/host/low_latency.hpp"
#include "moe/comm/mpi.hpp"
#include "moe/comm/mpi_shared.hpp"
#include "moe/experts/reference.hpp"
#include "moe/experts/weights.hpp"
#include "moe/modular_kernel.hpp"
#include "moe/quantization/none.hpp"
#include "moe/routing/any_router.hpp"
#include "moe/runner/host/primitives.hpp"
#include "moe/runner/runner.hpp"

namespace {

using namespace moe;
constexpr int kHidden = 16, kIntermediate = 8, kTopK = 2, kMost = 6;

struct Config : LayerDefaults {
  static constexpr int hidden = kHidden, intermediate = kIntermediate, topk = kTopK;
  using Activation = activation::Silu;
};
struct FullParts : RunnerDefaults {
  using Chunking = runner::chunking::Lockstep;
  using DualBatch = runner::dual_batch::Halves;
};

template <class Backend>
class Description : public testing::Test {
 protected:
  using Layer = ModularKernel<Config, routing::AnyRouter, quantization::None, Backend, experts::Reference<float>>;

  comm::Mpi mpi{MPI_COMM_WORLD, {.timeout_ms = 20'000}};
  int const num_experts = 2 * mpi.size();
  std::vector<float> const w13 = std::vector<float>(2 * kIntermediate * kHidden, 0.5F),
                           w2 = std::vector<float>(kHidden * kIntermediate, 0.5F);
  experts::WeightStore<Config, quantization::None> store{2, kHidden, kIntermediate, true};

  void SetUp() override {
    for (int e = 0; e < 2; ++e) store.set_expert(e, w13.data(), w2.data());
  }

  template <class R>
  typename R::Params params() {
    return {.layer = {.shape = {.num_experts = num_experts},
                      .max_tokens_per_rank = kMost,
                      .placement = ExpertPlacement(num_experts, mpi.size()),
                      .router = {.num_experts = num_experts, .topk = kTopK}}};
  }
};
using Backends = testing::Types<backends::AllToAllV<comm::Mpi>, backends::LowLatency<comm::MpiShared>>;
TYPED_TEST_SUITE(Description, Backends);

int count_with(std::vector<std::string> const& lines, std::string const& words) {
  return static_cast<int>(std::count_if(lines.begin(), lines.end(), [&](auto const& l) { return l.find(words) != std::string::npos; }));
}

TYPED_TEST(Description, DescribesThePartsThatExist) {
  using Layer = typename TestFixture::Layer;
  using Plain = Runner<Layer>;
  Plain plain(this->mpi, this->store.view(), this->template params<Plain>());
  LayerMemory const memory = plain.layer().memory();
  EXPECT_EQ(memory.window > 0, (std::is_same_v<TypeParam, backends::LowLatency<comm::MpiShared>>));
  EXPECT_EQ(runner::description(plain),
            (std::vector<std::string>{text("composition: quantization none, backend ", TypeParam::kName, ", experts ",
                                           experts::Reference<float>::kName, ", space ", space::host::kName),
                                      "sums over the TP group: none", text("rows of a pass: at most ", kMost, ", width ", kHidden),
                                      text("memory besides the weights: runner and layer ", plain.bytes(),
                                           " bytes, of them the layer's arena ", memory.arena, ", the window ", memory.window)}));

  using Full = Runner<Layer, FullParts>;
  Full full(this->mpi, this->store.view(), this->template params<Full>());
  std::vector<std::string> const lines = runner::description(full);
  EXPECT_EQ(lines.size(), 6U);
  EXPECT_EQ(count_with(lines, "passes: as many on every rank"), 1);
  EXPECT_EQ(count_with(lines, text("dual batch: ", runner::dual_batch::default_threshold(SpaceKind::host), "; two exchanges")), 1);
  EXPECT_EQ(count_with(lines, text("runner and layer ", full.bytes(), " bytes")), 1);
  full.decide_dual_batch(true);
  EXPECT_EQ(count_with(runner::description(full), "dual batch: batches are always split: the caller's verdict"), 1);
  full.decide_dual_batch(false);
  EXPECT_EQ(count_with(runner::description(full), "dual batch: batches are never split: the caller's verdict"), 1);

  auto params = this->template params<Full>();
  params.dual_batch.min_rows = 4;
  Full four(this->mpi, this->store.view(), params);
  EXPECT_EQ(count_with(runner::description(four), "dual batch: batches are split where every rank has at least 4 rows"), 1);
  params.dual_batch.second_exchange = false;
  Full one(this->mpi, this->store.view(), params);
  EXPECT_EQ(count_with(runner::description(one), "dual batch: batches are never split: there is no second exchange"), 1);
  EXPECT_EQ(count_with(runner::description(one), "two exchanges"), 0);
}

/// A device never splits by default: every measurement was slower.
static_assert(!runner::dual_batch::default_threshold(SpaceKind::host).never());
static_assert(runner::dual_batch::default_threshold(SpaceKind::cuda).never());
static_assert(
    runner::dual_batch::default_threshold(SpaceKind::cuda).why.starts_with("on two H200 and on four H100 halves took 2 to 78 % longer"));

/// What stands for a layer on the device with rows in host memory.
struct OfDevice {
  struct Inner {
    static LayerMemory memory() { return {.arena = 640, .window = 4096}; }
  };
  Inner inner;
  Inner& device() { return inner; }
};
struct Silent {};

TEST(DescriptionOfMemory, OfTheDeviceBehindHostRows) {
  OfDevice layer;
  EXPECT_EQ(runner::detail::layer_memory(layer), ", of them the layer's arena 640, the window 4096");
  Silent silent;
  EXPECT_EQ(runner::detail::layer_memory(silent), "");
}

}  // namespace
