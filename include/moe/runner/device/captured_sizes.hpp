// SPDX-License-Identifier: Apache-2.0
// runner/device/captured_sizes.hpp: a forward captured in one CUDA graph for each of a set of padded row counts, replayed by the real
// count. Plain host C++.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "moe/core/buffer.hpp"
#include "moe/core/cuda_graph.hpp"
#include "moe/core/cuda_space.hpp"
#include "moe/parallel/construction.hpp"
#include "moe/parallel/fingerprint.hpp"
#include "moe/runner/capture.hpp"

namespace moe::runner {

using moe::capture_obstacle;

/// Of a memory space: there are graphs in the CUDA space.
template <class Space>
class CapturedSizes;

/// Graphs of one forward by padded size.
///
///     CapturedSizes<space::cuda> graphs;
///     graphs.capture(comm, sizes, capture_obstacle(runner), [&](std::int64_t rows, cudaStream_t s) { runner.forward(…, s); });
///     graphs.replay(real_rows, stream);
///
/// Arrays that the forward is given must stay where they are, with room for the largest size. The forward may read the real number of rows
/// from num_rows() (ForwardOptions::num_rows) where its backend takes one; else rows past the real ones are computed and their results are
/// the caller's to ignore.
template <>
class CapturedSizes<space::cuda> {
 public:
  CapturedSizes() : num_rows_(1) {
    std::int32_t const none = 0;
    num_rows_.copy_from_host(&none);
    Memory<space::cuda>::synchronize(nullptr);
  }
  CapturedSizes(CapturedSizes const&) = delete;
  CapturedSizes& operator=(CapturedSizes const&) = delete;

  /// Collective over `comm`. Runs forward(rows, stream) once and then captures it, for each size from the largest to the smallest, so that
  /// every rank makes the same collective calls in the same order. Waits for the device. E_STATE naming `obstacle` unless that is empty,
  /// E_CONFIG for an impossible size: both before any work. E_MISMATCH if ranks have different sizes. E_STATE if the forward itself does
  /// what a capture forbids; no graph is kept then.
  template <class Comm, class Forward>
  void capture(Comm& comm, std::span<std::int64_t const> sizes, std::string const& obstacle, Forward&& forward) {
    auto const sorted = moe::detail::build(comm, [&] { return checked_sizes(sizes, obstacle); });
    std::string all;
    for (std::int64_t const rows : sorted) all += text(' ', rows);
    moe::detail::agree_on_fingerprint(comm, Fingerprint().add("the captured sizes", all));
    graphs_.clear();
    try {
      for (std::int64_t const rows : sorted) {
        set_num_rows(rows, stream_);
        forward(rows, static_cast<cudaStream_t>(stream_));  // kernels are loaded, collectives are connected
        stream_.synchronize();
        graphs_.push_back({rows, CudaGraph(stream_, [&] { forward(rows, static_cast<cudaStream_t>(stream_)); })});
      }
    } catch (...) {
      graphs_.clear();
      throw;
    }
    std::reverse(graphs_.begin(), graphs_.end());
  }

  /// Enqueues the graph of the smallest size that holds `rows`, and returns that size. Every rank replays the same size. E_STATE before
  /// capture(); E_CAPACITY above the largest size.
  std::int64_t replay(std::int64_t rows, cudaStream_t stream) {
    std::int64_t const size = padded(rows);
    set_num_rows(rows, stream);
    auto const at = std::find_if(graphs_.begin(), graphs_.end(), [&](Graph const& g) { return g.rows == size; });
    at->graph.launch(stream);
    return size;
  }
  /// The size that replay(rows) takes. E_STATE, E_CAPACITY, E_ARG.
  std::int64_t padded(std::int64_t rows) const {
    if (graphs_.empty()) throw Error(ErrorCode::state, "captured sizes: nothing is captured");
    if (rows < 0) throw Error(ErrorCode::argument, text("captured sizes: ", rows, " rows"));
    for (Graph const& g : graphs_) {
      if (g.rows >= rows) return g.rows;
    }
    throw Error(ErrorCode::capacity, text("captured sizes: ", rows, " rows exceed the largest size ", graphs_.back().rows));
  }
  /// The captured sizes, ascending.
  std::vector<std::int64_t> sizes() const {
    std::vector<std::int64_t> all;
    for (Graph const& g : graphs_) all.push_back(g.rows);
    return all;
  }
  /// [1] in device memory: the real number of rows of the replay that runs. Its address never changes.
  std::int32_t const* num_rows() const { return num_rows_.data(); }

 private:
  struct Graph {
    std::int64_t rows;
    CudaGraph graph;
  };

  /// The sizes without repetition, the largest first.
  static std::vector<std::int64_t> checked_sizes(std::span<std::int64_t const> sizes, std::string const& obstacle) {
    if (!obstacle.empty()) throw Error(ErrorCode::state, text("capture: ", obstacle));
    if (sizes.empty()) throw Error(ErrorCode::config, "capture: no sizes are given");
    std::vector<std::int64_t> sorted(sizes.begin(), sizes.end());
    std::sort(sorted.begin(), sorted.end(), std::greater<>());
    sorted.erase(std::unique(sorted.begin(), sorted.end()), sorted.end());
    if (sorted.back() < 1 || sorted.front() > std::numeric_limits<std::int32_t>::max()) {
      throw Error(ErrorCode::config, text("capture: sizes from ", sorted.back(), " to ", sorted.front(), ", expected 1 to 2^31 - 1"));
    }
    return sorted;
  }

  void set_num_rows(std::int64_t rows, cudaStream_t stream) {
    auto const count = static_cast<std::int32_t>(rows);
    Memory<space::cuda>::copy_from_host_async(num_rows_.data(), &count, sizeof count, stream);
  }

  CudaStream stream_;
  Buffer<std::int32_t, space::cuda> num_rows_;
  std::vector<Graph> graphs_;  // ascending
};

}  // namespace moe::runner
