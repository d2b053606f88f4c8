// SPDX-License-Identifier: Apache-2.0
// runner/parallel.hpp: a runner as one rank of a grid: which sums over the TP group it does, and how its ranks agree that they can.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "moe/core/contract/communicator.hpp"
#include "moe/core/error.hpp"
#include "moe/core/space.hpp"
#include "moe/parallel/config.hpp"
#include "moe/runner/host_words.hpp"
#include "moe/runner/reduction.hpp"

namespace moe::runner::parallel {

/// No rank of the block depends on another but through the layer.
struct None {
  static constexpr bool kAbsent = true;
  struct Params {};
};

/// The rows of one TP rank under sequence parallelism.
struct Slice {
  std::int64_t begin;
  std::int64_t rows;
};
inline Slice slice_of(std::int64_t m, MoeParallel const& p, int rank) {
  SequenceSlice const s = sequence_slice(static_cast<int>(m), p.sp_size, rank);
  return {std::min<std::int64_t>(s.begin, m), s.valid};
}
inline Slice slice_of(std::int64_t m, MoeParallel const& p) { return slice_of(m, p, p.tp_rank); }

/// A rank's index in its TP group, checked, and its calls of the group.
template <class CommT>
class GroupRank {
 public:
  /// E_CONFIG naming what does not fit.
  template <class Params>
  GroupRank(Params const& p, int layer_ranks) : moe_(p.moe), tp_(p.tp), rows_agree_(p.rows_agree) {
    counts_.reserve(static_cast<std::size_t>(moe_.tp_size));
    offsets_.reserve(static_cast<std::size_t>(moe_.tp_size));
    if (char const* const conflict = parallel_conflict(p.moe)) throw Error(ErrorCode::config, text(p.moe.backend.name, ": ", conflict));
    int const wanted = layer_group_size(p.moe);
    if (layer_ranks != wanted) {
      throw Error(ErrorCode::config, text("the layer's communicator has ", layer_ranks, " ranks, the group '", name(layer_group(p.moe)),
                                          "' of this grid has ", wanted));
    }
    if (p.moe.tp_size == 1) return;
    if (tp_ == nullptr) throw Error(ErrorCode::config, text("tp_size is ", p.moe.tp_size, ", and the TP group has no communicator"));
    if (tp_->size() != p.moe.tp_size || tp_->rank() != p.moe.tp_rank) {
      throw Error(ErrorCode::config, text("the TP group's communicator has rank ", tp_->rank(), " of ", tp_->size(), ", the grid ",
                                          p.moe.tp_rank, " of ", p.moe.tp_size));
    }
  }
  MoeParallel const& moe() const { return moe_; }
  /// Why a forward on devices cannot be captured in a CUDA graph, as a sentence; empty if it can.
  std::string_view capture_obstacle() const {
    if (moe_.tp_size == 1 || rows_agree_) return {};
    return "the TP group: rows_agree is false, so its ranks agree on their rows through the host in each forward. "
           "Fix: set it where they bring equal rows";
  }

 protected:
  CommT& tp() const { return *tp_; }
  bool rows_agree() const { return rows_agree_; }
  /// The words that agree() gathered; rows: this rank's. E_PEER if another rank has an error, E_MISMATCH if rows differ.
  void check_words(std::int64_t rows, std::vector<std::int64_t> const& words) const {
    if (rows < 0) return;
    for (std::size_t r = 0; r < words.size(); ++r) {
      if (words[r] < 0) {
        throw TransportError(ErrorCode::peer, tp_->rank(), static_cast<int>(r), "tensor parallel", 0,
                             text("TP rank ", r, " failed with ", moe::name(static_cast<ErrorCode>(-1 - words[r]))));
      }
      if (words[r] != rows) {
        throw TransportError(ErrorCode::mismatch, tp_->rank(), static_cast<int>(r), "tensor parallel", 0,
                             text("TP ranks hold the same tokens: this rank has ", rows, " rows, TP rank ", r, " has ", words[r]));
      }
    }
  }
  /// counts_ and offsets_ of every rank's slice of m rows, in bytes.
  void lay_out_slices(std::int64_t m, std::int64_t row_bytes) {
    counts_.clear();
    offsets_.clear();
    for (int r = 0; r < moe_.tp_size; ++r) {
      Slice const slice = slice_of(m, moe_, r);
      counts_.push_back(slice.rows * row_bytes);
      offsets_.push_back(slice.begin * row_bytes);
    }
  }
  /// E_PEER if the group has failed before.
  template <class Call>
  void call(char const* phase, Call const& collective) {
    facts::set_phase(*tp_, phase);
    try {
      collective();
    } catch (TransportError const&) {
      throw;
    } catch (Error const& e) {
      throw TransportError(ErrorCode::peer, tp_->rank(), -1, phase, 0, text("the TP group is down: ", e.message()));
    }
  }

  std::vector<std::int64_t> counts_, offsets_;  // [TP]

 private:
  MoeParallel moe_;
  CommT* tp_;
  bool rows_agree_;
};

/// The TP group at work, in the space of its communicator. The device's is in runner/device/ranks.hpp.
template <class CommT, class Space = typename CommT::Space>
class Group : rules::RunnerRanks::Broken<Space> {};

template <class CommT>
class Group<CommT, space::host> : public GroupRank<CommT> {
 public:
  using GroupRank<CommT>::moe;

  template <class Params>
  Group(Params const& p, int layer_ranks) : GroupRank<CommT>(p, layer_ranks), words_(static_cast<std::size_t>(moe().tp_size)) {}
  void connect() {}
  void check(HostStream) const {}
  static constexpr bool failed() { return false; }  // calls are done when they return: an error is thrown at once
  void end() {}
  template <class WaitLayer, class EndLayer>
  static void wait(HostStream, WaitLayer const& wait_layer, EndLayer const&) {
    wait_layer();
  }
  /// Collective over the TP group. rows: of this rank, or -1 - the code of its error, which it throws itself. E_PEER if another rank has
  /// an error, E_MISMATCH if rows differ.
  void agree(std::int64_t rows, HostStream = {}) {
    if (moe().tp_size == 1) return;
    this->call("tensor parallel", [&] { this->tp().all_gather(&rows, sizeof rows, words_.data(), HostStream{}); });
    this->check_words(rows, words_);
  }
  /// Collective over the TP group: values become their sum.
  void sum(float* values, std::int64_t n, HostStream = {}) {
    this->call("reduction", [&] { this->tp().all_reduce(values, n, values, HostStream{}); });
  }
  /// Collective over the TP group: rows [M, width] of which this rank has its sequence_slice() become whole.
  void gather_slices(float* rows, std::int64_t m, std::int64_t width, HostStream = {}) {
    this->lay_out_slices(m, width * static_cast<std::int64_t>(sizeof(float)));
    auto const me = static_cast<std::size_t>(this->tp().rank());
    this->call("sequence parallel", [&] {
      this->tp().all_gather_v(reinterpret_cast<std::byte const*>(rows) + this->offsets_[me], this->counts_[me], rows, this->counts_.data(),
                              this->offsets_.data(), HostStream{});
    });
  }

 private:
  std::vector<std::int64_t> words_;  // [TP]
};

/// Tensor, data and context parallel ranks. The layer's communicator is that of layer_group(moe), and its backend gets moe.ep_rank as
/// expert_rank where it has one. In the host space rows are float32.
template <class CommT>
struct Groups {
  static constexpr bool kAbsent = false;
  using Comm = CommT;
  struct Params {
    MoeParallel moe{};           ///< flatten(), with the facts of the layer's backend
    CommT* tp = nullptr;         ///< the TP group, in rank order; needed if tp_size is above 1
    bool reduce_results = true;  ///< false: the caller sums the output over the TP group where it is partial
    /// Device only, the same on all ranks: TP ranks call forward() with equal numbers of rows and right arguments. No forward then waits
    /// for the host, and it can be captured; a rank that breaks the promise is found by the communicator's deadline. false: they agree
    /// through the host in each forward.
    bool rows_agree = false;
  };
  using Group = parallel::Group<CommT>;
};

}  // namespace moe::runner::parallel
