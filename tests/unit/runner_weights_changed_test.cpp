// SPDX-License-Identifier: Apache-2.0
// tests/unit/runner_weights_changed_test.cpp: experts with their own copy of the weights: weights_changed() reaches both kernels of a dual
// batch. A forward that begins while weights are replaced is E_STATE; one that begins during a background transfer works.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "../expect_error.hpp"
#include "../numbers.hpp"
#include "moe/backends/all_to_all_v.hpp"
#include "moe/comm/self.hpp"
#include "moe/eplb/runtime_balancer.hpp"
#include "moe/experts/reference.hpp"
#include "moe/experts/weights.hpp"
#include "moe/modular_kernel.hpp"
#include "moe/quantization/none.hpp"
#include "moe/routing/any_router.hpp"
#include "moe/runner/host/primitives.hpp"
#include "moe/runner/runner.hpp"

namespace {

using namespace moe;
using moe_test::expect_error;
using moe_test::numbers;

constexpr int kHidden = 16, kIntermediate = 8, kExperts = 4, kTopK = 2, kSlots = 5;
constexpr std::int64_t kRows = 6;

struct Config : LayerDefaults {
  using Activation = activation::Silu;
};
using Store = experts::WeightStore<Config, quantization::None>;
using Weights = WeightsOf<Config, quantization::None>;

/// The weights as they were when they were last taken.
class Copies {
 public:
  explicit Copies(Weights const& from) : from_(from) { take(); }
  void take() {
    copy(from_.w13, w13_);
    copy(from_.w2, w2_);
  }
  Weights view() const {
    Weights out = from_;
    out.w13.codes = make_blocks(w13_.data(), from_.w13.codes.extent(0), from_.w13.rows, from_.w13.cols);
    out.w2.codes = make_blocks(w2_.data(), from_.w2.codes.extent(0), from_.w2.rows, from_.w2.cols);
    return out;
  }

 private:
  template <class Matrix>
  static void copy(Matrix const& from, std::vector<float>& to) {
    to.clear();
    for (std::int64_t e = 0; e < from.codes.extent(0); ++e) {
      for (std::int64_t r = 0; r < from.rows; ++r) to.insert(to.end(), row_ptr(from.codes, e, r), row_ptr(from.codes, e, r) + from.cols);
    }
  }
  Weights from_;
  std::vector<float> w13_, w2_;
};

/// A user's experts: with a limit of their processors, and with their own copy of the weights.
struct Packing : experts::Reference<float> {
  static constexpr char const* kName = "packing";
  struct Params {
    int workers = 0;
  };
  static inline int kernels_told = 0;
  static inline std::function<void()> when_told;
  template <class C, class Quant, ActivationFormat Format>
  class Kernel : Copies, public experts::Reference<float>::Kernel<C, Quant, Format> {
    using Base = typename experts::Reference<float>::template Kernel<C, Quant, Format>;

   public:
    Kernel(Shape<C> const& shape, Weights const& weights, std::int64_t max_rows, Quant const& quant,
           typename C::Activation const& activation, Params const&, Arena<space::host>& arena)
        : Copies(weights), Base(shape, Copies::view(), max_rows, quant, activation, {}, arena) {}
    Kernel(Kernel&&) = delete;  // the base reads the copies where they lie
    void weights_changed(HostStream) {
      take();
      ++kernels_told;
      if (when_told) when_told();
    }
  };
};

template <class Experts>
using LayerOf = ModularKernel<Config, routing::AnyRouter, quantization::None, backends::AllToAllV<comm::Self<>>, Experts>;
struct HalvesParts : RunnerDefaults {
  using DualBatch = runner::dual_batch::Halves;
};
struct ChunkParts : HalvesParts {
  using Chunking = runner::chunking::Lockstep;
};
using Plain = Runner<LayerOf<experts::Reference<float>>>;
using Dual = Runner<LayerOf<Packing>, HalvesParts>;

void set_expert(Store& store, std::int64_t slot, int expert) {
  store.set_expert(slot, numbers(10 + 2 * expert, 2 * kIntermediate * kHidden, 0.3F).data(),
                   numbers(11 + 2 * expert, kHidden * kIntermediate, 0.3F).data());
}
Store store_of(int slots) {
  Store store(slots, kHidden, kIntermediate, true);
  for (int s = 0; s < slots; ++s) set_expert(store, s, s % kExperts);
  return store;
}
template <class R>
typename R::Params params(ExpertPlacement const& placement) {
  return {.layer = {.shape = {kHidden, kIntermediate, kExperts, kTopK, false},
                    .max_tokens_per_rank = kRows,
                    .placement = placement,
                    .router = {.num_experts = kExperts, .topk = kTopK}}};
}
template <class R>
std::vector<float> forward(R& runner) {
  std::vector<float> const x = numbers(1, kRows * kHidden, 1.0F), logits = numbers(2, kRows * kExperts, 1.0F);
  std::vector<float> y(x.size());
  runner.forward(make_rows(x.data(), kRows, kHidden), make_rows(logits.data(), kRows, kExperts), make_rows(y.data(), kRows, kHidden));
  return y;
}
std::vector<float> expected(Store const& store) {
  comm::Self<> self;
  Plain runner(self, store.view(), params<Plain>(ExpertPlacement(kExperts, 1)));
  return forward(runner);
}

TEST(RunnerWeightsChanged, BothKernelsOfADualBatch) {
  Store store = store_of(kExperts);
  std::vector<float> const before = expected(store);
  comm::Self<> self;
  auto p = params<Dual>(ExpertPlacement(kExperts, 1));
  p.dual_batch.expert_workers = 2;
  Dual dual(self, store.view(), p);
  for (bool const halves : {false, true}) {
    dual.decide_dual_batch(halves);
    EXPECT_EQ(forward(dual), before);
  }
  for (int e = 0; e < kExperts; ++e) set_expert(store, e, e + kExperts);
  std::vector<float> const after = expected(store);
  ASSERT_NE(after, before);
  EXPECT_EQ(forward(dual), before) << "these experts have a copy";
  Packing::kernels_told = 0;
  dual.weights_changed();
  EXPECT_EQ(Packing::kernels_told, 2);
  for (bool const halves : {false, true}) {
    dual.decide_dual_batch(halves);
    EXPECT_EQ(forward(dual), after) << (halves ? "in two halves" : "as a whole");
  }
}

// One rank whose experts change places under a runner in two halves: the bits stay.
TEST(RunnerWeightsChanged, LoadBalancingTellsBothKernels) {
  std::vector<float> const want = expected(store_of(kExperts));
  for (eplb::MoveMode const mode : {eplb::MoveMode::pause, eplb::MoveMode::stepwise, eplb::MoveMode::background}) {
    for (int const workers : {0, 2}) {
      SCOPED_TRACE(text(name(mode), ", ", workers, " workers"));
      Store store = store_of(kSlots);
      comm::Self<> self;
      eplb::SelfGroup group;
      eplb::RuntimeBalancer<comm::Self<>, eplb::SelfGroup> balancer(
          self, group, {eplb::expert_tensors(store)},
          {.maps = eplb::ExpertMaps::initial(1, kExperts, kSlots - kExperts), .options = {.window = 2, .step_interval = 2}, .mode = mode});
      auto p = params<Dual>(balancer.placement(0));
      p.layer.mapping = balancer.mapping(0);
      p.layer.load = balancer.load(0);
      p.dual_batch.expert_workers = workers;
      Dual dual(self, store.view(), p);
      dual.decide_dual_batch(true);
      balancer.attach(0, dual);
      Packing::kernels_told = 0;
      int commits = 0;
      for (int step = 0; step < 5000 && commits < 3; ++step) {
        if (balancer.pending()) std::this_thread::sleep_for(std::chrono::microseconds(200));  // its worker may need this core
        ASSERT_EQ(forward(dual), want) << "step " << step;
        for (int s = 0; s < kSlots; ++s) {  // another expert is hot after each move
          balancer.load(0).load_counter[s] += balancer.maps().physical_to_logical()(0, s) == (commits + 1) % kExperts ? 1000 : 1;
        }
        commits += static_cast<int>(balancer.step().committed_layers.size());
      }
      ASSERT_EQ(commits, 3);
      EXPECT_EQ(forward(dual), want);
      EXPECT_EQ(Packing::kernels_told, workers > 0 ? 6 : 3);
    }
  }
}

// ---- a forward while weights move: docs/semantics/runner.md §9.

/// A group of one rank that calls `between` whenever its ranks would agree.
struct WatchedGroup : eplb::SelfGroup {
  std::function<void()> between;
  std::vector<std::uint64_t> all_gather(std::uint64_t word) const {
    if (between) between();
    return eplb::SelfGroup::all_gather(word);
  }
};
/// What a forward on another thread throws, or nullopt.
template <class R>
std::optional<Error> error_on_another_thread(R& runner, std::vector<float> const& want) {
  std::optional<Error> error;
  std::thread([&] {
    try {
      EXPECT_EQ(forward(runner), want);
    } catch (Error const& e) {
      error = e;
    }
  }).join();
  return error;
}
void expect_refused(std::optional<Error> const& error) {
  ASSERT_TRUE(error.has_value()) << "the forward was not refused";
  EXPECT_EQ(error->code(), ErrorCode::state);
  EXPECT_NE(error->message().find("forward: the weights of layer 0 are being moved"), std::string::npos) << error->message();
}

template <class R>
void refuses_while_weights_move(typename R::Params const& p, Store const& store) {
  std::vector<float> const want = expected(store);
  comm::Self<> self;
  R runner(self, store.view(), p);
  std::vector<float> const x = numbers(1, kRows * kHidden, 1.0F), logits = numbers(2, kRows * kExperts, 1.0F);
  std::vector<std::int32_t> const ids(kRows * kTopK, kNoExpert);
  std::vector<float> const weights(ids.size(), 1.0F);
  std::vector<float> y(x.size(), std::numeric_limits<float>::quiet_NaN());
  {
    std::array const users{&runner.weight_move()};
    eplb::HoldForwards const held(7, users);
    for (int call = 0; call < 2; ++call) {
      expect_error(ErrorCode::state, "forward: the weights of layer 7 are being moved", [&] {
        runner.forward(make_rows(x.data(), kRows, kHidden), make_rows(logits.data(), kRows, kExperts), make_rows(y.data(), kRows, kHidden));
      });
      expect_error(ErrorCode::state, "layer 7", [&] {
        runner.forward_routed(make_rows(x.data(), kRows, kHidden), make_rows(ids.data(), kRows, kTopK),
                              make_rows(weights.data(), kRows, kTopK), make_rows(y.data(), kRows, kHidden));
      });
      expect_error(ErrorCode::state, "layer 7", [&] {
        runner.layer().forward(make_rows(x.data(), kRows, kHidden), make_rows(logits.data(), kRows, kExperts),
                               make_rows(y.data(), kRows, kHidden));
      });
    }
    EXPECT_TRUE(std::all_of(y.begin(), y.end(), [](float v) { return v != v; })) << "nothing was written";
  }
  EXPECT_EQ(forward(runner), want);
}
TEST(RunnerWeightMove, ForwardsAreRefused) {
  Store const store = store_of(kExperts);
  ExpertPlacement const placement(kExperts, 1);
  refuses_while_weights_move<Plain>(params<Plain>(placement), store);
  refuses_while_weights_move<Dual>(params<Dual>(placement), store);
  using Chunked = Runner<LayerOf<Packing>, ChunkParts>;
  for (std::int64_t const most_rows : {0, 6}) {
    auto p = params<Chunked>(placement);
    p.chunking = {.rows = 4, .most_rows = most_rows};
    refuses_while_weights_move<Chunked>(p, store);
  }
}

/// A block of one rank under load balancing.
struct Served {
  explicit Served(eplb::MoveMode mode)
      : balancer(self, group, {eplb::expert_tensors(store)},
                 {.maps = eplb::ExpertMaps::initial(1, kExperts, kSlots - kExperts),
                  .options = {.window = 2, .step_interval = 2},
                  .mode = mode}) {
    auto p = params<Dual>(balancer.placement(0));
    p.layer.mapping = balancer.mapping(0);
    p.layer.load = balancer.load(0);
    dual.emplace(self, store.view(), p);
    balancer.attach(0, *dual);
  }
  ~Served() { Packing::when_told = {}; }
  std::vector<float> const want = expected(store_of(kExperts));
  Store store = store_of(kSlots);
  comm::Self<> self;
  WatchedGroup group;
  eplb::RuntimeBalancer<comm::Self<>, WatchedGroup> balancer;
  std::optional<Dual> dual;
};

// The experts' own repacking lies between the first byte that changes and the last.
TEST(RunnerWeightMove, ReplacingWeightsRefusesForwardsOnOtherThreads) {
  for (eplb::MoveMode const mode : {eplb::MoveMode::pause, eplb::MoveMode::stepwise, eplb::MoveMode::background}) {
    SCOPED_TRACE(name(mode));
    Served s(mode);
    int told = 0, commits = 0;
    Packing::when_told = [&] {
      ++told;
      expect_refused(error_on_another_thread(*s.dual, s.want));
    };
    for (int step = 0; step < 5000 && commits < 2; ++step) {
      if (s.balancer.pending()) std::this_thread::sleep_for(std::chrono::microseconds(200));  // its worker may need this core
      ASSERT_EQ(forward(*s.dual), s.want) << "step " << step;
      for (int slot = 0; slot < kSlots; ++slot) {
        s.balancer.load(0).load_counter[slot] += s.balancer.maps().physical_to_logical()(0, slot) == (commits + 1) % kExperts ? 1000 : 1;
      }
      commits += static_cast<int>(s.balancer.step().committed_layers.size());
    }
    EXPECT_EQ(commits, 2);
    EXPECT_EQ(told, 2);
    EXPECT_EQ(forward(*s.dual), s.want) << "after the move";
  }
}

// The agreements of a move: the two on the maps come before the first layer, the one after its transfer is inside it. Of a background move
// all come while the old weights serve.
TEST(RunnerWeightMove, ASynchronousMoveRefusesForwardsAndABackgroundMoveNone) {
  Served now(eplb::MoveMode::background);
  std::vector<bool> refused;
  now.group.between = [&] { refused.push_back(error_on_another_thread(*now.dual, now.want).has_value()); };
  now.balancer.move_to(eplb::ExpertMaps(eplb::Table<std::int32_t>({{3, 2, 1, 0, 2}}), kExperts));
  ASSERT_GE(refused.size(), 2U);
  EXPECT_FALSE(refused.front());
  EXPECT_TRUE(refused.back()) << "the transfer of the layer";
  now.group.between = {};
  EXPECT_EQ(forward(*now.dual), now.want);

  Served beside(eplb::MoveMode::background);
  int forwards = 0, commits = 0;
  beside.group.between = [&] {
    EXPECT_FALSE(error_on_another_thread(*beside.dual, beside.want).has_value());
    ++forwards;
  };
  for (int step = 0; step < 5000 && commits < 1; ++step) {
    if (beside.balancer.pending()) std::this_thread::sleep_for(std::chrono::microseconds(200));  // its worker may need this core
    for (int slot = 0; slot < kSlots; ++slot) {
      beside.balancer.load(0).load_counter[slot] += beside.balancer.maps().physical_to_logical()(0, slot) == 1 ? 1000 : 1;
    }
    commits += static_cast<int>(beside.balancer.step().committed_layers.size());
  }
  EXPECT_EQ(commits, 1);
  EXPECT_GT(forwards, 0);
}

// A transfer that fails leaves the old weights, and forwards go on.
TEST(RunnerWeightMove, AFailedTransferEndsTheRefusal) {
  Served s(eplb::MoveMode::pause);
  s.group.between = [&] {
    if (error_on_another_thread(*s.dual, s.want)) throw Error(ErrorCode::timeout, "a rank is missing");
  };
  expect_error(ErrorCode::timeout, "a rank is missing",
               [&] { s.balancer.move_to(eplb::ExpertMaps(eplb::Table<std::int32_t>({{3, 2, 1, 0, 2}}), kExperts)); });
  EXPECT_EQ(forward(*s.dual), s.want);
}

}  // namespace
