// SPDX-License-Identifier: Apache-2.0
// examples/moe/job.hpp: one run of `moe layer` or `moe block`: the request and the result.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "moe/comm/mpi.hpp"
#include "moe/core/types.hpp"
#include "moe/eplb/maps.hpp"
#include "moe/io/expert_loader.hpp"
#include "moe/io/layer_weights.hpp"
#include "moe/layer/options.hpp"
#include "moe/parallel/config.hpp"
#include "moe/parallel/placement.hpp"
#include "moe/runner/dual_batch.hpp"
#include "moe/runner/reduction.hpp"

namespace moe_tool {

/// Time of each moe::Phase: host space, wall time; on a device, between events on its stream.
using Seconds = std::array<double, moe::kNumPhases>;

/// The command line. Empty names: the default for the ranks and the device.
struct JobOptions {
  std::filesystem::path checkpoint;  ///< `moe layer`: a directory
  std::int64_t layer = -1;
  std::string tokens;           ///< text or image: which block of a layer that has two; empty: not given
  std::filesystem::path block;  ///< `moe block`: a file with weights and inputs
  std::filesystem::path input;
  std::string tensor = "hidden";
  std::string token_ids;             ///< tensor of the input file, for hash routing
  std::int64_t sequence_length = 0;  ///< rows of one sequence, for an expert_capacity; 0: not given
  std::string expected;              ///< FILE:NAME
  std::filesystem::path output;
  std::string backend;
  std::string experts;
  std::string quantization = "none";
  std::string device = "host";
  std::string placement = "linear";
  std::string deal = "even";
  int tp = 1;   ///< ranks that hold the same tokens
  int dp = 0;   ///< groups of them with different tokens; 0: what the ranks give
  int pcp = 1;  ///< the same for the parts of a prompt
  std::string expert_parallel = "on";
  bool sequence_parallel = false;
  std::int64_t chunk = 0;  ///< rows of a chunk; 0: the whole batch at once
  std::string dual_batch = "off";
  std::string shared_overlap = "auto";
  int replicas = 0;   ///< redundant experts
  std::string log;    ///< level of the log on standard error; empty: none
  bool nvtx = false;  ///< a range of NVTX for each stage
  std::uint64_t seed = 0;
  int repeat = 1;
  std::int64_t timeout_ms = 100'000;
  bool json = false;
};

/// From how many rows `--dual-batch auto` splits a batch, and why: the library's default for the space.
inline moe::runner::dual_batch::Threshold dual_batch_threshold(JobOptions const& o) {
  return moe::runner::dual_batch::default_threshold(o.device == "cuda" ? moe::SpaceKind::cuda : moe::SpaceKind::host);
}

/// This rank's part of the work. Collective members of the composition are constructed from it.
struct Job {
  JobOptions options;
  moe::comm::Mpi* comm = nullptr;
  moe::io::TensorStore const* store = nullptr;  ///< weights
  moe::io::LayerDescription description;
  moe::MoeParallel moe;                    ///< this rank's coordinates in the grid
  moe::comm::Mpi* tp_group = nullptr;      ///< the TP group
  moe::comm::Mpi* tokens_group = nullptr;  ///< the ranks of other TP groups with this one's index: they hold other tokens
  std::optional<moe::ExpertPlacement> placement;
  std::optional<moe::eplb::ExpertMaps> maps;  ///< of one layer, where an expert may have replicas
  std::vector<std::int64_t> first_row;        ///< [G + 1] rows of the input per TP group, contiguous
  std::int64_t max_rows = 0;                  ///< of any TP group
  std::vector<float> hidden;                  ///< [M, H] of this rank's group
  std::vector<std::int64_t> token_ids;        ///< [M] of this rank's group, or empty

  /// TP group of a rank.
  std::size_t group(int rank) const { return static_cast<std::size_t>(rank / moe.tp_size); }
  std::int64_t rows(std::size_t group) const { return first_row[group + 1] - first_row[group]; }
  std::int64_t rows() const { return rows(group(comm->rank())); }
  /// The rank whose copies of an expert this rank's rows prefer. TP ranks with the same rows must choose the same.
  int source_rank() const { return !moe.use_ep ? 0 : moe.use_sp_moe() ? moe.flat_rank : moe.flat_rank - moe.tp_rank; }
  /// Most rows that the layer of any rank gets in a forward, at least 1.
  std::int64_t most_rows() const { return std::max(std::int64_t{1}, (max_rows + moe.sp_size - 1) / moe.sp_size); }
  /// The same in one pass.
  std::int64_t layer_rows() const { return options.chunk > 0 ? std::min(options.chunk, most_rows()) : most_rows(); }
  /// Whether a pass may run in two halves, which takes a second exchange. Where no rank reaches the threshold, "auto" means off.
  bool needs_second_exchange() const {
    return options.dual_batch == "on" || (options.dual_batch == "auto" && layer_rows() >= dual_batch_threshold(options).min_rows);
  }
  /// The ranks that the layer connects, of a backend that connects any.
  moe::comm::Mpi& layer_group() const { return moe::runner::layer_group(moe) == moe::runner::LayerGroup::tokens ? *tokens_group : *comm; }
  /// How the columns of the shared experts are split.
  moe::runner::SharedOutput sharding() const;
  std::int64_t const* tokens() const { return token_ids.empty() ? nullptr : token_ids.data(); }
};

/// The results of one rank.
struct JobResult {
  std::vector<float> output;            ///< [M, H]
  std::vector<std::int32_t> topk_ids;   ///< [M', k] of the rows that this rank routes: under sequence parallelism a part of its group's;
                                        ///< empty if the experts route inside
  std::vector<float> topk_weights;      ///< as topk_ids
  Seconds seconds{};                    ///< of each phase: the fastest repetition
  std::vector<std::int64_t> slot_load;  ///< [P] slots that this rank routed to each physical expert; with maps only
  std::vector<double> waited;           ///< [R] seconds of a mean forward that this rank waited for each rank; empty: not counted
  int passes_in_halves = 0;             ///< those whose rows were exchanged in two halves
  int passes = 0;                       ///< chunks of a forward
  std::size_t layer_bytes = 0;          ///< the layer's buffers
};

/// The weights of this rank's experts and of the rest of the block. E_ARG also if they make a router logit NaN. `matrices`: as in
/// LoadOptions.
moe::io::HostLayerWeights<float> load_weights(Job const& job, bool matrices = true);
/// Reads the block that the job names.
moe::io::LayerLoader layer_loader(Job const& job);
/// [L] the logical experts of this rank, in the order of its slots.
std::vector<int> local_experts(Job const& job);
/// Reports how far they are read, on rank 0.
moe::io::LoadProgress expert_progress(Job const& job);

/// Throws on every rank if `error` is not empty on any: the error text of the first such rank. Collective.
void agree(moe::comm::Mpi& comm, std::string const& error);

/// Runs `stage` on every rank; if it throws anywhere, every rank throws. Collective.
template <class Stage>
void together(moe::comm::Mpi& comm, Stage&& stage) {
  std::string error;
  try {
    stage();
  } catch (moe::Error const& e) {
    error = e.what();
  } catch (std::exception const& e) {
    error = moe::Error(moe::ErrorCode::internal, e.what()).what();
  }
  agree(comm, error);
}

/// On standard error, if --log asks for it: the grid, and the lines of moe::runner::description(). Called once the block is constructed.
void log_choices(Job const& job, std::vector<std::string> const& lines);

/// Runs the job with the host policies of that quantisation. Collective. One definition per quantisation: host_*.cpp.
template <class Quant>
JobResult run_host(Job const& job);
/// The same with registry::sample_backends, for the schemes of registry::further_quantizations. Defined in host_sample_*.cpp.
template <class Quant>
JobResult run_sample(Job const& job);
/// The same with experts that route inside, for the schemes of registry::sample_quantizations. Defined in host_inside.cpp.
template <class Quant>
JobResult run_inside(Job const& job);
/// The same with a backend over a window of host memory that delivers this format. One definition per quantisation and format:
/// windows_*.cpp, for the schemes of registry::sample_quantizations.
template <class Quant, moe::ActivationFormat Format>
JobResult run_windows(Job const& job);
/// The default policies of a run.
std::string default_backend(JobOptions const& options, int ranks);
std::string default_experts(Job const& job);

}  // namespace moe_tool
