// SPDX-License-Identifier: Apache-2.0
// tests/mpi/eplb_serving.hpp: runners that serve while their experts move, one composition at a time: every step's output against the same
// step without load balancing, and every expert slot's bytes against its expert's.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <deque>
#include <memory>
#include <numeric>
#include <thread>

#include "moe/comm/self.hpp"
#include "moe/eplb/runtime_balancer.hpp"
#include "moe/runner/host/primitives.hpp"
#include "moe/runner/runner.hpp"
#include "registry_layers.hpp"

namespace moe_test {

using moe::eplb::ExpertMaps;
using moe::eplb::MoveMode;
using moe::eplb::RuntimeStep;
using moe::eplb::Table;

inline constexpr int kServingLayers = 2, kServingExperts = 12;
inline constexpr std::int64_t kServingTokens = 6;

/// A communicator of weights that fails when told to, before anything is sent.
class WeightsComm : public moe::comm::Mpi {
 public:
  using Mpi::Mpi;
  bool fails = false;
  void all_to_all_v(void const* in, std::int64_t const* in_counts, std::int64_t const* in_offsets, void* out,
                    std::int64_t const* out_counts, std::int64_t const* out_offsets, moe::HostStream stream) {
    if (fails) throw moe::Error(moe::ErrorCode::capacity, "no memory for the message");
    Mpi::all_to_all_v(in, in_counts, in_offsets, out, out_counts, out_offsets, stream);
  }
};
static_assert(moe::Communicator<WeightsComm>);

/// The communicators of one test: weights, tokens, agreement.
struct ServingRanks {
  explicit ServingRanks(MPI_Comm comm = MPI_COMM_WORLD, std::int64_t weights_ms = 20'000)
      : weights(comm, {.timeout_ms = weights_ms}),
        tokens(comm, {.timeout_ms = 20'000}),
        engine(comm, {.timeout_ms = 30'000}),
        group(engine) {}
  int rank() const { return engine.rank(); }
  int size() const { return engine.size(); }
  WeightsComm weights;
  moe::comm::Mpi tokens, engine;
  moe::eplb::CommGroup<moe::comm::Mpi> group;
  // For a backend of one rank.
  moe::comm::Self<> self;
  moe::eplb::SelfGroup self_group;
};

/// Counts what a forward makes of its rows.
struct ServingPasses : moe::NoProbe {
  int experts = 0;  ///< calls of the experts: of passes and halves
  void begin(moe::Phase p) { experts += p == moe::Phase::experts ? 1 : 0; }
};

/// A model of two layers. maps: of load balancing, or none. Parts: with chunks, a pass has two thirds of a forward's rows; with two halves,
/// every batch is split.
template <class Quant, class Backend, class Experts, class Parts = moe::RunnerDefaults>
class Serving {
 public:
  using Runner = moe::Runner<RegistryLayer<Quant, Backend, Experts>, Parts>;
  using Store = moe::experts::WeightStore<RegistryConfig, Quant>;
  static constexpr bool kLocal = std::is_same_v<typename Backend::Comm, moe::comm::Self<>>;
  using Weights = std::conditional_t<kLocal, moe::comm::Self<>, WeightsComm>;
  using Group = std::conditional_t<kLocal, moe::eplb::SelfGroup, moe::eplb::CommGroup<moe::comm::Mpi>>;
  using Balancer = moe::eplb::RuntimeBalancer<Weights, Group>;
  /// Whether another map may only change which rank computes a product, never the order of a sum.
  static bool same_bits(int topk) {
    bool const fixed_products = std::is_same_v<Experts, moe::experts::Reference<float>>;
    return fixed_products && (topk == 1 || kLocal || Backend::kReduction == moe::TopKReduction::backend);
  }

  Serving(ServingRanks& ranks, int topk) : Serving(ranks, topk, initial(ranks, 0)) { build(nullptr); }
  Serving(ServingRanks& ranks, int topk, typename Balancer::Params params) : Serving(ranks, topk, params.maps) {
    balancer_.emplace(weights(), group(), tensors(), params);
    build(&*balancer_);
  }

  static ExpertMaps initial(ServingRanks const& ranks, int more_slots_per_rank) {
    return ExpertMaps::initial(kServingLayers, kServingExperts, more_slots_per_rank * (kLocal ? 1 : ranks.size()));
  }
  Balancer& balancer() { return *balancer_; }
  std::vector<moe::eplb::LayerTensors> tensors() {
    std::vector<moe::eplb::LayerTensors> out;
    for (Store& store : stores_) out.push_back(moe::eplb::expert_tensors(store));
    return out;
  }

  /// Outputs of both layers, [layers · T · H]. Which experts are hot depends on the step.
  std::vector<float> forward(int step) {
    moe::NoProbe probe;
    return forward(step, probe);
  }
  template <class Probe>
  std::vector<float> forward(int step, Probe& probe) {
    std::vector<float> all;
    for (int l = 0; l < kServingLayers; ++l) {
      auto const seed = static_cast<unsigned>(1000 * step + 100 * l + ranks_.rank());
      std::vector<float> const hidden = uniform(kServingTokens * kHidden, 1.7, seed);
      std::vector<float> logits = uniform(kServingTokens * kServingExperts, 2.5, seed + 50'000);
      for (std::size_t i = 0; i < logits.size(); ++i) {
        auto const e = static_cast<int>(i) % kServingExperts;
        if (e == (step / 8 * 5 + l) % kServingExperts || e == (step / 8 * 7 + 3) % kServingExperts) logits[i] += 3.0F;
      }
      std::vector<float> out(hidden.size());
      runners_[static_cast<std::size_t>(l)].forward(moe::make_rows(hidden.data(), kServingTokens, kHidden),
                                                    moe::make_rows(std::as_const(logits).data(), kServingTokens, kServingExperts),
                                                    moe::make_rows(out.data(), kServingTokens, kHidden), {}, {}, probe);
      all.insert(all.end(), out.begin(), out.end());
    }
    return all;
  }
  RuntimeStep step(moe::eplb::StepInput const& input = {}) { return balancer_->step(input); }

  /// "" if every expert slot holds the bytes of its expert.
  std::string wrong_slot(ExpertMaps const& maps) {
    auto const from = moe::eplb::expert_tensors(encoded_experts<Quant>(kServingExperts));
    for (int l = 0; l < kServingLayers; ++l) {
      auto const held = moe::eplb::expert_tensors(stores_[static_cast<std::size_t>(l)]);
      for (int s = 0; s < slots_; ++s) {
        int const e = maps.physical_to_logical()(l, rank() * slots_ + s);
        for (std::size_t t = 0; t < held.size(); ++t) {
          if (std::memcmp(held[t].data + s * held[t].stride, from[t].data + logical_source(l, e) * from[t].stride,
                          static_cast<std::size_t>(held[t].bytes)) != 0) {
            return moe::text("layer ", l, ", expert slot ", s, ", expert ", e, ", ", held[t].name);
          }
        }
      }
    }
    return "";
  }

 private:
  Serving(ServingRanks& ranks, int topk, ExpertMaps const& maps)
      : ranks_(ranks), topk_(topk), slots_(maps.num_physical() / (kLocal ? 1 : ranks.size())) {
    for (int l = 0; l < kServingLayers; ++l) {
      stores_.emplace_back(slots_, kHidden, kIntermediate, true);
      auto const from = moe::eplb::expert_tensors(encoded_experts<Quant>(kServingExperts));
      auto const to = moe::eplb::expert_tensors(stores_.back());
      for (int s = 0; s < slots_; ++s) {
        int const e = logical_source(l, maps.physical_to_logical()(l, rank() * slots_ + s));
        for (std::size_t t = 0; t < to.size(); ++t) {
          std::memcpy(to[t].data + s * to[t].stride, from[t].data + e * from[t].stride, static_cast<std::size_t>(to[t].bytes));
        }
      }
    }
  }
  /// The second layer has the first one's experts in the other order.
  static int logical_source(int layer, int expert) { return layer == 0 ? expert : kServingExperts - 1 - expert; }
  int rank() const { return kLocal ? 0 : ranks_.rank(); }
  Weights& weights() {
    if constexpr (kLocal) {
      return ranks_.self;
    } else {
      return ranks_.weights;
    }
  }
  Group& group() {
    if constexpr (kLocal) {
      return ranks_.self_group;
    } else {
      return ranks_.group;
    }
  }
  auto& tokens() {
    if constexpr (kLocal) {
      return ranks_.self;
    } else {
      return ranks_.tokens;
    }
  }
  void build(Balancer* balancer) {
    for (int l = 0; l < kServingLayers; ++l) {
      typename Runner::Params p{
          .layer = {.shape = {kHidden, kIntermediate, kServingExperts, topk_, false},
                    .max_tokens_per_rank = kServingTokens,
                    .placement = balancer ? balancer->placement(l) : moe::ExpertPlacement(kServingExperts, kLocal ? 1 : ranks_.size()),
                    .router = {.num_experts = kServingExperts, .topk = topk_, .renorm = moe::routing::Renorm::sum}}};
      if constexpr (requires { p.chunking.rows; }) p.layer.max_tokens_per_rank = kServingTokens * 2 / 3;
      if constexpr (requires { p.dual_batch.min_rows; }) p.dual_batch.min_rows = 2;
      if (balancer) {
        p.layer.mapping = balancer->mapping(l);
        p.layer.load = balancer->load(l);
      }
      runners_.emplace_back(tokens(), stores_[static_cast<std::size_t>(l)].view(), p);
      if (balancer) balancer->attach(l, runners_.back());
    }
  }

  ServingRanks& ranks_;
  int topk_;
  int slots_;  // a rank
  std::deque<Store> stores_;
  std::optional<Balancer> balancer_;
  std::deque<Runner> runners_;
};

/// What a composition is tested with.
struct ServingCases {
  std::vector<int> topk{1, 3};
  std::vector<MoveMode> modes{MoveMode::pause, MoveMode::stepwise, MoveMode::background};
  int moves = 3;
  bool bits = false;                   ///< the composition's outputs do not depend on the maps
  int experts_calls = kServingLayers;  ///< of one forward of the model
};

/// Serves until experts have moved so many times, in each mode and for each number of experts per token. Parts: of the runners whose
/// experts move; those that they are compared with have none.
template <class Quant, class Backend, class Experts, class Parts>
class ServingTest : public testing::Test {
 public:
  explicit ServingTest(ServingCases cases) : cases_(std::move(cases)) {}
  void TestBody() override {
    using Model = Serving<Quant, Backend, Experts, Parts>;
    ServingRanks ranks;
    for (int topk : cases_.topk) {
      ASSERT_TRUE(!cases_.bits || Model::same_bits(topk));
      Serving<Quant, Backend, Experts> plain(ranks, topk);
      std::vector<std::vector<float>> expected;
      for (MoveMode mode : cases_.modes) {
        Model model(ranks, topk, {.maps = Model::initial(ranks, 1), .options = {.window = 2, .step_interval = 4}, .mode = mode});
        int finished = 0, step = 0;
        for (; step < 4000 && finished < cases_.moves; ++step) {
          // Plain outputs are made once for all modes; every rank makes the same forwards, since all have the same events.
          int const input = step % 32;
          if (static_cast<int>(expected.size()) <= input) expected.push_back(plain.forward(input));
          ServingPasses passes;
          std::vector<float> const got = model.forward(input, passes);
          ASSERT_EQ(passes.experts, cases_.experts_calls) << "as many passes and halves as the parts say";
          if (Model::same_bits(topk)) {
            ASSERT_EQ(got, expected[static_cast<std::size_t>(input)]) << name(mode) << ", step " << step;
          } else {
            Tolerance tolerance;
            if (!std::is_same_v<Experts, moe::experts::Reference<float>>) tolerance.step = grid_step<Quant>();
            expect_close_rows(got, expected[static_cast<std::size_t>(input)], tolerance, "against no load balancing");
            ASSERT_FALSE(HasFatalFailure()) << name(mode) << ", step " << step;
          }
          RuntimeStep const done = model.step();
          if (!done.committed_layers.empty()) {
            ASSERT_EQ(model.wrong_slot(model.balancer().maps()), "") << name(mode) << ", step " << step;
          }
          finished += done.finished ? 1 : 0;
          if (model.balancer().pending()) std::this_thread::sleep_for(std::chrono::microseconds(200));
        }
        EXPECT_EQ(finished, cases_.moves) << name(mode) << ", " << step << " steps";
        EXPECT_GT(model.balancer().stats().slots_changed, 0) << name(mode);
      }
    }
  }

 private:
  ServingCases cases_;
};

template <class Quant, class Backend, class Experts, class Parts = moe::RunnerDefaults>
void register_serving(char const* file, int line, ServingCases const& cases = {}, char const* name = "ExpertsMoveUnderLoad") {
  std::string const suite = moe::text("Serving_", Quant::kName, "_", Backend::kName, "_", Experts::kName);
  testing::RegisterTest(suite.c_str(), name, nullptr, nullptr, file, line,
                        [cases]() -> testing::Test* { return new ServingTest<Quant, Backend, Experts, Parts>(cases); });
}

}  // namespace moe_test
