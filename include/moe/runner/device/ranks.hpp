// SPDX-License-Identifier: Apache-2.0
// runner/device/ranks.hpp: what the ranks of a runner on devices exchange over comm::Nccl: a word each, the sums over a TP group, the
// slices of sequence parallel ranks. Plain host C++.
#pragma once

#include <unistd.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <string_view>
#include <vector>

#include "moe/backends/collective/device/rounds.hpp"
#include "moe/core/contract/communicator.hpp"
#include "moe/core/cuda_space.hpp"
#include "moe/core/stream_capture.hpp"
#include "moe/runner/device/priority_stream.hpp"
#include "moe/runner/host_words.hpp"
#include "moe/runner/parallel.hpp"

namespace moe::runner {

/// Over comm::Self: this rank's word. Over comm::Nccl the words travel through device memory on a stream of their own; a rank whose word
/// does not come within the deadline is named.
template <class Comm>
class HostWords<Comm, space::cuda> {
 public:
  static constexpr bool kAlone = !facts::has_groups<Comm>();

  explicit HostWords(Comm& comm) : comm_(comm), device_(comm.size()), host_(comm.size()), seen_(comm.size()) {}
  void check(std::string_view obstacle, cudaStream_t stream) const {
    if (obstacle.empty() || !StreamCapture<space::cuda>::is_active(stream)) return;
    throw Error(ErrorCode::state, text("capture: ", obstacle));
  }
  void gather(std::int64_t word, std::int64_t* all) {
    auto const size = comm_.size(), me = comm_.rank();
    if constexpr (kAlone) {
      all[0] = word;
    } else {
      auto const bytes = static_cast<std::size_t>(size) * sizeof(std::int64_t);
      for (int r = 0; r < size; ++r) host_.data()[r] = r == me ? word : kAbsent;
      check_cuda(cudaMemcpyAsync(device_.data(), host_.data(), bytes, cudaMemcpyHostToDevice, stream_), "cudaMemcpyAsync");
      typename Comm::Group group(comm_);
      for (int i = 1; i < size; ++i) {
        int const to = (me + i) % size, from = (me + size - i) % size;
        group.send(device_.data() + me, sizeof word, to, stream_);
        group.receive(device_.data() + from, sizeof word, from, stream_);
      }
      group.end();
      check_cuda(cudaMemcpyAsync(host_.data(), device_.data(), bytes, cudaMemcpyDeviceToHost, stream_), "cudaMemcpyAsync");
      check_cuda(cudaEventRecord(done_, stream_), "cudaEventRecord");
      comm_.wait(done_, "words of all ranks", [this] { return missing(); });
      for (int r = 0; r < size; ++r) all[r] = host_.data()[r];
    }
  }

 private:
  static constexpr std::int64_t kAbsent = std::numeric_limits<std::int64_t>::min();

  /// While the device waits: the first rank whose word has not come, or -1.
  int missing() {
    auto const bytes = static_cast<std::size_t>(comm_.size()) * sizeof(std::int64_t);
    check_cuda(cudaMemcpyAsync(seen_.data(), device_.data(), bytes, cudaMemcpyDeviceToHost, look_), "cudaMemcpyAsync");
    for (int polls = 0; cudaStreamQuery(look_) == cudaErrorNotReady; ++polls) {
      cudaGetLastError();
      if (polls == 1000) return -1;
      usleep(1000);
    }
    for (int r = 0; r < comm_.size(); ++r) {
      if (seen_.data()[r] == kAbsent) return r;
    }
    return -1;
  }

  Comm& comm_;
  Buffer<std::int64_t, space::cuda> device_;     // [size]
  moe::detail::MappedArray<std::int64_t> host_;  // [size]
  moe::detail::MappedArray<std::int64_t> seen_;  // [size], read by missing()
  // At the default priority this rank's word could queue behind a forward's kernels that wait for a peer. It would not be sent, and the
  // others would name this rank.
  device::PriorityStream stream_{2}, look_{2};
  CudaMark done_;
};

namespace parallel {

/// The TP group at work on devices. Sums are NCCL's, in the rows' element, the same bits on every rank.
template <class CommT>
class Group<CommT, space::cuda> : public GroupRank<CommT> {
 public:
  using GroupRank<CommT>::moe;

  template <class Params>
  Group(Params const& p, int layer_ranks) : GroupRank<CommT>(p, layer_ranks), words_(static_cast<std::size_t>(moe().tp_size)) {
    if (moe().tp_size > 1) gatherer_.emplace(this->tp());
  }
  /// Collective over the TP group, once, at the end of construction: NCCL connects.
  void connect() {
    if (moe().tp_size > 1) this->call("construction", [&] { this->tp().connect(); });
  }
  /// E_STATE if the stream is being captured and a forward asks the other ranks.
  void check(cudaStream_t stream) const {
    if (gatherer_) gatherer_->check(this->capture_obstacle(), stream);
  }
  /// Whether the group has met a deadline or an error.
  bool failed() const { return moe().tp_size > 1 && this->tp().failed(); }
  /// Ends the group, whose layer has failed: a sum may wait for the same rank.
  void end() noexcept {
    if (moe().tp_size > 1) this->tp().begin_abort();
  }
  /// Waits for the stream, then for the layer. Past the deadline the ranks exchange one word each, since a sum does not show which rank is
  /// missing: E_TIMEOUT naming the first rank whose word does not come within another deadline. If all words come, the stream waits for
  /// another group, and the layer's wait names the rank. Either error ends both groups, without a call of CUDA between the two: see
  /// Nccl::begin_abort().
  template <class WaitLayer, class EndLayer>
  void wait(cudaStream_t stream, WaitLayer const& wait_layer, EndLayer const& end_layer) {
    if (moe().tp_size == 1 || failed() || is_done_in_time(stream)) {
      wait_layer();
      return;
    }
    try {
      this->call("reduction", [&] { gatherer_->gather(0, words_.data()); });
    } catch (Error const&) {
      end_layer();
      throw;
    }
    try {
      wait_layer();
      this->call("reduction", [&] { this->tp().synchronize(stream); });
    } catch (...) {
      end();
      end_layer();
      throw;
    }
  }
  /// As on the host. With Params::rows_agree the ranks exchange nothing here: a rank with an error ends the group, and the sums of its
  /// peers then fail at the deadline.
  void agree(std::int64_t rows, cudaStream_t) {
    if (moe().tp_size == 1) return;
    if (this->rows_agree()) {
      if (rows < 0) this->tp().abort();
      return;
    }
    this->call("tensor parallel", [&] { gatherer_->gather(rows, words_.data()); });
    this->check_words(rows, words_);
  }
  /// Collective over the TP group: values become their sum. Enqueues.
  template <class T>
  void sum(T* values, std::int64_t n, cudaStream_t stream) {
    if (n == 0) return;
    this->call("reduction", [&] { this->tp().all_reduce(values, n, values, stream); });
  }
  /// Collective over the TP group: rows [M, width] of which this rank has its sequence_slice() become whole. Enqueues.
  template <class T>
  void gather_slices(T* rows, std::int64_t m, std::int64_t width, cudaStream_t stream) {
    this->lay_out_slices(m, width * static_cast<std::int64_t>(sizeof(T)));
    auto const me = static_cast<std::size_t>(this->tp().rank());
    this->call("sequence parallel", [&] {
      this->tp().all_gather_v(reinterpret_cast<std::byte const*>(rows) + this->offsets_[me], this->counts_[me], rows, this->counts_.data(),
                              this->offsets_.data(), stream);
    });
  }

 private:
  /// Whether the stream is done before the deadline.
  bool is_done_in_time(cudaStream_t stream) {
    check_cuda(cudaEventRecord(done_, stream), "cudaEventRecord");
    std::chrono::milliseconds const deadline(this->tp().timeout_ms());
    auto const start = std::chrono::steady_clock::now();
    for (int polls = 0;; ++polls) {
      cudaError_t const status = cudaEventQuery(done_);
      if (status != cudaErrorNotReady) {
        check_cuda(status, "a forward on a TP group");
        return true;
      }
      cudaGetLastError();  // "not ready" must not look like a failed launch later
      if (deadline.count() > 0 && std::chrono::steady_clock::now() - start > deadline) return false;
      if (polls > 4000) usleep(20);
    }
  }

  std::vector<std::int64_t> words_;  // [TP]
  std::optional<HostWords<CommT>> gatherer_;
  CudaMark done_;
};

}  // namespace parallel

}  // namespace moe::runner
