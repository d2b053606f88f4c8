// SPDX-License-Identifier: Apache-2.0
// examples/moe/cuda/run_device_block.hpp: one composition run on one job on the device: the whole block, from its input to its output.
#pragma once

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "examples/moe/cuda/tp_group.hpp"
#include "examples/moe/run_block.hpp"
#include "moe/models/device_block.hpp"
#include "moe/quantization/support.hpp"
#include "moe/runner/device/event_probe.hpp"
#include "moe/runner/device/two_queues.hpp"

// Compiled once, in block_parts.cpp.
extern template class moe::runner::gate::Any::Part<moe::space::cuda, float>;
extern template class moe::runner::gate::Any::Part<moe::space::cuda, moe::bf16>;
extern template class moe::runner::transform::Projection<float>::Part<moe::space::cuda, float>;
extern template class moe::runner::transform::Projection<moe::bf16>::Part<moe::space::cuda, moe::bf16>;
extern template class moe::runner::shared::Dense<float>::Part<moe::space::cuda, float>;
extern template class moe::runner::shared::Dense<moe::bf16>::Part<moe::space::cuda, moe::bf16>;

namespace moe_tool {

/// One rank of a grid, in batches of any size.
template <class Act>
struct DeviceParts : moe::models::DeviceBlockParts<Act> {
  using Chunking = moe::runner::chunking::Lockstep;
  using Parallel = DeviceParallel;
};
/// The same over a backend that can exchange a batch in two halves.
template <class Act>
struct DeviceHalvesParts : DeviceParts<Act> {
  using DualBatch = moe::runner::dual_batch::Halves;
};

/// Rows of a job on the device.
template <class Act>
class DeviceRows {
 public:
  explicit DeviceRows(Job const& job)
      : rows_(job.rows()),
        width_(job.description.hidden),
        x_(at_least_one(rows_ * width_)),
        y_(x_.size()),
        tokens_(static_cast<std::int64_t>(job.token_ids.size())) {
    std::vector<Act> host(static_cast<std::size_t>(x_.size()));
    std::transform(job.hidden.begin(), job.hidden.end(), host.begin(), [](float v) { return moe::from_float<Act>(v); });
    x_.copy_from_host(host.data());
    if (tokens_.size() > 0) tokens_.copy_from_host(job.token_ids.data());
  }
  moe::Rows<Act const> input() const { return moe::make_rows(static_cast<Act const*>(x_.data()), rows_, width_); }
  moe::Rows<Act> output() { return moe::make_rows(y_.data(), rows_, width_); }
  moe::ForwardOptions options(Job const& job) const {
    moe::ForwardOptions o;
    o.token_ids = tokens_.size() > 0 ? tokens_.data() : nullptr;
    o.sequence_length = job.options.sequence_length;
    return o;
  }
  std::vector<float> result() const {
    std::vector<Act> host(static_cast<std::size_t>(y_.size()));
    y_.copy_to_host(host.data());
    std::vector<float> out(static_cast<std::size_t>(rows_ * width_));
    std::transform(host.begin(), host.begin() + rows_ * width_, out.begin(), [](Act v) { return moe::to_float(v); });
    return out;
  }

 private:
  static std::int64_t at_least_one(std::int64_t n) { return std::max(n, std::int64_t{1}); }

  std::int64_t rows_, width_;
  moe::Buffer<Act, moe::space::cuda> x_, y_;
  moe::Buffer<std::int64_t, moe::space::cuda> tokens_;
};

/// The routing of all chunks of a forward, collected on the device in stream order; none of experts that route inside.
class DeviceRouting {
 public:
  DeviceRouting(std::int64_t rows, std::int64_t slots) : ids_(std::max(rows * slots, std::int64_t{1})), weights_(ids_.size()) {}
  template <class Runner>
  void add(Runner& runner, cudaStream_t stream) {
    using Memory = moe::Memory<moe::space::cuda>;
    auto const ids = runner.topk_ids();
    auto const weights = runner.topk_weights();
    ++passes_;
    if (ids.size() == 0 || Runner::is_monolithic()) return;
    Memory::copy_async(ids_.data() + used_, ids.data_handle(), static_cast<std::size_t>(ids.size()) * sizeof(std::int32_t), stream);
    Memory::copy_async(weights_.data() + used_, weights.data_handle(), static_cast<std::size_t>(ids.size()) * sizeof(float), stream);
    used_ += ids.size();
  }
  /// After the stream.
  void take(JobResult& result) const {
    result.passes = passes_;
    result.topk_ids.resize(static_cast<std::size_t>(ids_.size()));
    result.topk_weights.resize(result.topk_ids.size());
    ids_.copy_to_host(result.topk_ids.data());
    weights_.copy_to_host(result.topk_weights.data());
    result.topk_ids.resize(static_cast<std::size_t>(used_));
    result.topk_weights.resize(result.topk_ids.size());
  }

 private:
  moe::Buffer<std::int32_t, moe::space::cuda> ids_;
  moe::Buffer<float, moe::space::cuda> weights_;
  std::int64_t used_ = 0;
  int passes_ = 0;
};

/// Waits for the stream; what waits for other ranks on it has a deadline. Throws the block's error, if there is one.
template <class Block>
void finish(Block& block, TpGroup& tp, cudaStream_t stream) {
  tp.wait(stream);
  block.runner().wait(stream);
  moe::Memory<moe::space::cuda>::synchronize(stream);  // kernels that wait for peers have the deadline
  block.runner().check();
}

template <class Quant, class Backend, class Experts>
JobResult run_device_block(Job const& job, typename Backend::Comm& comm, TpGroup& tp) {
  using Act = typename moe::registry::LayerFor<Backend, Experts>::Act;
  using Parts = std::conditional_t<moe::facts::is_asynchronous<Backend>(), DeviceHalvesParts<Act>, DeviceParts<Act>>;
  using Block = moe::models::DeviceBlock<Quant, Backend, Experts, Act, float, Parts>;
  std::optional<StoredExperts<Quant, Act>> stored;
  std::optional<moe::io::HostLayerWeights<float>> weights;
  together(*job.comm, [&] {
    stored.emplace(job);
    weights = load_weights(job, !stored->found());
    moe::quantization::check_shape<Quant>(job.description.expert_hidden(), weights->intermediate);
  });
  typename Block::Options options;
  if (job.options.shared_overlap == "off") options.shared_overlap_rows = 0;
  options.chunking.most_rows = job.most_rows();  // no forward asks the other ranks
  options.parallel = tp.params();
  std::optional<moe::eplb::MapTables<moe::space::cuda>> tables;
  std::optional<Block> block;
  std::optional<DeviceRows<Act>> rows;
  std::optional<DeviceRouting> routing;
  together(*job.comm, [&] {
    set_options(job, options, tables);
    rows.emplace(job);
  });
  typename Backend::Params params{};
  if constexpr (requires { params.statistics; }) params.statistics = true;  // waits for each rank
  together(*job.comm, [&] {
    block.emplace(comm, *weights, *job.placement, job.layer_rows(), Quant{}, params, options,
                  stored->template fill<typename Block::Store>());
  });
  weights.reset();
  if constexpr (std::is_same_v<Parts, DeviceHalvesParts<Act>>) {
    if (job.options.dual_batch == "on") block->runner().decide_dual_batch(true);
  }
  together(*job.comm, [&] {
    routing.emplace(job.rows(), block->runner().layer().router().num_slots());
    moe::check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");  // the forward's stream does not wait for copies made so far
  });

  std::vector<std::string> choices = with_experts_line<Quant>(moe::runner::description(block->runner()), stored->found());
  choices.push_back(moe::quantization::describe<Quant, Experts>(moe::device_architecture()));
  log_choices(job, choices);
  JobResult result;
  moe::CudaStream const stream;
  moe::runner::EventProbe events(stream);
  Ranges nvtx(job);
  Waits waits(job);
  double best = HUGE_VAL;
  for (int i = 0; i <= job.options.repeat; ++i) {  // the first run only warms up
    job.comm->barrier({});
    if (i == 1) waits.start(block->runner().layer(), comm);
    PassProbe passes([&] {
      if (i == 0) routing->add(block->runner(), stream);
    });
    moe::runner::BothProbes measures(passes, events);
    moe::runner::BothProbes probe(nvtx, measures);
    block->forward(rows->input(), rows->output(), rows->options(job), stream, probe);
    finish(*block, tp, stream);
    moe::runner::EventProbe::Times const times = events.take();
    if (i == 0) result.passes_in_halves = passes.second_halves();
    if (i == 0 && job.maps) result.slot_load = load_of(*tables, job.maps->num_physical());
    if (i > 0 && times.total < best) {
      best = times.total;
      result.seconds = times.phases;
    }
  }
  result.output = rows->result();
  routing->take(result);
  result.waited = waits.seconds(block->runner().layer(), comm);
  result.layer_bytes = block->runner().layer().bytes();
  return result;
}

}  // namespace moe_tool
