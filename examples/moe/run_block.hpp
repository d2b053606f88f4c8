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
#include "moe/eplb/map_tables.hpp"
#include "moe/models/block_runner.hpp"
#include "moe/models/registry.hpp"
#include "moe/runner/description.hpp"
#ifdef MOE_HAS_CUDA
#include "moe/runner/nvtx.hpp"
#endif

// Compiled once, in load_weights.cpp.
extern template class moe::runner::gate::Any::Part<moe::space::host, float>;
extern template class moe::runner::transform::Projection<float>::Part<moe::space::host, float>;
extern template class moe::runner::shared::Separate<moe::experts::OneDnn, float>::Part<moe::space::host, float>;

namespace moe_tool {

/// Adds up wall time per phase. `finish`: waits for what the phase enqueued. `after_pass`: called once for each chunk, when experts have
/// run for the first time after its routing (of two halves each has its experts; dispatch and combine may be in two parts).
template <class Finish, class AfterPass>
class PhaseTimer {
 public:
  PhaseTimer(Finish finish, AfterPass after_pass) : finish_(finish), after_pass_(after_pass) {}
  void begin(moe::Phase) { start_ = Clock::now(); }
  void end(moe::Phase p) {
    finish_();
    seconds_[static_cast<std::size_t>(p)] += std::chrono::duration<double>(Clock::now() - start_).count();
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
  Seconds const& seconds() const { return seconds_; }

 private:
  using Clock = std::chrono::steady_clock;
  Finish finish_;
  AfterPass after_pass_;
  Clock::time_point start_;
  Seconds seconds_{};
  bool routed_ = false;
  int second_halves_ = 0;
};

/// One rank of a grid whose batches are exchanged in two halves.
struct HalvesParts : moe::models::GridBlockParts<float, moe::comm::Mpi> {
  using DualBatch = moe::runner::dual_batch::Halves;
};

/// The communicator of a backend: MPI's of the ranks that the layer connects, or the stateless one of a single rank.
template <class Comm>
Comm& comm_of(Job const& job) {
  if constexpr (std::is_same_v<Comm, moe::comm::Mpi>) {
    return moe::runner::layer_group(job.moe) == moe::runner::LayerGroup::tokens ? *job.tokens_group : *job.comm;
  } else {
    static Comm self;
    return self;
  }
}

/// Waits for the work that a block in the CUDA space has enqueued; a host block has none left.
template <class Block>
void finish(Block& block) {
  if constexpr (Block::kOnDevice) {
    if constexpr (requires { block.layer().exchange().wait(nullptr); }) {
      block.layer().exchange().wait(nullptr);  // with the deadline
    } else {
      moe::check_cuda(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize");  // kernels that wait for peers have the deadline
    }
  }
}

/// Appends the routing of the last chunk.
template <class Block>
void add_routing(Block& block, JobResult& result) {
  auto append = [](auto& to, auto const& from) { to.insert(to.end(), from.begin(), from.end()); };
  append(result.topk_ids, block.topk_ids());
  append(result.topk_weights, block.topk_weights());
  ++result.passes;
}

/// Nanoseconds that this rank has waited for each rank of `comm`, in the windows of the block's exchange or in the communicator.
template <class Block, class Comm>
std::vector<std::uint64_t> waited_ns(Block& block, Comm const& comm) {
  if constexpr (requires { block.layer().exchange().window().waited_ns(); }) {
    return block.layer().exchange().window().waited_ns();
  } else if constexpr (requires { comm.waited_ns(); }) {
    return comm.waited_ns();
  } else {
    return {};
  }
}

/// Waits of the timed repetitions.
class Waits {
 public:
  explicit Waits(Job const& job) : job_(job) {}
  template <class Block, class Comm>
  void start(Block& block, Comm const& comm) {
    layer_ = waited_ns(block, comm);
    tp_ = job_.tp_group->waited_ns();
  }
  /// [R] of a mean forward.
  template <class Block, class Comm>
  std::vector<double> seconds(Block& block, Comm const& comm) const {
    moe::MoeParallel const& moe = job_.moe;
    std::vector<double> out(static_cast<std::size_t>(moe.flat_size), 0.0);
    auto const add = [&](std::vector<std::uint64_t> const& before, std::vector<std::uint64_t> const& now, auto const& world_rank) {
      for (std::size_t r = 0; r < now.size() && r < before.size(); ++r) {
        out[static_cast<std::size_t>(world_rank(static_cast<int>(r)))] +=
            static_cast<double>(now[r] - before[r]) * 1e-9 / job_.options.repeat;
      }
    };
    bool const tokens = moe::runner::layer_group(moe) == moe::runner::LayerGroup::tokens;
    add(layer_, waited_ns(block, comm), [&](int r) { return tokens ? r * moe.tp_size + moe.tp_rank : r; });
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

/// One forward, with a range of NVTX for each stage if that was asked for.
template <class Block, class Timer>
void forward(Block& block, Job const& job, std::vector<float>& output, Timer& timer) {
#ifdef MOE_HAS_CUDA
  if (job.options.nvtx) {
    moe::runner::NvtxProbe nvtx;
    moe::runner::BothProbes both(nvtx, timer);
    block.forward(job.hidden, job.tokens(), output, both, job.options.sequence_length);
    return;
  }
#endif
  block.forward(job.hidden, job.tokens(), output, timer, job.options.sequence_length);
}

template <class Quant, class Backend, class Experts, class Parts>
JobResult run_parts(Job const& job, typename Backend::Comm& comm) {
  using Layer = moe::registry::LayerFor<Backend, Experts>;
  constexpr bool kGrid = Backend::Space::kKind == moe::SpaceKind::host;
  using Block = moe::models::BlockRunner<Quant, Backend, Experts, typename Layer::Weight, typename Layer::Act, float, Parts>;
  std::optional<Block> block;
  moe::io::HostLayerWeights<float> weights;
  together(*job.comm, [&] {
    weights = load_weights(job);
    moe::quantization::check_shape<Quant>(job.description.expert_hidden(), weights.intermediate);
  });
  moe::models::BlockRunnerOptions<Parts> options{.shared = job.sharding()};
  if constexpr (kGrid) options.parallel = {job.moe, job.tp_group};
  std::optional<moe::eplb::MapTables<typename Backend::Space>> tables;
  if (job.maps) {
    tables.emplace(*job.maps);
    options.mapping = tables->mapping(0, job.source_rank(), job.moe.ep_size);
    options.load = {.load_counter = tables->load_counter(0)};
  }
  together(*job.comm, [&] {
    block.emplace(comm, std::move(weights), *job.placement, job.layer_rows(), Quant{}, typename Backend::Params{}, options);
  });

  JobResult result;
  if constexpr (std::is_same_v<Parts, HalvesParts>) {
    if (job.options.dual_batch == "on") block->runner().decide_dual_batch(true);
  }
  result.log = moe::runner::description(block->runner());
  result.output.resize(job.hidden.size());
  Waits waits(job);
  double best = HUGE_VAL;
  for (int i = 0; i <= job.options.repeat; ++i) {  // the first run only warms up
    job.comm->barrier({});
    if (i == 1) waits.start(*block, comm);
    PhaseTimer timer([&] { finish(*block); },
                     [&] {
                       if (kGrid && i == 0) add_routing(*block, result);
                     });
    forward(*block, job, result.output, timer);
    if (i == 0) result.passes_in_halves = timer.second_halves();
    if (i == 0 && job.maps) result.slot_load = load_of(*tables, job.maps->num_physical());
    double const total = ranges::accumulate(timer.seconds(), 0.0);
    if (i > 0 && total < best) {
      best = total;
      result.seconds = timer.seconds();
    }
  }
  if (!kGrid) add_routing(*block, result);
  result.waited = waits.seconds(*block, comm);
  result.layer_bytes = block->layer().bytes();
  return result;
}

/// E_CONFIG for --dual-batch on over a backend that cannot send and wait apart; auto then means off, as it does for rows that cannot be
/// cut.
template <class Quant, class Backend, class Experts>
JobResult run_block(Job const& job, typename Backend::Comm& comm) {
  if constexpr (Backend::Space::kKind != moe::SpaceKind::host) {
    return run_parts<Quant, Backend, Experts, moe::models::BlockParts<float>>(job, comm);
  } else {
    bool const on = job.options.dual_batch == "on";
    if constexpr (moe::facts::is_asynchronous<Backend>()) {
      if (on || (job.options.dual_batch == "auto" && job.layer_rows() > 1)) {
        return run_parts<Quant, Backend, Experts, HalvesParts>(job, comm);
      }
    } else if (on) {
      throw moe::Error(moe::ErrorCode::config, moe::rules::DualBatchNeedsHalves::kSentence);
    }
    return run_parts<Quant, Backend, Experts, moe::models::GridBlockParts<float, moe::comm::Mpi>>(job, comm);
  }
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
