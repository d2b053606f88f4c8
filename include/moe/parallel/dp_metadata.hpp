// SPDX-License-Identifier: Apache-2.0
// parallel/dp_metadata.hpp: how many tokens each data-parallel rank brings to a step, and what is derived from that: offsets, chunks, the
// step vote.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "moe/core/error.hpp"

namespace moe {

/// Sizes of the chunks a batch is cut into.
enum class ChunkMode : std::uint8_t {
  exact,    ///< clamp(tokens - C·c, 0, C): zero rows are possible; the default, the exchanges accept them
  min_one,  ///< max(1, exact): for exchanges that need a row; the extra row is a dummy whose result is discarded
};

/// Token counts of one step over the DP group. Host memory; equal on every rank except dp_rank. set() allocates no memory once the sizes
/// have been seen, so one object serves all steps.
class DpMetadata {
 public:
  /// sp_size: ranks that split the tokens of one DP rank (1 without sequence parallel). E_ARG on sizes below 1.
  DpMetadata(int dp_size, int sp_size) : sp_size_(sp_size) {
    if (dp_size < 1 || sp_size < 1) {
      throw Error(ErrorCode::argument, text("dp_size = ", dp_size, " and sp_size = ", sp_size, " must be at least 1"));
    }
    num_tokens_.resize(static_cast<std::size_t>(dp_size));
    cu_tokens_.resize(num_tokens_.size());
    sp_tokens_.resize(num_tokens_.size() * static_cast<std::size_t>(sp_size));
    local_sizes_.resize(sp_tokens_.size());
    scopes_.reserve(kScopes);
  }

  /// num_tokens[dp]: token count of every DP rank; own_count: the rows this rank really runs. E_ARG "token count mismatch" if they
  /// differ, on a negative count, or if is_padded (graph capture, dual-batch overlap) and counts differ. E_STATE inside a scope.
  void set(std::span<std::int32_t const> num_tokens, int dp_rank, int own_count, bool is_padded = false) {
    if (!scopes_.empty()) throw Error(ErrorCode::state, text("token counts cannot change inside ", scopes_.size(), " open scopes"));
    if (num_tokens.size() != num_tokens_.size()) {
      throw Error(ErrorCode::argument, text("num_tokens has ", num_tokens.size(), " entries, dp_size is ", num_tokens_.size()));
    }
    if (dp_rank < 0 || dp_rank >= dp_size()) {
      throw Error(ErrorCode::argument, text("dp_rank ", dp_rank, " is out of range [0, ", dp_size(), ")"));
    }
    auto const negative = std::find_if(num_tokens.begin(), num_tokens.end(), [](std::int32_t n) { return n < 0; });
    if (negative != num_tokens.end()) {
      throw Error(ErrorCode::argument, text("num_tokens[", negative - num_tokens.begin(), "] must be at least 0, is ", *negative));
    }
    std::int32_t const stated = num_tokens[static_cast<std::size_t>(dp_rank)];
    if (stated != own_count) {
      throw Error(ErrorCode::argument,
                  text("token count mismatch: metadata says ", stated, " for dp_rank ", dp_rank, ", the batch has ", own_count));
    }
    if (is_padded && std::adjacent_find(num_tokens.begin(), num_tokens.end(), std::not_equal_to<>{}) != num_tokens.end()) {
      throw Error(ErrorCode::argument, "token count mismatch: a padded step needs the same count on every rank");
    }
    std::copy(num_tokens.begin(), num_tokens.end(), num_tokens_.begin());
    is_padded_ = is_padded;
    std::int64_t sum = 0;
    for (std::size_t i = 0; i < num_tokens_.size(); ++i) {
      std::int32_t const share = num_tokens_[i] / sp_size_ + (num_tokens_[i] % sp_size_ != 0 ? 1 : 0);
      cu_tokens_[i] = sum += share;
      std::fill_n(sp_tokens_.begin() + static_cast<std::ptrdiff_t>(i) * sp_size_, sp_size_, share);
    }
  }

  int dp_size() const { return static_cast<int>(num_tokens_.size()); }
  int sp_size() const { return sp_size_; }
  bool is_padded() const { return is_padded_; }
  /// [dp]: token count of each DP rank.
  std::vector<std::int32_t> const& num_tokens() const { return num_tokens_; }
  std::int32_t max_tokens() const { return *std::max_element(num_tokens_.begin(), num_tokens_.end()); }
  /// [dp]: inclusive sums of ceil(num_tokens / sp).
  std::vector<std::int64_t> const& cu_tokens() const { return cu_tokens_; }
  /// [dp · sp]: ceil(num_tokens[i] / sp) at i · sp + s, the order of the EP group.
  std::vector<std::int32_t> const& sp_tokens() const { return sp_tokens_; }

  /// Chunks needed: ceil(max(sp_tokens) / chunk), at least 1 in min_one mode. E_CONFIG on chunk < 1.
  int num_chunks(int chunk, ChunkMode mode = ChunkMode::exact) const {
    check_chunk(chunk);
    std::int32_t const most = *std::max_element(sp_tokens_.begin(), sp_tokens_.end());
    int const needed = most / chunk + (most % chunk != 0 ? 1 : 0);
    return mode == ChunkMode::min_one ? std::max(needed, 1) : needed;
  }

  /// Rows of EP rank i in chunk `index` of at most `chunk` rows.
  std::int32_t chunk_size(int i, int index, int chunk, ChunkMode mode = ChunkMode::exact) const {
    check_chunk(chunk);
    std::int64_t const left = sp_tokens_[static_cast<std::size_t>(i)] - std::int64_t{chunk} * index;
    auto const exact = static_cast<std::int32_t>(std::clamp<std::int64_t>(left, 0, chunk));
    return mode == ChunkMode::min_one ? std::max(exact, 1) : exact;
  }

  /// [dp · sp]: rows of every EP rank in that chunk.
  std::vector<std::int32_t> chunk_sizes(int index, int chunk, ChunkMode mode = ChunkMode::exact) const {
    std::vector<std::int32_t> sizes(sp_tokens_.size());
    for (std::size_t i = 0; i < sizes.size(); ++i) sizes[i] = chunk_size(static_cast<int>(i), index, chunk, mode);
    return sizes;
  }

  /// While the scope is open, local_sizes() of the metadata returns the sizes of one chunk or of the whole split batch. Scopes nest last
  /// in, first out; every exit path restores the previous scope.
  class Scope {
   public:
    Scope(Scope const&) = delete;
    Scope& operator=(Scope const&) = delete;
    ~Scope() {
      if (open_) metadata_.pop(depth_);
    }
    /// Ends the scope early. E_STATE if it is not the innermost one or already closed.
    void close() {
      if (!open_) throw Error(ErrorCode::state, "scope is already closed");
      if (metadata_.scopes_.size() != depth_) {
        throw Error(ErrorCode::state, text("scopes must close innermost first: closing ", depth_, " of ", metadata_.scopes_.size()));
      }
      open_ = false;
      metadata_.pop(depth_);
    }

   private:
    friend class DpMetadata;
    Scope(DpMetadata& metadata, std::size_t depth) : metadata_(metadata), depth_(depth) {}
    DpMetadata& metadata_;
    std::size_t depth_;
    bool open_ = true;
  };

  /// local_sizes() = sp_tokens().
  [[nodiscard]] Scope sp_scope() { return push({-1, 0, ChunkMode::exact}); }
  /// local_sizes() = chunk_sizes(index, chunk, mode). E_CONFIG on chunk < 1, E_ARG on a chunk that does not exist.
  [[nodiscard]] Scope chunk_scope(int index, int chunk, ChunkMode mode = ChunkMode::exact) {
    int const chunks = num_chunks(chunk, mode);
    if (index < 0 || index >= chunks) {
      throw Error(ErrorCode::argument, text("chunk ", index, " is out of range [0, ", chunks, ")"));
    }
    return push({index, chunk, mode});
  }

  /// [dp · sp]: rows of every EP rank in the current scope. E_STATE outside any scope.
  std::vector<std::int32_t> const& local_sizes() const {
    if (scopes_.empty()) throw Error(ErrorCode::state, "local_sizes are only known inside a chunk or sequence-parallel scope");
    return local_sizes_;
  }

 private:
  struct Frame {
    int index;  // -1: the whole split batch
    int chunk;
    ChunkMode mode;
  };
  static constexpr std::size_t kScopes = 8;

  static void check_chunk(int chunk) {
    if (chunk < 1) throw Error(ErrorCode::config, text("chunk size must be greater than 0, is ", chunk));
  }
  Scope push(Frame frame) {
    scopes_.push_back(frame);
    refresh();
    return Scope(*this, scopes_.size());
  }
  void pop(std::size_t depth) {
    if (scopes_.size() >= depth) scopes_.resize(depth - 1);
    refresh();
  }
  void refresh() {
    if (scopes_.empty()) return;
    Frame const frame = scopes_.back();
    for (std::size_t i = 0; i < local_sizes_.size(); ++i) {
      local_sizes_[i] = frame.index < 0 ? sp_tokens_[i] : chunk_size(static_cast<int>(i), frame.index, frame.chunk, frame.mode);
    }
  }

  int sp_size_;
  bool is_padded_ = false;
  std::vector<std::int32_t> num_tokens_;   // [dp]
  std::vector<std::int64_t> cu_tokens_;    // [dp]
  std::vector<std::int32_t> sp_tokens_;    // [dp · sp]
  std::vector<std::int32_t> local_sizes_;  // [dp · sp], of the innermost scope
  std::vector<Frame> scopes_;
};

/// One DP rank's vote on a step.
struct StepVote {
  std::int32_t unpadded = 0;  ///< tokens of this rank
  std::int32_t padded = 0;    ///< tokens after its own padding (graph sizes)
  bool wants_ubatch = false;
  std::int32_t graph_mode = 0;  ///< 0: none; larger: more of the step is in a graph
  bool operator==(StepVote const&) const = default;
};

/// The decision for all DP ranks.
struct StepDecision {
  std::int32_t graph_mode = 0;
  bool ubatch = false;
  std::vector<std::int32_t> num_tokens;  ///< [dp]: rows that each rank runs
  bool operator==(StepDecision const&) const = default;
};

/// The agreement, a pure function of the gathered table. votes[r] is empty if rank r did not answer before the deadline: E_TIMEOUT
/// naming every such rank. graph_mode is the least; ubatches only if all want them and the smallest rank reaches the last one; all
/// pad to the largest if graphs or ubatches are used. E_ARG on num_ubatches < 1.
inline StepDecision decide_step(std::span<std::optional<StepVote> const> votes, int num_ubatches = 2) {
  std::string missing;
  for (std::size_t r = 0; r < votes.size(); ++r) {
    if (!votes[r].has_value()) missing += text(missing.empty() ? "" : ", ", r);
  }
  if (!missing.empty()) throw Error(ErrorCode::timeout, text("no vote on the step from DP rank ", missing));
  if (votes.empty() || num_ubatches < 1) {
    throw Error(ErrorCode::argument, text("a vote needs ranks and ubatches, has ", votes.size(), " and ", num_ubatches));
  }
  StepDecision out{std::numeric_limits<std::int32_t>::max(), true, {}};
  std::int32_t most = 0;
  std::int32_t least = std::numeric_limits<std::int32_t>::max();
  for (auto const& vote : votes) {
    out.graph_mode = std::min(out.graph_mode, vote->graph_mode);
    out.ubatch = out.ubatch && vote->wants_ubatch;
    most = std::max(most, vote->padded);
    least = std::min(least, vote->unpadded);
  }
  if (out.ubatch && std::int64_t{most / num_ubatches} * (num_ubatches - 1) >= least) out.ubatch = false;
  bool const pad = out.graph_mode != 0 || out.ubatch;
  for (auto const& vote : votes) out.num_tokens.push_back(pad ? most : vote->padded);
  return out;
}

/// The same over a host communicator of the DP group. Collective; the same decision on every rank. If a rank does not answer, the
/// communicator throws E_TIMEOUT, which names it.
template <class Comm>
StepDecision decide_step_over(Comm& comm, StepVote const& mine, int num_ubatches = 2) {
  constexpr std::size_t kFields = 4;
  std::array<std::int32_t, kFields> const row{mine.unpadded, mine.padded, mine.wants_ubatch ? 1 : 0, mine.graph_mode};
  std::vector<std::int32_t> table(kFields * static_cast<std::size_t>(comm.size()));
  comm.all_gather(row.data(), static_cast<std::int64_t>(sizeof(row)), table.data(), {});
  std::vector<std::optional<StepVote>> votes;
  for (std::size_t i = 0; i < table.size(); i += kFields)
    votes.push_back(StepVote{table[i], table[i + 1], table[i + 2] != 0, table[i + 3]});
  return decide_step(votes, num_ubatches);
}

}  // namespace moe
