// SPDX-License-Identifier: Apache-2.0
// tests/unit/runner_capture_test.cpp: what a runner says of a capture before any work: the obstacle of its layer, then those of its own
// parts. Captures themselves: tests/gpu/runner_cases_test.cu.
#include "moe/runner/capture.hpp"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "../numbers.hpp"
#include "moe/backends/no_expert_parallel.hpp"
#include "moe/experts/reference.hpp"
#include "moe/experts/weights.hpp"
#include "moe/modular_kernel.hpp"
#include "moe/quantization/none.hpp"
#include "moe/routing/any_router.hpp"
#include "moe/runner/host/primitives.hpp"
#include "moe/runner/runner.hpp"

namespace {

using namespace moe;
using moe_test::numbers;

constexpr int kHidden = 16, kIntermediate = 8, kExperts = 4, kTopK = 2;

struct Config : LayerDefaults {
  using Activation = activation::Any;
};
/// Experts that say whether they can be captured.
struct Asked : experts::Reference<float> {
  static constexpr char const* kName = "asked";
  static inline bool answer = true;
  template <class C, class Quant, ActivationFormat Format>
  class Kernel : public experts::Reference<float>::Kernel<C, Quant, Format> {
   public:
    using experts::Reference<float>::template Kernel<C, Quant, Format>::Kernel;
    bool capturable() const { return answer; }
  };
};
/// One of two ranks, for what asks for no message.
struct OneOfTwo : comm::Self<> {
  static constexpr int size() { return 2; }
};

template <class Experts>
using LayerOf = ModularKernel<Config, routing::AnyRouter, quantization::None, backends::NoExpertParallel<>, Experts>;
struct ChunkParts : RunnerDefaults {
  using Chunking = runner::chunking::Lockstep;
};
struct GridParts : ChunkParts {
  using Parallel = runner::parallel::Groups<OneOfTwo>;
};
struct SharedParts : RunnerDefaults {
  using Shared = runner::shared::Separate<Asked>;
};

constexpr char const* kChunks = "chunks: most_rows is 0, so the ranks agree on their rows through the host in each forward. ";
constexpr char const* kGroup = "the TP group: rows_agree is false, so its ranks agree on their rows through the host in each forward. ";

/// The obstacle of a runner. set(parameters) comes before its construction.
template <class Experts, class Parts, class Set>
std::string obstacle(Set const& set) {
  experts::WeightStore<Config, quantization::None> store(kExperts, kHidden, kIntermediate, true);
  std::vector<float> const w = numbers(1, 2 * kIntermediate * kHidden, 0.3F);
  for (int e = 0; e < kExperts; ++e) store.set_expert(e, w.data(), w.data());
  comm::Self<> self;
  using R = Runner<LayerOf<Experts>, Parts>;
  typename R::Params p{.layer = {.shape = {kHidden, kIntermediate, kExperts, kTopK, false},
                                 .max_tokens_per_rank = 4,
                                 .placement = ExpertPlacement(kExperts, 1),
                                 .router = {.num_experts = kExperts, .topk = kTopK}}};
  if constexpr (requires { p.shared.count; }) p.shared = {1, kIntermediate, store.view()};
  set(p);
  R runner(self, store.view(), p);
  return capture_obstacle(runner);
}
void expect_obstacle(std::string const& got, std::string const& want) { EXPECT_EQ(got.substr(0, want.size()), want); }

TEST(RunnerCapture, ObstacleOfTheLayerFirst) {
  auto const asks = [](auto&) {};
  Asked::answer = true;
  EXPECT_EQ((obstacle<Asked, RunnerDefaults>(asks)), "");
  expect_obstacle(obstacle<Asked, ChunkParts>(asks), kChunks);
  Asked::answer = false;
  expect_obstacle(obstacle<Asked, RunnerDefaults>(asks), "asked reads the rows per expert back");
  expect_obstacle(obstacle<Asked, ChunkParts>(asks), "asked reads the rows per expert back");
}

TEST(RunnerCapture, ObstaclesOfChunks) {
  using Reference = experts::Reference<float>;
  std::string const asks = obstacle<Reference, ChunkParts>([](auto& p) { p.chunking.rows = 2; });
  expect_obstacle(asks, kChunks);
  EXPECT_NE(asks.find("Fix: "), std::string::npos) << asks;
  EXPECT_EQ((obstacle<Reference, ChunkParts>([](auto& p) { p.chunking = {.rows = 2, .most_rows = 9}; })), "");
}

TEST(RunnerCapture, ObstaclesOfAGrid) {
  using Reference = experts::Reference<float>;
  OneOfTwo tp;
  for (bool const rows_agree : {false, true}) {
    for (std::int64_t const most_rows : {0, 9}) {
      for (int const tp_size : {1, 2}) {
        std::string const got = obstacle<Reference, GridParts>([&](auto& p) {
          p.chunking.most_rows = most_rows;
          p.parallel = {flatten({.tp_size = tp_size, .backend = backends::NoExpertParallel<>::kFacts}), &tp, true, rows_agree};
        });
        bool const group = tp_size == 2 && !rows_agree;
        SCOPED_TRACE(got);
        if (!group && most_rows > 0) {
          EXPECT_EQ(got, "");
        } else {
          expect_obstacle(got, group ? kGroup : kChunks);
        }
      }
    }
  }
}

TEST(RunnerCapture, ObstacleOfSharedExperts) {
  using Reference = experts::Reference<float>;
  Asked::answer = true;
  EXPECT_EQ((obstacle<Reference, SharedParts>([](auto&) {})), "");
  Asked::answer = false;
  expect_obstacle(obstacle<Reference, SharedParts>([](auto&) {}), "the shared experts' kernel reads the rows per expert back");
  EXPECT_EQ((obstacle<Reference, SharedParts>([](auto& p) { p.shared.count = 0; })), "") << "there are none";
}

}  // namespace
