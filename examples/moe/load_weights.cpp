// SPDX-License-Identifier: Apache-2.0
// examples/moe/load_weights.cpp: reads this rank's experts, and compiles what does not depend on the composition.
#include <cmath>
#include <range/v3/range/conversion.hpp>
#include <range/v3/view/transform.hpp>
#include <utility>
#include <vector>

#include "examples/moe/job.hpp"
#include "moe/io/progress_line.hpp"
#include "moe/models/block_parts.hpp"

template class moe::runner::gate::Any::Part<moe::space::host, float>;
template class moe::runner::transform::Projection<float>::Part<moe::space::host, float>;
template class moe::runner::shared::Separate<moe::experts::OneDnn, float>::Part<moe::space::host, float>;

namespace moe_tool {
namespace {

void refuse_nan(std::vector<float> const& logits, std::int64_t width, std::int64_t first_row) {
  for (std::size_t i = 0; i < logits.size(); ++i) {
    if (std::isnan(logits[i])) {
      auto const at = static_cast<std::int64_t>(i);
      throw moe::Error(moe::ErrorCode::argument,
                       moe::text("router_logits: row ", first_row + at / width, ", expert ", at % width, " is NaN, expected a number"));
    }
  }
}

/// The router gives tokens outside the table no experts. In the tool such a token is a user error.
void check_token_ids(Job const& job, std::int64_t vocabulary) {
  for (std::size_t i = 0; i < job.token_ids.size(); ++i) {
    if (job.token_ids[i] < 0 || job.token_ids[i] >= vocabulary) {
      auto const row = job.first_row[job.group(job.comm->rank())] + static_cast<std::int64_t>(i);
      throw moe::Error(moe::ErrorCode::argument, moe::text("tensor '", job.options.token_ids, "': token id ", job.token_ids[i], " of row ",
                                                           row, " is out of range [0, ", vocabulary, ")"));
    }
  }
}

}  // namespace

moe::runner::SharedOutput Job::sharding() const {
  auto const& shared = description.shared;
  if (shared.count == 0) return moe::runner::SharedOutput::none;
  bool const split = moe.tp_size > 1 && !moe.use_sp_moe() && shared.intermediate / shared.count % moe.tp_size == 0;
  return split ? moe::runner::SharedOutput::partial : moe::runner::SharedOutput::complete;
}

moe::io::LayerLoader layer_loader(Job const& job) {
  return job.options.block.empty() ? moe::io::LayerLoader::from_checkpoint(*job.store, job.description, job.options.layer)
                                   : moe::io::LayerLoader::from_block(*job.store, job.description);
}

std::vector<int> local_experts(Job const& job) {
  return job.placement->local_to_physical(job.moe.ep_rank) |
         ranges::views::transform([&](std::int32_t slot) { return job.placement->logical(slot); }) | ranges::to<std::vector<int>>();
}

moe::io::LoadProgress expert_progress(Job const& job) {
  return moe::io::ProgressLine({.what = "loading experts", .shown = job.comm->rank() == 0});
}

moe::io::HostLayerWeights<float> load_weights(Job const& job, bool matrices) {
  moe::io::LoadOptions load;
  load.experts = local_experts(job);
  load.matrices = matrices;
  load.tp_rank = job.moe.moe_tp_rank;
  load.tp_size = job.moe.moe_tp_size;
  bool const split = job.sharding() == moe::runner::SharedOutput::partial;
  load.shared_tp = split ? std::pair<int, int>(job.moe.tp_rank, job.moe.tp_size) : std::pair<int, int>(0, 1);
  load.progress = expert_progress(job);
  moe::io::HostLayerWeights<float> weights = layer_loader(job).load<float>(load);
  if (job.description.router.selection == moe::routing::Selection::hash_table) check_token_ids(job, weights.vocabulary);
  refuse_nan(moe::models::compute_router_logits(weights, job.hidden), job.description.router.num_logits(),
             job.first_row[job.group(job.comm->rank())]);
  return weights;
}

}  // namespace moe_tool
