// SPDX-License-Identifier: Apache-2.0
// examples/moe/serve_sim/mpi_ranks.cpp: one step is a forward of an expert-parallel layer with replayed routing, then a step of the load
// balancer, which counts, plans and moves weights.
#include "examples/moe/serve_sim/mpi_ranks.hpp"

#include <mpi.h>

#include <chrono>
#include <random>
#include <range/v3/range/conversion.hpp>
#include <vector>

#include "examples/moe/placement.hpp"
#include "examples/moe/serve_sim/simulated_ranks.hpp"
#include "moe/activation/activation.hpp"
#include "moe/backends/all_to_all_v.hpp"
#include "moe/eplb/expert_tensors.hpp"
#include "moe/eplb/runtime_balancer.hpp"
#include "moe/experts/onednn.hpp"
#include "moe/experts/weights.hpp"
#include "moe/modular_kernel.hpp"
#include "moe/quantization/none.hpp"
#include "moe/routing/any_router.hpp"

namespace moe_tool::serve_sim {
namespace {

using moe::comm::Mpi;

struct Config : moe::LayerDefaults {
  using Activation = moe::activation::Silu;
};
using None = moe::quantization::None;
using Layer = moe::ModularKernel<Config, moe::routing::AnyRouter, None, moe::backends::AllToAllV<Mpi>, moe::experts::OneDnn>;
using Store = moe::experts::WeightStore<Config, None>;
using Group = moe::eplb::CommGroup<Mpi>;
using Balancer = moe::eplb::RuntimeBalancer<Mpi, Group>;

std::vector<float> random_values(std::uint64_t seed, std::int64_t count) {
  std::mt19937_64 random(seed);
  std::uniform_real_distribution<float> value(-0.1F, 0.1F);
  std::vector<float> out(static_cast<std::size_t>(count));
  for (float& v : out) v = value(random);
  return out;
}

moe::eplb::MoveMode move_mode(std::string const& name) {
  for (auto mode : {moe::eplb::MoveMode::stepwise, moe::eplb::MoveMode::background}) {
    if (name == moe::eplb::name(mode)) return mode;
  }
  return moe::eplb::MoveMode::pause;
}

class MpiRanks : public Ranks {
 public:
  MpiRanks(Mpi& world, Options const& o, Routing const& routing)
      : world_(world),
        options_(o),
        routing_(routing),
        weights_comm_(world.handle(), {.timeout_ms = o.timeout_ms}),
        group_comm_(world.handle(), {.timeout_ms = o.timeout_ms}),
        group_(group_comm_, {}, o.timeout_ms),
        store_((routing.num_experts() + o.replicas) / world.size(), o.hidden, o.intermediate, true),
        balancer_(weights_comm_, group_, filled(moe::eplb::ExpertMaps::initial(1, routing.num_experts(), o.replicas)), params()),
        layer_(world, store_.view(), layer_params()),
        hidden_(random_values(o.seed + 1000 + static_cast<std::uint64_t>(world.rank()), o.tokens * o.hidden)),
        output_(hidden_.size()),
        ids_(static_cast<std::size_t>(o.tokens * routing.topk())),
        weights_(ids_.size(), 1.0F / static_cast<float>(routing.topk())) {
    balancer_.attach(0, layer_);
  }
  int size() const override { return world_.size(); }
  moe::eplb::ExpertMaps const& maps() const override { return balancer_.maps(); }

  Step step(std::int64_t number) override {
    std::int64_t const m = options_.tokens;
    int const k = routing_.topk();
    routing_.fill(number, world_.rank() * m, m, m * world_.size(), ids_.data());
    world_.barrier({});
    auto const start = std::chrono::steady_clock::now();
    layer_.forward_routed(moe::make_rows(static_cast<float const*>(hidden_.data()), m, options_.hidden),
                          moe::make_rows(static_cast<std::int32_t const*>(ids_.data()), m, k),
                          moe::make_rows(static_cast<float const*>(weights_.data()), m, k),
                          moe::make_rows(output_.data(), m, options_.hidden));
    double const mine = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    moe::eplb::RuntimeStep const done = balancer_.step({.log_stats = true});
    Step out;
    MPI_Allreduce(&mine, &out.seconds, 1, MPI_DOUBLE, MPI_MAX, world_.handle());
    auto const slots = done.reports.at(0).rank_tokens.row(0);
    out.rank_slots.assign(slots.begin(), slots.end());
    out.rebalanced = !done.committed_layers.empty();
    return out;
  }

 private:
  /// This rank's slots with the weights of their experts.
  std::vector<moe::eplb::LayerTensors> filled(moe::eplb::ExpertMaps const& maps) {
    auto const slots = maps.physical_to_logical().row(0);
    std::int64_t const local = maps.num_physical() / world_.size();
    for (std::int64_t l = 0; l < local; ++l) {
      auto const expert = static_cast<std::uint64_t>(slots[static_cast<std::size_t>(world_.rank() * local + l)]);
      store_.set_expert(l, random_values(2 * expert, 2 * options_.intermediate * options_.hidden).data(),
                        random_values(2 * expert + 1, options_.hidden * options_.intermediate).data());
    }
    return {moe::eplb::expert_tensors(store_)};
  }
  Balancer::Params params() const {
    return {.maps = moe::eplb::ExpertMaps::initial(1, routing_.num_experts(), options_.replicas),
            .options = balancer_options(options_),
            .mode = move_mode(options_.eplb),
            .timeout_ms = options_.timeout_ms};
  }
  Layer::Params layer_params() {
    return {.shape = {options_.hidden, options_.intermediate, routing_.num_experts(), routing_.topk()},
            .max_tokens_per_rank = options_.tokens,
            .placement = balancer_.placement(0),
            .router = {.num_experts = routing_.num_experts(), .topk = routing_.topk()},
            .mapping = balancer_.mapping(0),
            .load = balancer_.load(0)};
  }

  Mpi& world_;
  Options options_;
  Routing const& routing_;
  Mpi weights_comm_, group_comm_;
  Group group_;
  Store store_;
  Balancer balancer_;
  Layer layer_;
  std::vector<float> hidden_, output_;  // [tokens, hidden]
  std::vector<std::int32_t> ids_;       // [tokens, topk]
  std::vector<float> weights_;
};

}  // namespace

std::unique_ptr<Ranks> make_mpi_ranks(Mpi& world, Options const& options, Routing const& routing) {
  check_slots(routing.num_experts(), options.replicas, world.size());
  return std::make_unique<MpiRanks>(world, options, routing);
}

}  // namespace moe_tool::serve_sim
