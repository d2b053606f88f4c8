// SPDX-License-Identifier: Apache-2.0
// examples/moe/job.hpp: one run of `moe layer` or `moe block`: the request and the result.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "moe/comm/mpi.hpp"
#include "moe/core/types.hpp"
#include "moe/io/layer_weights.hpp"
#include "moe/parallel/placement.hpp"

namespace moe_tool {

/// The command line. Empty names: the default for the ranks and the device.
struct JobOptions {
  std::filesystem::path checkpoint;  ///< `moe layer`: a directory
  std::int64_t layer = -1;
  std::filesystem::path block;  ///< `moe block`: a file with weights and inputs
  std::filesystem::path input;
  std::string tensor = "hidden";
  std::string token_ids;  ///< tensor of the input file, for hash routing
  std::string expected;   ///< FILE:NAME
  std::filesystem::path output;
  std::string backend;
  std::string experts;
  std::string quantization = "none";
  std::string device = "host";
  std::string placement = "linear";
  std::string deal = "even";
  std::uint64_t seed = 0;
  int repeat = 1;
  std::int64_t timeout_ms = 100'000;
  bool json = false;
};

/// This rank's part of the work. Collective members of the composition are constructed from it.
struct Job {
  JobOptions options;
  moe::comm::Mpi* comm = nullptr;
  moe::io::TensorStore const* store = nullptr;  ///< weights
  moe::io::LayerDescription description;
  std::optional<moe::ExpertPlacement> placement;
  std::vector<std::int64_t> first_row;  ///< [R + 1] rows of the input per rank, contiguous
  std::int64_t max_rows = 0;            ///< of any rank
  std::vector<float> hidden;            ///< [M, H] of this rank
  std::vector<std::int64_t> token_ids;  ///< [M] of this rank, or empty

  std::int64_t rows() const {
    auto const r = static_cast<std::size_t>(comm->rank());
    return first_row[r + 1] - first_row[r];
  }
  std::int64_t const* tokens() const { return token_ids.empty() ? nullptr : token_ids.data(); }
};

/// The results of one rank.
struct JobResult {
  std::vector<float> output;           ///< [M, H]
  std::vector<std::int32_t> topk_ids;  ///< [M, k]
  std::vector<float> topk_weights;     ///< [M, k]
  std::array<double, 4> seconds{};     ///< route, dispatch, experts, combine: the fastest repetition
  std::size_t layer_bytes = 0;         ///< the layer's buffers
};

/// The weights of this rank's experts and of the rest of the block. E_ARG also if they make a router logit NaN.
moe::io::HostLayerWeights<float> load_weights(Job const& job);

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

/// Runs the job with the host policies of that quantisation. Collective. One definition per quantisation: host_*.cpp.
template <class Quant>
JobResult run_host(Job const& job);
/// The same with a backend over a window of host memory that delivers this format. One definition per quantisation and format:
/// windows_*.cpp, for the schemes of registry::window_quantizations.
template <class Quant, moe::ActivationFormat Format>
JobResult run_windows(Job const& job);
/// The default policies of a run.
std::string default_backend(Job const& job);
std::string default_experts(Job const& job);

}  // namespace moe_tool
