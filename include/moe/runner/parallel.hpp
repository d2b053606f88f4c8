// SPDX-License-Identifier: Apache-2.0
// runner/parallel.hpp: a runner as one rank of a grid: which sums over the TP group it does, and how its ranks agree that they can.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "moe/core/error.hpp"
#include "moe/core/space.hpp"
#include "moe/parallel/config.hpp"
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

/// Tensor, data and context parallel ranks. The layer's communicator is that of layer_group(moe), and its backend gets moe.ep_rank as
/// expert_rank where it has one. Host space, float32 rows.
template <class CommT>
struct Groups {
  static constexpr bool kAbsent = false;
  struct Params {
    MoeParallel moe{};           ///< flatten(), with the facts of the layer's backend
    CommT* tp = nullptr;         ///< the TP group, in rank order; needed if tp_size is above 1
    bool reduce_results = true;  ///< false: the caller sums the output over the TP group where it is partial
  };

  /// The TP group at work.
  class Group {
   public:
    /// E_CONFIG naming what does not fit.
    Group(Params const& p, int layer_ranks) : moe_(p.moe), tp_(p.tp), words_(static_cast<std::size_t>(p.moe.tp_size)) {
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

    /// Collective over the TP group. rows: of this rank, or -1 - the code of its error, which it throws itself. E_PEER if another rank has
    /// an error, E_MISMATCH if rows differ.
    void agree(std::int64_t rows) {
      if (moe_.tp_size == 1) return;
      call("tensor parallel", [&] { tp_->all_gather(&rows, sizeof rows, words_.data(), HostStream{}); });
      if (rows < 0) return;
      for (std::size_t r = 0; r < words_.size(); ++r) {
        if (words_[r] < 0) {
          throw TransportError(ErrorCode::peer, tp_->rank(), static_cast<int>(r), "tensor parallel", 0,
                               text("TP rank ", r, " failed with ", moe::name(static_cast<ErrorCode>(-1 - words_[r]))));
        }
        if (words_[r] != rows) {
          throw TransportError(ErrorCode::mismatch, tp_->rank(), static_cast<int>(r), "tensor parallel", 0,
                               text("TP ranks hold the same tokens: this rank has ", rows, " rows, TP rank ", r, " has ", words_[r]));
        }
      }
    }
    /// Collective over the TP group: values become their sum.
    void sum(float* values, std::int64_t n) {
      call("reduction", [&] { tp_->all_reduce(values, n, values, HostStream{}); });
    }
    /// Collective over the TP group: rows [M, width] of which this rank has its sequence_slice() become whole.
    void gather_slices(float* rows, std::int64_t m, std::int64_t width) {
      counts_.clear();
      offsets_.clear();
      for (int r = 0; r < moe_.tp_size; ++r) {
        Slice const slice = slice_of(m, moe_, r);
        std::int64_t const bytes = width * static_cast<std::int64_t>(sizeof(float));
        counts_.push_back(slice.rows * bytes);
        offsets_.push_back(slice.begin * bytes);
      }
      auto const me = static_cast<std::size_t>(tp_->rank());
      call("sequence parallel", [&] {
        tp_->all_gather_v(reinterpret_cast<std::byte const*>(rows) + offsets_[me], counts_[me], rows, counts_.data(), offsets_.data(),
                          HostStream{});
      });
    }

   private:
    /// E_PEER if the group has failed before.
    template <class Call>
    void call(char const* phase, Call const& collective) {
      if constexpr (requires { tp_->set_phase(phase); }) tp_->set_phase(phase);
      try {
        collective();
      } catch (TransportError const&) {
        throw;
      } catch (Error const& e) {
        throw TransportError(ErrorCode::peer, tp_->rank(), -1, phase, 0, text("the TP group is down: ", e.message()));
      }
    }
    MoeParallel moe_;
    CommT* tp_;
    std::vector<std::int64_t> words_;  // [TP]
    std::vector<std::int64_t> counts_ = reserved(), offsets_ = reserved();
    std::vector<std::int64_t> reserved() const {
      std::vector<std::int64_t> v;
      v.reserve(words_.size());
      return v;
    }
  };
};

}  // namespace moe::runner::parallel
