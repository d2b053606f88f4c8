// SPDX-License-Identifier: Apache-2.0
// examples/moe/run_block.hpp: one composition run on one job: load this rank's experts, construct, warm up, measure.
#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <optional>
#include <range/v3/numeric/accumulate.hpp>
#include <string>
#include <utility>
#include <vector>

#include "examples/moe/job.hpp"
#include "examples/moe/stored_experts.hpp"
#include "moe/eplb/map_tables.hpp"
#include "moe/models/block_runner.hpp"
#include "moe/models/registry.hpp"
#include "moe/runner/description.hpp"
#include "moe/runner/probes.hpp"
#ifdef MOE_HAS_CUDA
#include "moe/runner/nvtx.hpp"
#endif

// Compiled once, in load_weights.cpp.
extern template class moe::runner::gate::Any::Part<moe::space::host, float>;
extern template class moe::runner::transform::Projection<float>::Part<moe::space::host, float>;
extern template class moe::runner::shared::Separate<moe::experts::OneDnn, float>::Part<moe::space::host, float>;

namespace moe_tool {

/// Adds up wall time per phase.
class PhaseTimer {
 public:
  void begin(moe::Phase) { start_ = Clock::now(); }
  void end(moe::Phase p) { seconds_[static_cast<std::size_t>(p)] += std::chrono::duration<double>(Clock::now() - start_).count(); }
  Seconds const& seconds() const { return seconds_; }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point start_;
  Seconds seconds_{};
};

/// Calls after_pass() once for each chunk, when experts have run for the first time after its routing (of two halves each has its experts;
/// dispatch and combine may be in two parts).
template <class AfterPass>
class PassProbe {
 public:
  explicit PassProbe(AfterPass after_pass) : after_pass_(after_pass) {}
  void begin(moe::Phase) {}
  void end(moe::Phase p) {
    if (p == moe::Phase::route) routed_ = true;
    if (p != moe::Phase::experts) return;
    if (routed_) {
      after_pass_();
    } else {
      ++second_halves_;
    }
    routed_ = false;
  }
  int second_halves() const { return second_halves_; }

 private:
  AfterPass after_pass_;
  bool routed_ = false;
  int second_halves_ = 0;
};

/// One rank of a grid over a backend that can exchange a batch in two halves.
struct HalvesParts : moe::models::GridBlockParts<float, moe::comm::Mpi> {
  using DualBatch = moe::runner::dual_batch::Halves;
};

/// The communicator of a backend: MPI's of the ranks that the layer connects, or the stateless one of a single rank.
template <class Comm>
Comm& comm_of(Job const& job) {
  if constexpr (std::is_same_v<Comm, moe::comm::Mpi>) {
    return job.layer_group();
  } else {
    static Comm self;
    return self;
  }
}

/// Appends the routing of the last chunk, if the layer knows it.
template <class Block>
void add_routing(Block& block, JobResult& result) {
  ++result.passes;
  if constexpr (!Block::Runner::is_monolithic()) {
    auto append = [](auto& to, auto const& from) { to.insert(to.end(), from.begin(), from.end()); };
    append(result.topk_ids, block.topk_ids());
    append(result.topk_weights, block.topk_weights());
  }
}

/// Nanoseconds that this rank has waited for each rank of `comm`, in the windows of the layer's exchange or in the communicator; empty if
/// neither counts them.
template <class Layer, class Comm>
std::vector<std::uint64_t> waited_ns(Layer& layer, Comm const& comm) {
  if constexpr (moe::facts::counts_waits<typename Layer::Exchange>()) {
    return moe::facts::waited_ns(layer.exchange());
  } else {
    return moe::facts::waited_ns(comm);
  }
}

/// Waits of the timed repetitions.
class Waits {
 public:
  explicit Waits(Job const& job) : job_(job) {}
  template <class Layer, class Comm>
  void start(Layer& layer, Comm const& comm) {
    layer_ = waited_ns(layer, comm);
    tp_ = job_.tp_group->waited_ns();
  }
  /// [R] of a mean forward; empty if the layer has peers and counts no waits.
  template <class Layer, class Comm>
  std::vector<double> seconds(Layer& layer, Comm const& comm) const {
    if (layer_.empty() && comm.size() > 1) return {};
    moe::MoeParallel const& moe = job_.moe;
    std::vector<double> out(static_cast<std::size_t>(moe.flat_size), 0.0);
    auto const add = [&](std::vector<std::uint64_t> const& before, std::vector<std::uint64_t> const& now, auto const& world_rank) {
      for (std::size_t r = 0; r < now.size() && r < before.size(); ++r) {
        out[static_cast<std::size_t>(world_rank(static_cast<int>(r)))] +=
            static_cast<double>(now[r] - before[r]) * 1e-9 / job_.options.repeat;
      }
    };
    bool const tokens = moe::runner::layer_group(moe) == moe::runner::LayerGroup::tokens;
    add(layer_, waited_ns(layer, comm), [&](int r) { return tokens ? r * moe.tp_size + moe.tp_rank : r; });
    add(tp_, job_.tp_group->waited_ns(), [&](int r) { return moe.flat_rank - moe.tp_rank + r; });
    return out;
  }

 private:
  Job const& job_;
  std::vector<std::uint64_t> layer_, tp_;
};

/// [P] what the layer has counted since the last call.
template <class Tables>
std::vector<std::int64_t> load_of(Tables& tables, int num_physical) {
  moe::eplb::Table<std::int32_t> load(1, num_physical);
  tables.take_load(load);
  return {load.flat().begin(), load.flat().end()};
}

/// A range of NVTX for each stage, if that was asked for.
class Ranges {
 public:
  explicit Ranges([[maybe_unused]] Job const& job) {
#ifdef MOE_HAS_CUDA
    if (job.options.nvtx) nvtx_.emplace();
#endif
  }
  void begin([[maybe_unused]] moe::Phase p) {
#ifdef MOE_HAS_CUDA
    if (nvtx_) nvtx_->begin(p);
#endif
  }
  void end([[maybe_unused]] moe::Phase p) {
#ifdef MOE_HAS_CUDA
    if (nvtx_) nvtx_->end(p);
#endif
  }

#ifdef MOE_HAS_CUDA
 private:
  std::optional<moe::runner::NvtxProbe> nvtx_;
#endif
};

/// The same options of a block in either space, and the tables that they point to.
template <class Space, class Options>
void set_options(Job const& job, Options& options, std::optional<moe::eplb::MapTables<Space>>& tables) {
  options.shared = job.sharding();
  options.overlap_shared = job.options.shared_overlap != "off";
  if constexpr (requires { options.dual_batch.second_exchange; }) {
    options.dual_batch.second_exchange = job.needs_second_exchange();
  }
  if (!job.maps) return;
  tables.emplace(*job.maps);
  options.mapping = tables->mapping(0, job.source_rank(), job.moe.ep_size);
  options.load = {.load_counter = tables->load_counter(0)};
}

/// In the host space.
template <class Quant, class Backend, class Experts>
JobResult run_block(Job const& job, typename Backend::Comm& comm) {
  using Layer = moe::registry::LayerFor<Backend, Experts>;
  using Parts = std::conditional_t<moe::facts::is_asynchronous<Backend>(), HalvesParts, moe::models::GridBlockParts<float, moe::comm::Mpi>>;
  using Block = moe::models::BlockRunner<Quant, Backend, Experts, typename Layer::Weight, typename Layer::Act, float, Parts>;
  std::optional<Block> block;
  std::optional<StoredExperts<Quant, typename Layer::Weight>> stored;
  moe::io::HostLayerWeights<float> weights;
  together(*job.comm, [&] {
    stored.emplace(job);
    weights = load_weights(job, !stored->found());
    moe::quantization::check_shape<Quant>(job.description.expert_hidden(), weights.intermediate);
  });
  moe::models::BlockRunnerOptions<Parts> options{.parallel = {job.moe, job.tp_group}};
  std::optional<moe::eplb::MapTables<moe::space::host>> tables;
  set_options(job, options, tables);
  together(*job.comm, [&] {
    block.emplace(comm, std::move(weights), *job.placement, job.layer_rows(), Quant{}, typename Backend::Params{}, options,
                  stored->template fill<typename Block::Store>());
  });

  if constexpr (std::is_same_v<Parts, HalvesParts>) {
    if (job.options.dual_batch == "on") block->runner().decide_dual_batch(true);
  }
  log_choices(job, with_experts_line<Quant>(moe::runner::description(block->runner()), stored->found()));
  JobResult result;
  result.output.resize(job.hidden.size());
  Ranges nvtx(job);
  Waits waits(job);
  double best = HUGE_VAL;
  for (int i = 0; i <= job.options.repeat; ++i) {  // the first run only warms up
    job.comm->barrier({});
    if (i == 1) waits.start(block->layer(), comm);
    PhaseTimer timer;
    PassProbe passes([&] {
      if (i == 0) add_routing(*block, result);
    });
    moe::runner::BothProbes measures(passes, timer);
    moe::runner::BothProbes probe(nvtx, measures);
    block->forward(job.hidden, job.tokens(), result.output, probe, job.options.sequence_length);
    if (i == 0) result.passes_in_halves = passes.second_halves();
    if (i == 0 && job.maps) result.slot_load = load_of(*tables, job.maps->num_physical());
    double const total = ranges::accumulate(timer.seconds(), 0.0);
    if (i > 0 && total < best) {
      best = total;
      result.seconds = timer.seconds();
    }
  }
  result.waited = waits.seconds(block->layer(), comm);
  result.layer_bytes = block->layer().bytes();
  return result;
}

/// Finds the policies by name and runs their composition; a composition that the rules forbid is E_CONFIG with the rule's sentence.
template <class Quant, class Backends, class ExpertsList>
JobResult run_named(Job const& job, Backends backends, ExpertsList experts) {
  JobResult result;
  moe::registry::with_policy(backends, "backend", job.options.backend, [&](auto backend) {
    moe::registry::with_policy(experts, "experts", job.options.experts, [&](auto kernel) {
      using Backend = typename decltype(backend)::type;
      using Experts = typename decltype(kernel)::type;
      using Rules = moe::registry::CompositionOf<moe::registry::LayerFor<Backend, Experts>, Quant, Backend, Experts>;
      if constexpr (Rules::kLegal) {
        result = run_block<Quant, Backend, Experts>(job, comm_of<typename Backend::Comm>(job));
      } else {
        throw moe::Error(moe::ErrorCode::config, Rules::reason());
      }
    });
  });
  return result;
}

}  // namespace moe_tool
