// SPDX-License-Identifier: Apache-2.0
// eplb/weight_mover.hpp: carries out a transfer plan: experts of one layer at a time from rank to rank, through one spare buffer, by the
// communicator's messages or by stores into a window.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "moe/comm/deadline.hpp"
#include "moe/comm/symmetric_memory.hpp"
#include "moe/core/buffer.hpp"
#include "moe/core/contract/communicator.hpp"
#include "moe/core/contract/concepts.hpp"
#include "moe/core/error.hpp"
#include "moe/eplb/expert_tensors.hpp"
#include "moe/eplb/group.hpp"
#include "moe/eplb/maps.hpp"
#include "moe/eplb/transfer_plan.hpp"

namespace moe::eplb {

/// Counts of the moves of this rank, summed over layers. Units: bytes and expert slots.
struct MoveStats {
  std::int64_t bytes_sent = 0;
  std::int64_t bytes_received = 0;
  std::int64_t bytes_copied = 0;   ///< inside the rank, before commit
  std::int64_t slots_changed = 0;  ///< expert slots committed
  bool operator==(MoveStats const&) const = default;
};

/// A spare buffer in a window: every rank's part as this rank maps it. Borrowed: the window must outlive the mover.
struct PeerBuffers {
  std::vector<std::byte*> parts{};  ///< [R]; empty: none
  std::int64_t bytes = 0;           ///< of each part
};

/// The user part of a window (comm::MpiShared, comm::NcclSymmetric) that nothing else uses, of at least WeightMover::bytes_needed().
template <SymmetricMemory Window>
PeerBuffers peer_buffers(Window const& window) {
  auto const control = static_cast<std::int64_t>(comm::kWindowControlBytes);
  PeerBuffers out{{}, window.bytes() - control};
  for (int r = 0; r < window.size(); ++r) out.parts.push_back(static_cast<std::byte*>(window.peer(r, control)));
  return out;
}

/// Moves expert weights between ranks, over a communicator used for nothing else: the EPLB group has the members of EP, but weight messages
/// must never interleave with a layer's messages. Works in the communicator's space (host: comm::Self, comm::Mpi; device: comm::Nccl).
///
/// A layer moves in two steps. fetch() brings every expert that this rank needs into the spare buffer while the weights in use stay as
/// they are: forwards may run meanwhile. commit() copies the buffer into the weights: no forward may run on any rank between the first
/// rank's commit and the last one's, so ranks agree before they commit (rearrange(), AsyncRearrangement). HoldForwards refuses those of
/// this rank that begin meanwhile.
///
/// Besides the weights, a rank allocates memory for at most one layer of its own experts. Every call but discard() and the accessors
/// is collective. Messages in flight are bounded: in each transfer round a rank sends to one peer and receives from one, one array of one
/// expert at a time. After a communicator error the layer is unchanged; the communicator decides whether further calls are possible.
///
/// With Params::peers the spare buffers of all ranks lie in a window, and a rank stores the experts that others need into their buffers
/// itself. The communicator then carries two barriers a layer: all buffers are free, all experts have arrived.
template <class Comm>
class WeightMover {
  static_assert(sizeof(Met<NeedsCommunicator<Comm>>) == 1);

 public:
  using Space = typename moe::detail::SpaceOf<Comm>::type;
  using StreamType = Stream<Space>;
  struct Params {
    std::vector<int> node_of_rank{};  ///< [R]: if given, experts are sent from the receiver's node if it holds them
    /// Device space: of wait(); the host communicators have deadlines of their own. 0: none.
    std::int64_t timeout_ms = comm::kDefaultTimeoutMs;
    PeerBuffers peers{};  ///< if given, on all ranks: weights move by stores into a window, and no buffer is allocated
  };

  /// Bytes of the spare buffer of these arrays.
  static std::int64_t bytes_needed(std::vector<LayerTensors> const& layers, int slots_per_rank) {
    std::int64_t slot = 0;
    for (LayerTensors const& tensors : layers) slot = std::max(slot, bytes_of_slot(tensors));
    return slot * slots_per_rank;
  }

  /// layers[l]: the arrays of layer l, borrowed, each of at least slots_per_rank expert slots. Collective: E_MISMATCH if ranks differ in
  /// their arrays, or if only some have a window; E_ARG on an array that is null or too short, or a window of other ranks; E_CAPACITY if
  /// the buffer cannot be allocated or the window is too small.
  WeightMover(Comm& comm, std::vector<LayerTensors> layers, int slots_per_rank, Params params = {})
      : comm_(comm), params_(std::move(params)), layers_(std::move(layers)), slots_per_rank_(slots_per_rank) {
    std::exception_ptr refused;
    try {
      check_arrays();
      for (LayerTensors const& tensors : layers_) slot_bytes_ = std::max(slot_bytes_, bytes_of_slot(tensors));
      take_buffer();
    } catch (Error const&) {
      refused = std::current_exception();
    }
    group_.emplace(comm_, StreamType{}, params_.timeout_ms);
    succeed_together(*group_, refused, "construction of the weight mover");
    auto const words = group_->all_gather(shape_hash());
    for (std::size_t r = 1; r < words.size(); ++r) {
      if (words[r] != words[0]) {
        throw Error(ErrorCode::mismatch,
                    text("weight mover: rank ", r, " has other layers, arrays or expert slots than rank 0, or only one of them a window"));
      }
    }
  }
  WeightMover(WeightMover const&) = delete;
  WeightMover& operator=(WeightMover const&) = delete;

  int rank() const { return comm_.rank(); }
  int num_ranks() const { return comm_.size(); }
  int num_layers() const { return static_cast<int>(layers_.size()); }
  int slots_per_rank() const { return slots_per_rank_; }
  Comm& comm() { return comm_; }
  /// Bytes of the spare buffer: the largest layer's experts of one rank, each array padded to 256 bytes per expert slot.
  std::int64_t buffer_bytes() const { return slot_bytes_ * slots_per_rank_; }
  MoveStats const& stats() const { return stats_; }
  /// The layer that lies in the buffer, or -1.
  int fetched_layer() const { return fetched_ ? fetched_->layer : -1; }

  /// Steps 1 to 4 of a layer: local copies, sends and receives, duplicates, all into the buffer. old_map, new_map [R · L]: expert of
  /// every expert slot, kEmptySlot where a rank joins or leaves; equal on all ranks. Device space: enqueued on `stream`, see wait().
  /// E_STATE if a fetched layer was neither committed nor discarded; E_ARG as plan_flows(); TransportError naming layer, expert, peer.
  void fetch(int layer, std::span<std::int32_t const> old_map, std::span<std::int32_t const> new_map, StreamType stream = {}) {
    if (fetched_) throw Error(ErrorCode::state, text("layer ", fetched_->layer, " is in the spare buffer: commit or discard it first"));
    check_layer(layer);
    if (old_map.size() != static_cast<std::size_t>(slots_per_rank_) * static_cast<std::size_t>(num_ranks())) {
      throw Error(ErrorCode::argument,
                  text("the map has ", old_map.size(), " expert slots, ", num_ranks(), " ranks have ", slots_per_rank_, " each"));
    }
    auto const largest = std::max(max_of(old_map), max_of(new_map));
    auto const flows = plan_flows(old_map, new_map, largest + 1, num_ranks(), {params_.node_of_rank});
    RankPlan plan = plan_rank(flows, old_map, new_map, num_ranks(), rank());

    for (SlotCopy const& c : plan.local_copies) copy_into_buffer(layer, c, false, stream);
    if (in_window()) {
      store_into_peers(layer, flows, stream);
    } else {
      for (std::vector<Message> const& round : schedule_rounds(flows, num_ranks())) move_round(layer, round, stream);
    }
    for (SlotCopy const& c : plan.duplicates) copy_into_buffer(layer, c, true, stream);
    fence_.record(stream);
    fetched_ = Fetched{layer, std::move(plan.commits)};
  }

  /// Local: waits on the host until the copies of the last fetch() or commit() are done. Host space: nothing to wait for. E_TIMEOUT, which
  /// ends the communicator (comm::Nccl).
  void wait() const {
    detail::wait_for(comm_, fence_, params_.timeout_ms, fetched_ ? text("weights of layer ", fetched_->layer) : "commit");
  }

  /// Step 5: buffer → weights for every expert slot that changes. Local, in stream order, after every rank has fetched. E_STATE if nothing
  /// is.
  void commit(StreamType stream = {}) {
    if (!fetched_) throw Error(ErrorCode::state, "no layer is in the spare buffer");
    for (std::int32_t slot : fetched_->commits) {
      std::int64_t offset = 0;
      for (ExpertTensor const& t : tensors(fetched_->layer)) {
        copy(weights(t, slot), buffer(slot) + offset, t.bytes, stream);
        offset += padded(t.bytes);
      }
    }
    stats_.slots_changed += static_cast<std::int64_t>(fetched_->commits.size());
    fence_.record(stream);
    fetched_.reset();
  }
  /// Discards the fetched layer; the weights are unchanged.
  void discard() { fetched_.reset(); }
  /// Local, from any thread: ends what the communicator has under way (comm::Nccl); its group must be rebuilt. Calls nothing of CUDA.
  void end() noexcept { facts::begin_abort(comm_); }

  /// Steps 1 to 4 on the layer with the largest experts, expert slot 0 of each rank to every other rank: reserves the memory of the
  /// transport and warms up its connections. Weights and maps do not change.
  void profile(StreamType stream = {}) {
    if (fetched_) throw Error(ErrorCode::state, text("layer ", fetched_->layer, " is in the spare buffer: commit or discard it first"));
    if (layers_.empty() || slots_per_rank_ == 0) return;
    MoveStats const before = stats_;
    int largest = 0;
    for (int l = 1; l < num_layers(); ++l) {
      if (bytes_of_slot(tensors(l)) > bytes_of_slot(tensors(largest))) largest = l;
    }
    for (int shift = 1; shift < num_ranks(); ++shift) {
      std::vector<Message> round;
      std::vector<Flow> flows;
      for (int from = 0; from < num_ranks(); ++from) {
        int const to = (from + shift) % num_ranks();
        flows.push_back({0, from, from * slots_per_rank_, to, to * slots_per_rank_});
        round.push_back({from, to, {flows.back()}});
      }
      if (in_window()) {
        store_into_peers(largest, flows, stream);
      } else {
        move_round(largest, round, stream);
      }
    }
    fence_.record(stream);
    detail::wait_for(comm_, fence_, params_.timeout_ms, "profile of the weight mover");
    stats_ = before;
  }

  /// Collective: E_MISMATCH naming the first rank whose `next` differs from rank 0's; E_PEER if one could not make it (no value).
  void agree_on(std::optional<std::uint64_t> next_hash, StreamType stream = {}) {
    group_->set_stream(stream);
    std::uint64_t constexpr kNone = 0;
    auto const words = group_->all_gather(next_hash ? std::max<std::uint64_t>(*next_hash, 1) : kNone);
    auto const missing = std::find(words.begin(), words.end(), kNone);
    if (missing != words.end()) throw Error(ErrorCode::peer, text("rank ", missing - words.begin(), " has no new expert maps"));
    check_same_maps(words);
  }

 private:
  struct Fetched {
    int layer;
    std::vector<std::int32_t> commits;  // expert slots of this rank
  };
  static constexpr std::int64_t kAlign = 256;
  static std::int64_t padded(std::int64_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }
  static std::int64_t bytes_of_slot(LayerTensors const& tensors) {
    std::int64_t sum = 0;
    for (ExpertTensor const& t : tensors) sum += padded(t.bytes);
    return sum;
  }
  static std::int32_t max_of(std::span<std::int32_t const> map) { return map.empty() ? 0 : *std::max_element(map.begin(), map.end()); }

  void check_arrays() const {
    if (slots_per_rank_ < 1) throw Error(ErrorCode::argument, text("slots_per_rank must be at least 1, is ", slots_per_rank_));
    for (std::size_t l = 0; l < layers_.size(); ++l) {
      for (ExpertTensor const& t : layers_[l]) {
        if (t.data == nullptr || t.slots < slots_per_rank_ || t.bytes < 1 || (t.slots > 1 && t.stride < t.bytes)) {
          throw Error(ErrorCode::argument,
                      text("layer ", l, ", ", t.name, ": ", t.data == nullptr ? "null, " : "", t.slots, " expert slots of ", t.bytes,
                           " bytes, ", t.stride, " apart; ", slots_per_rank_, " expert slots are needed"));
        }
      }
    }
  }
  void take_buffer() {
    if (params_.peers.parts.empty()) {
      buffer_ = Buffer<std::byte, Space>(buffer_bytes());
      data_ = buffer_.data();
      return;
    }
    std::vector<std::byte*> const& parts = params_.peers.parts;
    if (parts.size() != static_cast<std::size_t>(num_ranks())) {
      throw Error(ErrorCode::argument, text("peers: a window of ", parts.size(), " ranks, the communicator has ", num_ranks()));
    }
    if (std::find(parts.begin(), parts.end(), nullptr) != parts.end()) throw Error(ErrorCode::argument, "peers: a part is null");
    if (params_.peers.bytes < buffer_bytes()) {
      throw Error(ErrorCode::capacity,
                  text("peers: the window has ", params_.peers.bytes, " bytes a rank, one layer's experts need ", buffer_bytes()));
    }
    data_ = parts[static_cast<std::size_t>(rank())];
  }
  bool in_window() const { return !params_.peers.parts.empty(); }

  std::uint64_t shape_hash() const {
    std::uint64_t h = 0xcbf29ce484222325ULL;
    auto const mix = [&h](std::uint64_t value) { h = (h ^ value) * 0x100000001b3ULL; };
    mix(static_cast<std::uint64_t>(slots_per_rank_));
    mix(in_window() ? 1 : 0);
    for (LayerTensors const& layer : layers_) {
      mix(layer.size() + 1);
      for (ExpertTensor const& t : layer) {
        mix(static_cast<std::uint64_t>(t.bytes));
        for (char c : t.name) mix(static_cast<unsigned char>(c));
      }
    }
    return h;
  }
  void check_layer(int layer) const {
    if (layer < 0 || layer >= num_layers()) {
      throw Error(ErrorCode::argument, text("layer ", layer, " is out of range [0, ", num_layers(), ")"));
    }
  }

  LayerTensors const& tensors(int layer) const { return layers_[static_cast<std::size_t>(layer)]; }
  std::int64_t local(std::int32_t slot) const { return slot - std::int64_t{rank()} * slots_per_rank_; }
  std::byte* weights(ExpertTensor const& t, std::int32_t slot) const { return t.data + local(slot) * t.stride; }
  std::byte* buffer(std::int32_t slot) { return data_ + local(slot) * slot_bytes_; }

  static void copy(void* to, void const* from, std::int64_t bytes, StreamType stream) {
    Memory<Space>::copy_async(to, from, static_cast<std::size_t>(bytes), stream);
  }
  void copy_into_buffer(int layer, SlotCopy const& c, bool from_buffer, StreamType stream) {
    std::int64_t offset = 0;
    for (ExpertTensor const& t : tensors(layer)) {
      copy(buffer(c.destination_slot) + offset, from_buffer ? buffer(c.source_slot) + offset : weights(t, c.source_slot), t.bytes, stream);
      offset += padded(t.bytes);
      stats_.bytes_copied += t.bytes;
    }
  }

  /// Every expert of `flows` straight into its receiver's buffer. A receiver may still copy out of its buffer, or have filled it with local
  /// copies of this layer, in other expert slots: hence the first barrier, which all ranks reach after their last commit.
  void store_into_peers(int layer, std::vector<Flow> const& flows, StreamType stream) {
    meet(layer, stream);
    for (Flow const& f : flows) {
      if (f.source_rank == rank()) store(layer, f, stream);
      if (f.destination_rank == rank()) {
        for (ExpertTensor const& t : tensors(layer)) stats_.bytes_received += t.bytes;
      }
    }
    meet(layer, stream);
  }
  void store(int layer, Flow const& f, StreamType stream) {
    std::int64_t const slot = f.destination_slot - std::int64_t{f.destination_rank} * slots_per_rank_;
    std::byte* to = params_.peers.parts[static_cast<std::size_t>(f.destination_rank)] + slot * slot_bytes_;
    for (ExpertTensor const& t : tensors(layer)) {
      copy(to, weights(t, f.source_slot), t.bytes, stream);
      stats_.bytes_sent += t.bytes;
      to += padded(t.bytes);
    }
  }
  void meet(int layer, StreamType stream) {
    try {
      comm_.barrier(stream);
    } catch (TransportError const& e) {
      fail(layer, nullptr, nullptr, e);
    }
  }

  /// One transfer round: this rank's message to one peer and from one peer. The collective takes one array of one expert at a time,
  /// straight from the weights into the peer's buffer; ranks without a message join with zero bytes.
  void move_round(int layer, std::vector<Message> const& round, StreamType stream) {
    Message const* out = nullptr;
    Message const* in = nullptr;
    std::size_t longest = 0;
    for (Message const& m : round) {
      if (m.source_rank == rank()) out = &m;
      if (m.destination_rank == rank()) in = &m;
      longest = std::max(longest, m.flows.size());
    }
    for (std::size_t i = 0; i < longest; ++i) {
      Flow const* const send = out != nullptr && i < out->flows.size() ? &out->flows[i] : nullptr;
      Flow const* const receive = in != nullptr && i < in->flows.size() ? &in->flows[i] : nullptr;
      std::int64_t offset = 0;
      for (ExpertTensor const& t : tensors(layer)) {
        try {
          exchange(t, offset, send, receive, stream);
        } catch (TransportError const& e) {
          fail(layer, send, receive, e);
        }
        offset += padded(t.bytes);
      }
    }
  }
  void exchange(ExpertTensor const& t, std::int64_t offset, Flow const* send, Flow const* receive, StreamType stream) {
    auto const ranks = static_cast<std::size_t>(num_ranks());
    in_counts_.assign(ranks, 0);
    out_counts_.assign(ranks, 0);
    zeros_.assign(ranks, 0);
    if (send != nullptr) {
      in_counts_[static_cast<std::size_t>(send->destination_rank)] = t.bytes;
      stats_.bytes_sent += t.bytes;
    }
    if (receive != nullptr) {
      out_counts_[static_cast<std::size_t>(receive->source_rank)] = t.bytes;
      stats_.bytes_received += t.bytes;
    }
    std::byte const* const from = send != nullptr ? weights(t, send->source_slot) : t.data;
    std::byte* const to = receive != nullptr ? buffer(receive->destination_slot) + offset : data_;
    comm_.all_to_all_v(from, in_counts_.data(), zeros_.data(), to, out_counts_.data(), zeros_.data(), stream);
  }
  [[noreturn]] void fail(int layer, Flow const* send, Flow const* receive, TransportError const& e) const {
    std::string what = text("weights of layer ", layer);
    if (receive != nullptr && e.peer() == receive->source_rank) {
      what += text(", expert ", receive->expert, " from rank ", receive->source_rank);
    } else if (send != nullptr && e.peer() == send->destination_rank) {
      what += text(", expert ", send->expert, " to rank ", send->destination_rank);
    }
    // The communicator's message ends with its own "(rank …)", which the new error repeats.
    throw TransportError(e.code(), e.rank(), e.peer(), "rearrange", e.round(),
                         text(what, ": ", e.message().substr(0, e.message().rfind(" (rank "))));
  }

  Comm& comm_;
  Params params_;
  std::vector<LayerTensors> layers_;
  int slots_per_rank_;
  std::int64_t slot_bytes_ = 0;
  Buffer<std::byte, Space> buffer_;       // unless the spare buffer is in a window
  std::byte* data_ = nullptr;             // [L, slot_bytes_]
  std::optional<CommGroup<Comm>> group_;  // of agree_on(), which allocates nothing: layers serve meanwhile
  std::optional<Fetched> fetched_;
  Fence<Space> fence_;
  MoveStats stats_;
  std::vector<std::int64_t> in_counts_, out_counts_, zeros_;
};

}  // namespace moe::eplb
