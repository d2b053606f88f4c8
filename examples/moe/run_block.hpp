// SPDX-License-Identifier: Apache-2.0
// examples/moe/run_block.hpp: one composition run on one job: load this rank's experts, construct, warm up, measure.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "examples/moe/job.hpp"
#include "moe/models/block_runner.hpp"
#include "moe/models/registry.hpp"

// Compiled once, in load_weights.cpp.
extern template class moe::runner::gate::Any::Part<moe::space::host, float>;
extern template class moe::runner::transform::Projection<float>::Part<moe::space::host, float>;
extern template class moe::runner::shared::Separate<moe::experts::OneDnn, float>::Part<moe::space::host, float>;

namespace moe_tool {

/// Adds up wall time per phase. `finish`: waits for what the phase enqueued.
template <class Finish>
class PhaseTimer {
 public:
  explicit PhaseTimer(Finish finish) : finish_(finish) {}
  void begin(moe::Phase) { start_ = Clock::now(); }
  void end(moe::Phase p) {
    finish_();
    seconds_[static_cast<std::size_t>(p)] += std::chrono::duration<double>(Clock::now() - start_).count();
  }
  std::array<double, 4> const& seconds() const { return seconds_; }

 private:
  using Clock = std::chrono::steady_clock;
  Finish finish_;
  Clock::time_point start_;
  std::array<double, 4> seconds_{};
};

/// The communicator of a backend: MPI's, or the stateless one of a single rank.
template <class Comm>
Comm& comm_of(Job const& job) {
  if constexpr (std::is_same_v<Comm, moe::comm::Mpi>) {
    return *job.comm;
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

template <class Quant, class Backend, class Experts>
JobResult run_block(Job const& job, typename Backend::Comm& comm) {
  using Layer = moe::registry::LayerFor<Backend, Experts>;
  using Block = moe::models::BlockRunner<Quant, Backend, Experts, typename Layer::Weight, typename Layer::Act, float>;
  std::optional<Block> block;
  moe::io::HostLayerWeights<float> weights;
  together(*job.comm, [&] {
    moe::quantization::check_shape<Quant>(job.description.expert_hidden(), job.description.intermediate);
    weights = load_weights(job);
  });
  together(*job.comm, [&] { block.emplace(comm, std::move(weights), *job.placement, job.max_rows, Quant{}, typename Backend::Params{}); });

  JobResult result;
  result.output.resize(job.hidden.size());
  double best = HUGE_VAL;
  for (int i = 0; i <= job.options.repeat; ++i) {  // the first run only warms up
    job.comm->barrier({});
    PhaseTimer timer([&] { finish(*block); });
    block->forward(job.hidden, job.tokens(), result.output, timer);
    double const total = timer.seconds()[0] + timer.seconds()[1] + timer.seconds()[2] + timer.seconds()[3];
    if (i > 0 && total < best) {
      best = total;
      result.seconds = timer.seconds();
    }
  }
  result.topk_ids = block->topk_ids();
  result.topk_weights = block->topk_weights();
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
