// SPDX-License-Identifier: Apache-2.0
// examples/moe/placement.cpp: placements by name, with replicas, or from a file of maps.
#include "examples/moe/placement.hpp"

#include <filesystem>
#include <system_error>
#include <utility>

#include "examples/moe/refusal.hpp"
#include "moe/eplb/files.hpp"

namespace moe_tool {

using moe::Error;
using moe::ErrorCode;
using moe::text;
using moe::eplb::ExpertMaps;
using moe::eplb::Table;

void check_slots(int num_experts, int replicas, int ranks) {
  int const over = (num_experts + replicas) % ranks;
  if (over == 0) return;
  int const below = replicas - over;
  throw Error(ErrorCode::config,
              text("every rank must have the same number of expert slots: ", num_experts, " experts + ", replicas, " replicas on ", ranks,
                   " ranks; nearest valid --replicas: ", below >= 0 ? text(below, " or ") : "", below + ranks));
}

namespace {

/// The maps of one layer of a file that eplb::save_maps wrote: of the layer with this number, or the only one.
ExpertMaps read_maps(std::filesystem::path const& path, std::int64_t layer, int num_experts) {
  auto const refuse = [&](auto const&... why) { throw Error(ErrorCode::argument, moe::io::one_line(path.string(), ": ", why...)); };
  std::error_code ignored;
  auto const found = std::filesystem::status(path, ignored);  // it is read twice by every rank, and a pipe only once
  if (std::filesystem::exists(found) && !std::filesystem::is_directory(found) && !std::filesystem::is_regular_file(found)) {
    refuse("is not a regular file");
  }
  nlohmann::json const file = moe::eplb::detail::read_json(path);
  if (!file.is_object() || !file.contains("models") || !file["models"].is_object() || file["models"].size() != 1) {
    refuse("expected the maps of one model, as serve-sim --save-placement writes them");
  }
  auto const model = file["models"].begin();
  if (!model->is_object() || !model->contains("physical_to_logical")) refuse("model \"", model.key(), "\" has no physical_to_logical");
  nlohmann::json const& rows = (*model)["physical_to_logical"];
  if (!rows.is_array() || rows.empty() || !rows[0].is_array()) refuse("physical_to_logical is not an array of rows, one a layer");
  auto const layers = static_cast<std::int64_t>(rows.size());
  if (layers > 1 && layer < 0) refuse("maps of ", layers, " layers, expected those of 1: the file of a block is one layer");
  std::int64_t const row = layers == 1 ? 0 : layer;
  if (row < 0 || row >= layers) refuse("maps of ", layers, " layers, and no layer ", layer);
  ExpertMaps const all = moe::eplb::load_maps(path, model.key(), static_cast<int>(layers), num_experts, static_cast<int>(rows[0].size()));
  auto const slots = all.physical_to_logical().row(static_cast<int>(row));
  Table<std::int32_t> one(1, all.num_physical());
  std::copy(slots.begin(), slots.end(), one.row(0).begin());
  return ExpertMaps(std::move(one), num_experts);
}

}  // namespace

void place_experts(Job& job) {
  JobOptions const& o = job.options;
  int const experts = job.description.router.num_experts;
  int const ranks = job.moe.ep_size;
  bool const named = o.placement == "linear" || o.placement == "round_robin";
  std::error_code ignored;
  if (!named && !std::filesystem::exists(o.placement, ignored)) {
    throw Error(ErrorCode::argument,
                moe::io::one_line("--placement: ", refusal(o.placement, "linear, round_robin, or a file of maps; there is no such file")));
  }
  if (named && experts + o.replicas < ranks) {
    throw Error(ErrorCode::config, text(ranks, " ranks for ", experts, " experts: each rank needs at least one. Fix: mpirun -n ", experts,
                                        ", or --replicas ", ranks - experts));
  }
  if (named && o.replicas == 0) {
    job.placement.emplace(experts, ranks, moe::parse_placement_strategy(o.placement));
    return;
  }
  if (o.placement == "round_robin") {
    throw Error(ErrorCode::config, text("--placement round_robin with --replicas ", o.replicas, ": replicas lie in linear order"));
  }
  job.maps = named ? ExpertMaps::initial(1, experts, o.replicas) : read_maps(o.placement, o.layer, experts);
  if (!named && o.replicas != 0 && job.maps->num_redundant() != o.replicas) {
    throw Error(ErrorCode::argument, text(o.placement, ": ", job.maps->num_redundant(), " replicas, --replicas is ", o.replicas));
  }
  if (int const replicas = job.maps->num_redundant(); replicas > 0 && ranks == 1) {
    throw Error(ErrorCode::config,
                job.moe.flat_size > 1
                    ? text(replicas,
                           " replicas with --expert-parallel off, where every rank has a part of each expert: enable_expert_parallel "
                           "must be set to use EPLB. Fix: --expert-parallel on")
                    : text(replicas, " replicas on 1 rank: EPLB needs more than one rank. Fix: mpirun -n 2, or more"));
  }
  check_slots(experts, job.maps->num_redundant(), ranks);
  job.placement = moe::ExpertPlacement::from_physical_to_logical(job.maps->physical_to_logical().row(0), experts, ranks);
}

}  // namespace moe_tool
