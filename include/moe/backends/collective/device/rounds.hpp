// SPDX-License-Identifier: Apache-2.0
// backends/collective/device/rounds.hpp: how ranks with rows on devices agree: headers travel with the rows and a kernel checks them, so
// that a wrong call is an error on all ranks and never hangs. docs/semantics/exchange.md §14. Host C++ only; the kernels are in
// rounds.cuh.
#pragma once

#include <unistd.h>

#include <array>
#include <atomic>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "moe/backends/common/exchange_rounds.hpp"
#include "moe/core/contract/communicator.hpp"
#include "moe/core/cuda_space.hpp"
#include "moe/core/stream_capture.hpp"

namespace moe::detail {

enum class RoundCall : std::int64_t { dispatch, combine };

/// A header is kCounts words of 64 bits and a row count for each rank; all device exchanges of a communicator have the same.
enum HeaderWord : std::int64_t { kTag, kRound, kCall, kStatus, kRows, kCounts };
inline constexpr std::int64_t kAbsentWord = -1;       ///< every word of a header that has not arrived
inline constexpr std::int64_t kAbandonedStatus = -1;  ///< kStatus: 0, 1 + the code that a rank refused with, or this value

/// The verdict on the ranks' headers, in host memory that the device maps. The first failure stays until the host has read it.
struct RoundVerdict {
  std::int32_t code;  ///< 0: none; else 1 + ErrorCode; written last
  std::int32_t peer;
  std::int64_t word;  ///< the HeaderWord that shows the error; kCounts: too many rows for `peer`
  std::int64_t call;
  std::int64_t round;
  std::int64_t expected;
  std::int64_t found;
};

/// Parameters of the kernels of a round. Device addresses.
struct RoundView {
  int rank = 0;
  int size = 1;
  std::int64_t words = 0;              ///< of a header
  std::int64_t* headers = nullptr;     ///< [size, words]; this rank sends its own
  std::int64_t* rounds = nullptr;      ///< rounds so far; counted on the device, so that replays of a captured graph count too
  std::int64_t* out_first = nullptr;   ///< [size] first of the rows for each rank, among the rows sent
  std::int64_t* in_first = nullptr;    ///< [size] first row of each rank, among the rows received
  std::int32_t* bad = nullptr;         ///< the round in progress has failed: its results are void
  std::int32_t* pending = nullptr;     ///< a combine has failed, and no dispatch has reported it yet
  RoundVerdict* verdict = nullptr;     ///< mapped host memory
  std::int64_t* host_words = nullptr;  ///< [size, words], mapped host memory
};

/// The words of this rank's header.
struct RoundOpening {
  std::int64_t tag = 0;
  RoundCall call = RoundCall::dispatch;
  std::int64_t status = 0;
  std::int64_t rows = 0;
  bool reports_pending = false;  ///< a failed combine turns this dispatch into a refusal, so that all ranks stop together
};

/// The headers decide where rows lie (exact sizes), or it is the same in every round (fixed sizes).
enum class RoundLayout : std::uint8_t { fixed, by_counts, by_rows };

/// Whether an exchange moves fixed sizes. `bytes`: what a rank then receives in one dispatch; `worst_case`: its buffers suffice for it.
inline bool has_fixed_sizes(backends::Sizes wanted, std::int64_t bytes, bool worst_case) {
  return wanted == backends::Sizes::fixed || (wanted == backends::Sizes::automatic && worst_case && bytes <= backends::kMaxFixedBytes);
}

/// Pinned host memory that the device maps; zeroed.
template <class T>
class MappedArray {
 public:
  explicit MappedArray(std::int64_t n) {
    void* p = nullptr;
    std::size_t const bytes = static_cast<std::size_t>(n) * sizeof(T);
    check_cuda(cudaHostAlloc(&p, bytes, cudaHostAllocMapped), "cudaHostAlloc");
    std::memset(p, 0, bytes);
    data_ = static_cast<T*>(p);
  }
  MappedArray(MappedArray const&) = delete;
  MappedArray& operator=(MappedArray const&) = delete;
  ~MappedArray() { cudaFreeHost(data_); }
  T* data() const { return data_; }  ///< unified addressing: the same pointer on the device

 private:
  T* data_ = nullptr;
};

/// Sends and receives of a communicator without peers (comm::Self): no-ops.
struct NoPeersGroup {
  template <class Comm>
  explicit NoPeersGroup(Comm&) {}
  void send(void const*, std::int64_t, int, cudaStream_t) {}
  void receive(void*, std::int64_t, int, cudaStream_t) {}
  void end() {}
};
template <class Comm>
struct GroupOf {
  using type = NoPeersGroup;
};
template <class Comm>
  requires(facts::has_groups<Comm>())
struct GroupOf<Comm> {
  using type = typename Comm::Group;
};

/// The rounds of one device exchange over a Communicator with groups and deadlines (comm::Nccl), or one without peers. Every dispatch or
/// combine is a sequence:
/// begin_*() → open() [header written] → exchange() [headers and rows move] → check_headers() [bad set, layout and verdict written].
/// Exact sizes: a dispatch moves the headers alone, then wait() for the verdict, then the rows; a failed combine is an error of the next
/// dispatch, on all ranks. Fixed sizes: no step waits; a round that failed gives NaN, and check() throws its error.
template <class Comm>
class DeviceRounds {
 public:
  using Group = typename GroupOf<Comm>::type;
  static constexpr bool kAlone = std::is_same_v<Group, NoPeersGroup>;
  static_assert(std::is_same_v<typename Comm::Space, space::cuda>);

  /// Collective. `refused`: why this rank cannot take part; thrown here after the peers have been told. E_MISMATCH names the first field
  /// that differs; E_PEER: another rank refused.
  DeviceRounds(Comm& comm, ExchangeContract contract, RoundLayout layout, std::int64_t max_recv_rows, std::optional<Error> refused,
               Arena<space::cuda>& arena)
      : comm_(comm), layout_(layout), max_recv_rows_(max_recv_rows) {
    if (!refused) {
      refused = error_of([&] { take_memory(arena); });
    }
    static std::atomic<std::int64_t> exchanges{0};
    contract.tag = ++exchanges;
    contract.status = refused ? status_of(refused->code()) : 0;
    std::vector<ExchangeContract> all(static_cast<std::size_t>(comm.size()), contract);
    set_phase("construction");
    if constexpr (!kAlone) {
      comm.all_gather_host(&contract, static_cast<std::int64_t>(sizeof contract), all.data());
    }
    if (refused) {
      throw Error(*refused);
    }
    compare_contracts(rank(), all);
    tag_ = all[0].tag;
    if constexpr (!kAlone) {
      comm.connect();
    }
  }
  DeviceRounds(DeviceRounds const&) = delete;
  DeviceRounds& operator=(DeviceRounds const&) = delete;
  ~DeviceRounds() {
    for (cudaEvent_t event : events_) {
      cudaEventDestroy(event);
    }
  }

  int rank() const { return comm_.rank(); }
  int size() const { return comm_.size(); }
  Comm& comm() { return comm_; }
  bool fixed() const { return layout_ == RoundLayout::fixed; }
  bool dispatched() const { return order_.dispatched(); }
  RoundView const& view() const { return view_; }
  /// After wait(): rows of rank r, and how many of them go to `to`.
  std::int64_t rows(int r) const { return word(r, kRows); }
  std::int64_t count(int r, int to) const { return word(r, kCounts + to); }

  /// Starts a dispatch. Throws without communication E_STATE (the last round is open; exact sizes while the stream is captured; the group
  /// failed) and E_TIMEOUT (an earlier round is not done). Otherwise returns why this rank cannot take part, if so: the error of `check` or
  /// of an earlier round (exact sizes). The caller tells the peers before it throws that error.
  template <class Check>
  std::optional<Error> begin_dispatch(cudaStream_t stream, Check&& check) {
    order_.expect_idle();
    bool const capturing = is_capturing(stream);
    if (capturing && !fixed()) {
      throw Error(ErrorCode::state,
                  "prepare: exact sizes are read on the host, which a captured stream cannot wait for. Choose fixed sizes");
    }
    set_phase("dispatch");
    if (!capturing) {
      limit_run_ahead();
    }
    if (!fixed()) {
      if (auto const failed = error_of([&] { this->check(); })) {
        return failed;
      }
    }
    return error_of(check);
  }
  void opened() { order_.set_dispatched(); }
  /// Starts a combine: E_STATE without dispatch; otherwise returns the error that check() throws, if any.
  template <class Check>
  std::optional<Error> begin_combine(Check&& check) {
    order_.expect_dispatched("finalize");
    set_phase("combine");
    return error_of(check);
  }
  void closed(cudaStream_t stream) {
    order_.set_idle();
    if (!is_capturing(stream)) {
      check_cuda(cudaEventRecord(events_[static_cast<std::size_t>(round_++ % kAhead)], stream), "cudaEventRecord");
    }
  }

  /// The header's words except the counts. `refused`: this rank takes part only to report it.
  RoundOpening opening(RoundCall call, std::int64_t rows, std::optional<Error> const& refused) const {
    return {tag_, call, refused ? status_of(refused->code()) : 0, refused ? 0 : rows, !fixed()};
  }
  RoundOpening abandoning(RoundCall call) const { return {tag_, call, kAbandonedStatus, 0, false}; }

  /// Enqueues: writes this rank's header, marks those of the others absent, sets the counts to zero.
  void open(RoundOpening const& opening, cudaStream_t stream);
  /// Enqueues one group: the headers, and the transfers that post(Group&) adds.
  template <class Post>
  void exchange(cudaStream_t stream, Post&& post) {
    Group group(comm_);
    auto const bytes = view_.words * static_cast<std::int64_t>(sizeof(std::int64_t));
    for (int i = 1; i < size(); ++i) {
      int const to = (rank() + i) % size();
      int const from = (rank() + size() - i) % size();
      group.send(view_.headers + rank() * view_.words, bytes, to, stream);
      group.receive(view_.headers + from * view_.words, bytes, from, stream);
    }
    post(group);
    group.end();
  }
  /// Enqueues the evaluation of the headers. `record`: also record errors for the host; false on a rank that only reports its refusal.
  void check_headers(RoundCall call, bool record, cudaStream_t stream);

  /// Records the event that wait() waits for.
  void mark(cudaStream_t stream) { check_cuda(cudaEventRecord(events_[kAhead], stream), "cudaEventRecord"); }
  /// Waits for mark(), then throws the error of the round, if any.
  void wait() {
    wait_for_event(events_[kAhead], "headers of all ranks");
    check();
  }
  /// Waits for all work on the stream, then throws the error of the rounds so far, if any.
  void wait_for(cudaStream_t stream) {
    mark(stream);
    wait();
  }
  /// Whether the communicator has met a deadline or an error.
  bool over() const { return facts::failed(comm_); }
  /// Another group of this rank has met its deadline, and what is enqueued here may wait for the same rank for ever: ends the communicator.
  /// Calls nothing of CUDA.
  void end() noexcept { facts::begin_abort(comm_); }
  /// Throws, once, the error that the kernels have found so far.
  void check() {
    RoundVerdict& v = *verdict_->data();
    std::int32_t const raw = *const_cast<std::int32_t const volatile*>(&v.code);
    if (raw != 0) {
      RoundVerdict const found = v;
      v.code = 0;
      throw error_from(found);
    }
  }

 private:
  static constexpr std::int64_t kAhead = 8;  ///< rounds that the host may be ahead of the device

  static std::int64_t status_of(ErrorCode code) { return 1 + static_cast<std::int64_t>(code); }
  static char const* phase(std::int64_t call) { return call == static_cast<std::int64_t>(RoundCall::dispatch) ? "dispatch" : "combine"; }
  std::int64_t word(int r, std::int64_t w) const { return words_->data()[r * view_.words + w]; }

  void set_phase([[maybe_unused]] char const* phase) {
    if constexpr (!kAlone) {
      comm_.set_phase(phase);
    }
  }
  void wait_for_event(cudaEvent_t event, char const* what) {
    if constexpr (kAlone) {
      check_cuda(cudaEventSynchronize(event), what);
    } else {
      comm_.wait(event, what, [this] { return missing(); });
    }
  }
  static bool is_capturing(cudaStream_t stream) { return StreamCapture<space::cuda>::is_active(stream); }
  void limit_run_ahead() {
    if (round_ >= kAhead) {
      wait_for_event(events_[static_cast<std::size_t>(round_ % kAhead)], "an earlier round");
    }
  }

  void take_memory(Arena<space::cuda>& arena) {
    view_.rank = rank();
    view_.size = size();
    view_.words = kCounts + size();
    view_.headers = arena.template take_filled<std::int64_t>(view_.words * size(), 0xff);
    view_.rounds = arena.template take_filled<std::int64_t>(1, 0);
    view_.out_first = arena.template take_filled<std::int64_t>(size(), 0);
    view_.in_first = arena.template take_filled<std::int64_t>(size(), 0);
    view_.bad = arena.template take_filled<std::int32_t>(1, 0);
    view_.pending = arena.template take_filled<std::int32_t>(1, 0);
    verdict_.emplace(1);
    words_.emplace(view_.words * size());
    seen_.emplace(view_.words * size());
    view_.verdict = verdict_->data();
    view_.host_words = words_->data();
    if (fixed()) {  // rank r's rows begin at r T_max, at the sender and the receiver, in every round
      std::vector<std::int64_t> first(static_cast<std::size_t>(size()));
      for (int r = 0; r < size(); ++r) {
        first[static_cast<std::size_t>(r)] = r * (max_recv_rows_ / size());
      }
      Memory<space::cuda>::copy_from_host(view_.out_first, first.data(), first.size() * sizeof(std::int64_t));
      Memory<space::cuda>::copy_from_host(view_.in_first, first.data(), first.size() * sizeof(std::int64_t));
    }
    for (cudaEvent_t& event : events_) {
      check_cuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
    }
  }

  /// While the device waits: the nearest rank before this one whose header has not arrived. E_MISMATCH if one that arrived disagrees.
  int missing() {
    std::int64_t* const headers = seen_->data();
    auto const bytes = static_cast<std::size_t>(view_.words * size()) * sizeof(std::int64_t);
    check_cuda(cudaMemcpyAsync(headers, view_.headers, bytes, cudaMemcpyDeviceToHost, side_), "cudaMemcpyAsync");
    for (int polls = 0; cudaStreamQuery(side_) == cudaErrorNotReady; ++polls) {
      cudaGetLastError();
      if (polls == 1000) {
        return -1;
      }
      usleep(1000);
    }
    auto const at = [&](int r, std::int64_t w) { return headers[r * view_.words + w]; };
    int absent = -1;
    for (int i = 1; i < size(); ++i) {
      int const r = (rank() + size() - i) % size();
      if (at(r, kTag) == kAbsentWord) {
        absent = absent < 0 ? r : absent;
        continue;
      }
      for (HeaderWord w : {kTag, kCall, kRound}) {
        if (at(r, w) != at(rank(), w)) {
          throw error_from(
              {1 + static_cast<std::int32_t>(ErrorCode::mismatch), r, w, at(rank(), kCall), at(rank(), kRound), at(rank(), w), at(r, w)});
        }
      }
    }
    return absent;
  }

  TransportError error_from(RoundVerdict const& v) const {
    auto const code = static_cast<ErrorCode>(v.code - 1);
    std::string message;
    if (code == ErrorCode::mismatch) {
      auto const describe = [&](std::int64_t value) {
        return v.word == kCall ? std::string(value == static_cast<std::int64_t>(RoundCall::dispatch) ? "prepare" : "finalize")
                               : text(v.word == kTag ? "layer " : "round ", value);
      };
      message = text(v.word == kTag    ? "layer"
                     : v.word == kCall ? "call"
                                       : "round",
                     ": this rank is in ", describe(v.expected), ", rank ", v.peer, " in ", describe(v.found));
    } else if (v.word == kCounts) {
      message = text("rank ", v.peer, " would receive ", v.found, " rows, more than max_recv_rows ", v.expected);
    } else if (v.found == kAbandonedStatus) {
      message = text("rank ", v.peer, " abandoned the call");
    } else {
      message = text("rank ", v.peer, " refused its arguments with ", name(static_cast<ErrorCode>(v.found - 1)));
    }
    return TransportError(code, rank(), v.peer, phase(v.call), static_cast<std::uint64_t>(v.round), message);
  }

  Comm& comm_;
  RoundLayout layout_;
  std::int64_t max_recv_rows_;
  RoundView view_;
  std::optional<MappedArray<RoundVerdict>> verdict_;
  std::optional<MappedArray<std::int64_t>> words_;
  std::optional<MappedArray<std::int64_t>> seen_;  // a copy of the headers, read by missing()
  CudaStream side_;
  std::array<cudaEvent_t, kAhead + 1> events_{};  // ends of rounds, and mark()
  std::int64_t tag_ = 0;
  std::int64_t round_ = 0;
  CallOrder order_;
};

}  // namespace moe::detail
