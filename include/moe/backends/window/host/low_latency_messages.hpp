// SPDX-License-Identifier: Apache-2.0
// backends/window/host/low_latency_messages.hpp: the dispatch of LowLatency over a host window: tokens to messages in the receivers' parts,
// and messages to the batches of this rank's experts.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "moe/backends/window/host/batch.hpp"
#include "moe/backends/window/host/low_latency_params.hpp"
#include "moe/backends/window/host/rounds.hpp"

namespace moe::backends::detail {

/// Where a buffer set's parts lie in the window, and its rounds.
template <class Window>
struct LowLatencyBufferSet {
  LowLatencyOffsets at;
  std::optional<moe::detail::WindowRounds<Window>> rounds;
};

/// The properties of the exchange that decide which messages exist.
struct LowLatencyMessageShape {
  std::int64_t hidden;
  std::int64_t topk;
  std::int64_t max_tokens;
  int ranks;
  int rank;
  int num_local;       ///< experts of this rank
  int max_local;       ///< most experts of any rank
  bool on_input;       ///< rows are multiplied by the router weight before they are quantised
  bool per_rank;       ///< one message for each (token, rank) instead of each (token, expert): Params::deduplicate
  std::int64_t terms;  ///< most outputs that are returned for one token
};

/// Messages lie in recv[parity][block][i]: block is (expert, source), or with per_rank the source. Each block's count is published with the
/// round. The words of a message: its row position at the source; with per_rank also the k local ids and the k weights.
template <class Window, class Config, class Quant, class Partial>
class LowLatencyMessages {
 public:
  using Act = typename Config::Act;
  using Routed = RoutedTokens<Act, Config::hidden>;
  using Record = moe::detail::BatchRecord<Config, Quant, Partial>;
  using BufferSet = LowLatencyBufferSet<Window>;

  LowLatencyMessages(LowLatencyMessageShape const& shape, Quant const& quant)
      : shape_(shape), quant_(quant), message_(shape.hidden, shape.per_rank ? 1 + 2 * shape.topk : 1) {}

  void take(ExpertPlacement const& placement, Arena<space::host>& arena) {
    num_physical_ = placement.num_physical();
    owner_ = arena.template take<std::int32_t>(num_physical_);
    local_ = arena.template take<std::int32_t>(num_physical_);
    std::copy_n(placement.owners().data(), num_physical_, owner_);
    std::copy_n(placement.locals().data(), num_physical_, local_);
    counts_ = arena.template take<std::int32_t>(num_physical_ + shape_.ranks);
    staging_ = arena.template take<std::byte>(message_.bytes());
    scaled_ = arena.template take<Act>(shape_.on_input ? shape_.hidden : 0);
  }
  int num_physical() const { return num_physical_; }
  /// Blocks of counts that each rank has for each source.
  int count_rows() const { return shape_.per_rank ? 1 : shape_.max_local; }
  /// Bytes of one parity's counts, and of its messages.
  std::int64_t count_bytes() const { return 8 * std::int64_t{count_rows()} * shape_.ranks; }
  std::int64_t received_bytes() const { return std::int64_t{count_rows()} * shape_.ranks * shape_.max_tokens * message_.bytes(); }
  /// The word with the number of messages that rank `from` has sent for an expert (per_rank: for expert 0, to this rank).
  std::size_t count_at(BufferSet const& s, int parity, std::int32_t expert, int from) const {
    return s.at.counts[static_cast<std::size_t>(parity)] +
           8 * (static_cast<std::size_t>(expert) * static_cast<std::size_t>(shape_.ranks) + static_cast<std::size_t>(from));
  }

  /// Stores the messages of r.rows tokens, and publishes the counts, including zeros. Waits for no peer.
  void send(BufferSet& s, Record& r, Routed const& in) {
    std::fill_n(counts_, num_physical_ + shape_.ranks, 0);
    for (std::int64_t t = 0; t < r.rows; ++t) {
      shape_.per_rank ? send_to_ranks(s, r, in, t) : send_to_experts(s, r, in, t);
    }

    auto publish = [&](int to, std::int32_t block, std::int32_t count) {
      s.rounds->window().publish(to, count_at(s, s.rounds->parity(), block, shape_.rank), s.rounds->word(count));
    };
    for (int p = 0; p < num_physical_ && !shape_.per_rank; ++p) {
      publish(owner_[p], local_[p], counts_[p]);
    }
    for (int to = 0; to < shape_.ranks && shape_.per_rank; ++to) {
      publish(to, 0, counts_[num_physical_ + to]);
    }
  }
  /// Waits for the messages of every rank, and packs their rows by source rank, then by token.
  void receive(BufferSet& s, Record& r) {
    std::fill_n(r.counts, shape_.num_local, 0);
    r.num_records = 0;
    for (int from = 0; from < shape_.ranks; ++from) {
      shape_.per_rank ? receive_records(s, r, from) : receive_rows(s, r, from);
    }
  }

 private:
  std::size_t message_at(BufferSet const& s, std::int64_t block, std::int64_t i) const {
    return s.at.received[static_cast<std::size_t>(s.rounds->parity())] +
           static_cast<std::size_t>((block * shape_.max_tokens + i) * message_.bytes());
  }
  bool is_expert(std::int32_t id) const { return id >= 0 && id < num_physical_; }

  // Quantises row t into the staging message, weighted first if the router weight is applied to the input.
  std::byte* pack(Routed const& in, std::int64_t t) {
    message_.pack(quant_, shape_.on_input ? moe::detail::weighted_row(in, t, scaled_) : row_ptr(in.hidden, t), staging_);
    return staging_;
  }
  void store(BufferSet& s, int to, std::int64_t block, std::int64_t i) {
    if (Window& w = s.rounds->window(); !w.masked(to)) {
      std::copy_n(staging_, message_.bytes(), w.template at<std::byte>(to, message_at(s, block, i)));
    }
  }
  void send_to_experts(BufferSet& s, Record& r, Routed const& in, std::int64_t t) {
    std::byte* message = nullptr;
    for (std::int64_t j = 0; j < shape_.topk; ++j) {
      std::int32_t const id = in.topk_ids(t, j);
      std::int32_t& entry = r.entries[t * shape_.topk + j];
      entry = -1;
      if (!is_expert(id)) {
        continue;
      }
      for (std::int64_t i = 0; i < j && entry < 0; ++i) {
        entry = in.topk_ids(t, i) == id ? r.entries[t * shape_.topk + i] : -1;  // sent already: its output is added once per choice
      }
      if (entry >= 0) {
        continue;
      }
      entry = static_cast<std::int32_t>(t * shape_.topk + j);
      r.ranks[entry] = owner_[id];
      message = message == nullptr ? pack(in, t) : message;
      message_.words(message)[0] = entry;
      store(s, owner_[id], std::int64_t{local_[id]} * shape_.ranks + shape_.rank, counts_[id]++);
    }
  }
  void send_to_ranks(BufferSet& s, Record& r, Routed const& in, std::int64_t t) {
    std::int64_t const topk = shape_.topk;
    std::byte* message = nullptr;
    std::int64_t destination = 0;
    for (int to = 0; to < shape_.ranks; ++to) {
      bool wanted = false;
      for (std::int64_t j = 0; j < topk; ++j) {
        wanted = wanted || (is_expert(in.topk_ids(t, j)) && owner_[in.topk_ids(t, j)] == to);
      }
      if (!wanted) {
        continue;
      }
      message = message == nullptr ? pack(in, t) : message;
      std::int32_t* const words = message_.words(message);
      words[0] = static_cast<std::int32_t>(t * shape_.terms + destination);
      for (std::int64_t j = 0; j < topk; ++j) {
        std::int32_t const id = in.topk_ids(t, j);
        words[1 + j] = is_expert(id) && owner_[id] == to ? local_[id] : kNoExpert;
        std::copy_n(reinterpret_cast<std::byte const*>(&r.weights[t * topk + j]), sizeof(float),
                    reinterpret_cast<std::byte*>(&words[1 + topk + j]));
      }
      store(s, to, shape_.rank, counts_[num_physical_ + to]++);
      r.ranks[t * topk + destination] = to;
      r.entries[t * topk + destination++] = words[0];
    }
    for (; destination < shape_.terms; ++destination) {
      r.entries[t * topk + destination] = -1;
    }
  }

  std::int64_t wait_count(BufferSet& s, std::int32_t expert, int from) {
    return comm::word_count(s.rounds->window().wait_count(count_at(s, s.rounds->parity(), expert, from), s.rounds->round(),
                                                          comm::ExchangePhase::dispatch_rows, from));
  }
  std::byte const* message(BufferSet& s, std::int64_t block, std::int64_t i) {
    return s.rounds->window().template own<std::byte const>(message_at(s, block, i));
  }
  void receive_rows(BufferSet& s, Record& r, int from) {
    for (std::int32_t e = 0; e < shape_.num_local; ++e) {
      std::int64_t const count = wait_count(s, e, from);
      for (std::int64_t i = 0; i < count; ++i) {
        std::byte const* const m = message(s, std::int64_t{e} * shape_.ranks + from, i);
        std::int64_t const row = r.append(e);
        message_.unpack(m, r.payload_row(row), r.scale_row(row));
        r.origins[row] = {from, message_.words(m)[0]};
      }
    }
  }
  void receive_records(BufferSet& s, Record& r, int from) {
    std::int64_t const topk = shape_.topk;
    std::int64_t const count = wait_count(s, 0, from);
    for (std::int64_t i = 0; i < count; ++i) {
      std::byte const* const m = message(s, from, i);
      std::int32_t const* const words = message_.words(m);
      std::int64_t const n = r.num_records++;
      r.record_origins[n] = {from, words[0]};
      std::int32_t* const rows = r.record_rows + n * topk;
      std::copy_n(reinterpret_cast<std::byte const*>(words + 1 + topk), static_cast<std::size_t>(topk) * sizeof(float),
                  reinterpret_cast<std::byte*>(r.record_weights + n * topk));
      for (std::int64_t j = 0; j < topk; ++j) {
        std::int32_t const e = words[1 + j];
        rows[j] = -1;
        for (std::int64_t before = 0; before < j && e != kNoExpert && rows[j] < 0; ++before) {
          rows[j] = words[1 + before] == e ? rows[before] : -1;
        }
        if (e != kNoExpert && rows[j] < 0) {
          rows[j] = static_cast<std::int32_t>(r.append(e));
          message_.unpack(m, r.payload_row(rows[j]), r.scale_row(rows[j]));
        }
      }
    }
  }

  LowLatencyMessageShape shape_;
  Quant quant_;
  moe::detail::BatchMessage<Config, Quant> message_;
  int num_physical_ = 0;
  std::int32_t* owner_ = nullptr;   // [P]
  std::int32_t* local_ = nullptr;   // [P]
  std::int32_t* counts_ = nullptr;  // [P] messages to each expert, then [R] to each rank
  std::byte* staging_ = nullptr;    // one message
  Act* scaled_ = nullptr;           // [H]
};

}  // namespace moe::backends::detail
