// SPDX-License-Identifier: Apache-2.0
// runner/chunking.hpp: batches of any size over a layer of fixed capacity: chunks that all ranks run in lockstep.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "moe/core/buffer.hpp"
#include "moe/core/contract/communicator.hpp"
#include "moe/core/error.hpp"
#include "moe/core/layer_config.hpp"
#include "moe/parallel/dp_metadata.hpp"
#include "moe/runner/host_words.hpp"

namespace moe::runner::chunking {

/// A forward has at most max_tokens_per_rank rows.
struct None {
  static constexpr bool kAbsent = true;
  struct Params {};
};

/// A forward has any number of rows on each rank. It runs as many chunks as the largest rank needs, on every rank.
struct Lockstep {
  static constexpr bool kAbsent = false;
  struct Params {
    int rows = 0;  ///< C, rows of a chunk, at most the layer's max_tokens_per_rank; 0: these
    ChunkMode mode = ChunkMode::exact;
    /// The most rows that any rank brings to a forward, the same on all ranks: every forward then makes as many passes as these need, and
    /// neither asks the other ranks nor waits for the host. 0: the ranks agree in each forward, which waits for the host and cannot be
    /// captured.
    std::int64_t most_rows = 0;
  };

  /// The chunks of one forward. Comm: the layer's.
  template <class Comm>
  class Plan {
   public:
    /// E_CONFIG if the chunk size is out of range.
    Plan(Comm& comm, Params const& p, std::int64_t max_rows)
        : comm_(comm),
          gatherer_(comm),
          mode_(p.mode),
          most_rows_(p.most_rows),
          metadata_(comm.size(), 1),
          words_(static_cast<std::size_t>(comm.size())),
          counts_(words_.size()) {
      if (p.rows < 0 || p.rows > max_rows || max_rows == 0) {
        throw Error(ErrorCode::config, text("chunk size: ", p.rows, " is out of range [1, max_tokens_per_rank ", max_rows, "]"));
      }
      if (p.most_rows < 0 || p.most_rows > kMostSize) {
        throw Error(ErrorCode::config, text("chunks: most_rows ", p.most_rows, " is out of range [0, ", kMostSize, "]"));
      }
      rows_ = p.rows == 0 ? static_cast<int>(max_rows) : p.rows;
    }
    /// Whether the ranks agree in each forward.
    bool agrees() const { return most_rows_ == 0; }
    /// Why a forward cannot be captured in a CUDA graph, as a sentence; empty if it can.
    std::string_view capture_obstacle() const {
      if (!agrees()) return {};
      return "chunks: most_rows is 0, so the ranks agree on their rows through the host in each forward. "
             "Fix: give Lockstep the most rows that any rank brings";
    }
    /// Passes of a forward whose ranks do not agree.
    std::int64_t fixed_passes() const { return std::max<std::int64_t>((most_rows_ + rows_ - 1) / rows_, 1); }

    /// Collective, unless the number of passes is fixed. Agrees on the number of chunks; `own` rows on this rank. check() throws Error if
    /// this rank's arguments are wrong; the other ranks then get E_PEER.
    template <class Check, class StreamT>
    void agree(std::int64_t own, Check const& check, StreamT stream) {
      std::int64_t const most = agrees() ? kMostSize : most_rows_;
      gatherer_.check(capture_obstacle(), stream);
      try {
        if (own > most) throw Error(ErrorCode::capacity, text("hidden_states: ", own, " rows exceed ", most));
        check();
      } catch (Error const& e) {
        if (agrees()) gather(-1 - static_cast<std::int64_t>(e.code()));
        throw;
      }
      if (agrees()) {
        gather(own);
      } else {
        std::fill(words_.begin(), words_.end(), most_rows_);
        words_[static_cast<std::size_t>(comm_.rank())] = own;
      }
      for (std::size_t r = 0; r < words_.size(); ++r) {
        if (words_[r] < 0) {
          throw TransportError(ErrorCode::peer, comm_.rank(), static_cast<int>(r), "chunks", 0,
                               text("rank ", r, " refused its arguments with ", name(static_cast<ErrorCode>(-1 - words_[r]))));
        }
        counts_[r] = static_cast<std::int32_t>(words_[r]);
      }
      own_ = own;
      metadata_.set(counts_, comm_.rank(), static_cast<int>(own));
    }

    /// Collective. Instead of agree(): the other ranks get E_PEER. Never throws.
    void refuse(ErrorCode code) noexcept {
      if (!agrees()) return;
      try {
        gather(-1 - static_cast<std::int64_t>(code));
      } catch (Error const&) {  // the communicator reports its failure to the next call as well
      }
    }

    /// One chunk of this rank: rows [begin, begin + rows) of its batch; dummy: one row that belongs to no batch.
    struct Chunk {
      std::int64_t begin;
      std::int64_t rows;
      bool dummy;
    };
    /// run(Chunk) for each chunk. During it metadata().local_sizes() has the rows of all ranks.
    template <class Run>
    void each(Run const& run) {
      if (!agrees()) {
        for (std::int64_t c = 0; c < fixed_passes(); ++c) {
          std::int64_t const begin = std::min<std::int64_t>(c * rows_, own_), rows = std::min<std::int64_t>(rows_, own_ - begin);
          run(Chunk{begin, rows, rows == 0 && mode_ == ChunkMode::min_one});
        }
        return;
      }
      int const chunks = metadata_.num_chunks(rows_, mode_);
      for (int c = 0; c < chunks; ++c) {
        auto const scope = metadata_.chunk_scope(c, rows_, mode_);
        std::int64_t const begin = std::min<std::int64_t>(std::int64_t{rows_} * c, own_);
        std::int64_t const rows = std::min<std::int64_t>(rows_, own_ - begin);
        run(Chunk{begin, rows, rows < metadata_.local_sizes()[static_cast<std::size_t>(comm_.rank())]});
      }
    }
    DpMetadata const& metadata() const { return metadata_; }
    /// Rows of a chunk.
    int rows() const { return rows_; }

   private:
    void gather(std::int64_t word) {
      facts::set_phase(comm_, "chunks");
      gatherer_.gather(word, words_.data());
    }
    Comm& comm_;
    HostWords<Comm> gatherer_;
    ChunkMode mode_;
    int rows_ = 0;
    std::int64_t most_rows_;
    std::int64_t own_ = 0;
    DpMetadata metadata_;
    std::vector<std::int64_t> words_;   // [R] rows, or -1 - the code of an error
    std::vector<std::int32_t> counts_;  // [R]
  };
};

}  // namespace moe::runner::chunking
