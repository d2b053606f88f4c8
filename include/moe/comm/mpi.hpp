// SPDX-License-Identifier: Apache-2.0
// comm/mpi.hpp: ranks as MPI processes, arrays in host memory. Collectives use point-to-point messages, so that a timeout names the peer
// that did not arrive, counts are 64-bit, and sums are in rank order.
#pragma once

#include <mpi.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "moe/comm/deadline.hpp"
#include "moe/comm/mpi_transfer.hpp"
#include "moe/comm/process.hpp"
#include "moe/comm/wait_times.hpp"
#include "moe/core/buffer.hpp"
#include "moe/core/space.hpp"

namespace moe::comm {

/// All ranks of an MPI communicator. The caller owns MPI_Init and MPI_Finalize. Not thread-safe. Every call is collective and returns when
/// this rank's part is done. It throws TransportError: E_TIMEOUT if a peer does not arrive before the deadline, E_MISMATCH if a peer sends
/// more than is expected, E_INTERNAL for other MPI errors. After any of them every call is E_STATE, and the group must be rebuilt. Nothing
/// allocates after construction and reserve_reduction().
class Mpi {
 public:
  using Space = space::host;
  using Transfer = MpiTransfer;
  static constexpr char const* kName = "mpi";
  struct Params {
    std::int64_t timeout_ms = kDefaultTimeoutMs;  ///< of each collective, and of each wait of a window over it; 0 waits for ever
    /// Longer messages are sent as blocks, because MPI counts are int: at most 2^31 - 1.
    std::int64_t large_message_bytes = std::int64_t{1} << 30U;
    bool statistics = false;  ///< collects waited_ns()
  };

  /// Collective over `parent`, which is duplicated and not used again. E_STATE if MPI is not running, E_CONFIG for a message size that no
  /// count can hold.
  explicit Mpi(MPI_Comm parent, Params params) : params_(params) {
    constexpr std::int64_t kMost = std::numeric_limits<int>::max();
    if (params.large_message_bytes < 0 || params.large_message_bytes > kMost) {
      throw Error(ErrorCode::config, text("mpi: large_message_bytes: ", params.large_message_bytes, " is out of range [0, ", kMost, "]"));
    }
    int initialized = 0;
    int finalized = 0;
    MPI_Initialized(&initialized);
    MPI_Finalized(&finalized);
    if (initialized == 0 || finalized != 0) throw Error(ErrorCode::state, "mpi: MPI_Init has not been called, or MPI_Finalize has");
    MPI_Comm_rank(parent, &rank_);
    MPI_Comm_size(parent, &size_);
    requests_.reserve(max_requests());
    peers_.reserve(max_requests());
    statuses_.resize(max_requests());
    counts_.resize(static_cast<std::size_t>(size_));
    offsets_.resize(static_cast<std::size_t>(size_));
    tokens_.resize(static_cast<std::size_t>(size_));
    waits_ = detail::WaitTimes(size_, max_requests());
    begin("construction");
    MPI_Request request = MPI_REQUEST_NULL;
    check(MPI_Comm_idup(parent, &comm_, &request));
    add(request, -1);
    wait();
    check(MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN));
    check(MPI_Type_contiguous(kBlock, MPI_BYTE, &block_));
    check(MPI_Type_commit(&block_));
    phase_ = "construction";
    processes_ = detail::gather_marks(size_, [&](auto const* in, std::int64_t n, auto* out) { all_gather(in, n, out, {}); });
    phase_ = nullptr;
    waits_ = detail::WaitTimes(size_, max_requests());  // without that of the construction
  }
  explicit Mpi(MPI_Comm parent) : Mpi(parent, Params{}) {}
  Mpi(Mpi const&) = delete;
  Mpi& operator=(Mpi const&) = delete;
  /// Waits for no peer. After a failure the MPI communicator is not freed: messages may still be in flight on it.
  ~Mpi() {
    int finalized = 0;
    MPI_Finalized(&finalized);
    if (finalized != 0 || failed_) return;
    MPI_Type_free(&block_);
    MPI_Comm_free(&comm_);
  }

  int rank() const { return rank_; }
  int size() const { return size_; }
  /// The most messages of one collective: per peer, each way, blocks and remainder.
  std::size_t max_requests() const { return static_cast<std::size_t>(size_) * 4; }
  /// Whether two threads may use two objects of this class concurrently: MPI was started with MPI_THREAD_MULTIPLE.
  static bool allows_threads() {
    int level = MPI_THREAD_SINGLE;
    MPI_Query_thread(&level);
    return level == MPI_THREAD_MULTIPLE;
  }
  /// The MPI communicator: a private duplicate, so no other messages share it.
  MPI_Comm handle() const { return comm_; }
  std::int64_t timeout_ms() const { return params_.timeout_ms; }
  /// Deadline of each collective from now on, in milliseconds; 0 waits for ever.
  void set_timeout_ms(std::int64_t timeout_ms) { params_.timeout_ms = timeout_ms; }
  /// [size] With Params::statistics: nanoseconds that collectives have waited for messages of each rank, but for finish().
  std::vector<std::uint64_t> const& waited_ns() const { return waits_.waited_ns(); }
  /// What the caller is doing, for error messages; the string must outlive the object.
  void set_phase(char const* phase) { phase_ = phase; }
  /// Allocates memory for sums whose share on one rank is up to `n` floats.
  void reserve_reduction(std::int64_t n) {
    std::int64_t const needed = n * (size_ - 1);
    if (needed > work_.size()) work_ = Buffer<float>(needed);
  }

  /// Gathers `n` bytes of each rank, in rank order, into out[0, n · size).
  void all_gather(void const* in, std::int64_t n, void* out, HostStream) {
    begin("all_gather");
    for (int r = 0; r < size_; ++r) {
      counts_[index(r)] = n;
      offsets_[index(r)] = n * r;
    }
    gather(in, n, out, counts_.data(), offsets_.data());
  }
  /// Gathers counts[r] bytes of each rank r into out + offsets[r]; `n` = counts[rank]. `in` may be this rank's part of `out`.
  void all_gather_v(void const* in, std::int64_t n, void* out, std::int64_t const* counts, std::int64_t const* offsets, HostStream) {
    begin("all_gather_v");
    gather(in, n, out, counts, offsets);
  }
  /// in_counts[r] bytes at in + in_offsets[r] go to rank r; out_counts[r] bytes from it arrive at out + out_offsets[r]. Rank r's
  /// in_counts[s] must be rank s's out_counts[r]. `in` and `out` must not overlap.
  void all_to_all_v(void const* in, std::int64_t const* in_counts, std::int64_t const* in_offsets, void* out,
                    std::int64_t const* out_counts, std::int64_t const* out_offsets, HostStream) {
    begin("all_to_all_v");
    post_all_to_all_v(in, in_counts, in_offsets, out, out_counts, out_offsets);
    wait();
  }

  /// all_to_all_v() that does not wait: other collectives, and one more transfer each, may come before its finish(). Until then `in` must
  /// not change, and `out` is not to be read. The counts are read at once. E_STATE for a transfer that is under way.
  void start_all_to_all_v(Transfer& transfer, void const* in, std::int64_t const* in_counts, std::int64_t const* in_offsets, void* out,
                          std::int64_t const* out_counts, std::int64_t const* out_offsets) {
    if (transfer.under_way_) throw Error(ErrorCode::state, "mpi: the last transfer was not finished");
    begin("all_to_all_v");
    post_all_to_all_v(in, in_counts, in_offsets, out, out_counts, out_offsets);
    transfer.round_ = round_;
    transfer.under_way_ = true;
    requests_.swap(transfer.requests_);
    peers_.swap(transfer.peers_);
  }
  /// Waits for a transfer, within the deadline. E_STATE if none is under way.
  void finish(Transfer& transfer) {
    if (!transfer.under_way_) throw Error(ErrorCode::state, "mpi: no transfer is under way");
    expect_sound("all_to_all_v");
    collective_ = "all_to_all_v";
    receives_ = 0;  // its waits are not counted
    requests_.swap(transfer.requests_);
    peers_.swap(transfer.peers_);
    transfer.under_way_ = false;
    wait(transfer.round_);
  }
  /// Copies `n` bytes of `data` on rank `root` to `data` on every rank.
  void broadcast(void* data, std::int64_t n, int root, HostStream) {
    begin("broadcast");
    if (rank_ != root) {
      receive(root, data, n);
    } else {
      for (int i = 1; i < size_; ++i) {
        send((rank_ + i) % size_, data, n);
      }
    }
    wait();
  }
  /// Barrier: no rank returns before every rank has called it.
  void barrier(HostStream) {
    begin("barrier");
    for (int r = 0; r < size_; ++r) {
      counts_[index(r)] = 1;
      offsets_[index(r)] = r;
    }
    gather(&tokens_[index(rank_)], 1, tokens_.data(), counts_.data(), offsets_.data());
  }
  /// out[0, n) = Σ over ranks of in[0, n), float32, added in rank order: the same bits on every rank. `in` may be `out`.
  void all_reduce(float const* in, std::int64_t n, float* out, HostStream) {
    begin("all_reduce");
    std::int64_t const share = (n + size_ - 1) / size_;
    for (int r = 0; r < size_; ++r) {
      offsets_[index(r)] = std::min(n, share * r);
      counts_[index(r)] = std::min(n, share * (r + 1)) - offsets_[index(r)];
    }
    float* mine = out + offsets_[index(rank_)];
    reduce(in, counts_.data(), offsets_.data(), mine);
    for (int r = 0; r < size_; ++r) {
      offsets_[index(r)] *= kFloat;
      counts_[index(r)] *= kFloat;
    }
    begin("all_reduce");
    gather(mine, counts_[index(rank_)], out, counts_.data(), offsets_.data());
  }
  /// out[0, counts[rank]) = Σ over ranks of in[offsets[rank], …), float32, added in rank order. Counts and offsets are floats.
  void reduce_scatter_v(float const* in, std::int64_t const* counts, std::int64_t const* offsets, float* out, HostStream) {
    begin("reduce_scatter_v");
    reduce(in, counts, offsets, out);
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr int kBlock = 1 << 16;  // bytes per block of a large message
  static constexpr std::int64_t kFloat = sizeof(float);
  static constexpr int kSpins = 2000;  // polls that only yield the core; after them the wait sleeps between polls
  static constexpr unsigned kSleepMicroseconds = 50;
  static constexpr int kLatePolls = 8;           // after the deadline: a rank that did not run until then finds what has arrived
  static constexpr std::uint64_t kTags = 32768;  // MPI guarantees tags below this

  static std::size_t index(int r) { return static_cast<std::size_t>(r); }
  static void const* at(void const* p, std::int64_t offset) { return static_cast<std::byte const*>(p) + offset; }
  static void* at(void* p, std::int64_t offset) { return static_cast<std::byte*>(p) + offset; }
  static void copy(void const* in, void* out, std::int64_t n) {
    if (n > 0 && in != out) std::memmove(out, in, static_cast<std::size_t>(n));
  }

  void gather(void const* in, std::int64_t n, void* out, std::int64_t const* counts, std::int64_t const* offsets) {
    for (int i = 1; i < size_; ++i) {
      int const from = (rank_ + size_ - i) % size_;
      receive(from, at(out, offsets[from]), counts[from]);
    }
    for (int i = 1; i < size_; ++i) {
      send((rank_ + i) % size_, in, n);
    }
    copy(in, at(out, offsets[rank_]), n);
    wait();
  }

  void reduce(float const* in, std::int64_t const* counts, std::int64_t const* offsets, float* out) {
    std::int64_t const n = counts[rank_];
    reserve_reduction(n);
    auto part = [&](int r) { return work_.data() + n * (r < rank_ ? r : r - 1); };
    for (int i = 1; i < size_; ++i) {
      int const from = (rank_ + size_ - i) % size_;
      receive(from, part(from), n * kFloat);
    }
    for (int i = 1; i < size_; ++i) {
      int const to = (rank_ + i) % size_;
      send(to, in + offsets[to], counts[to] * kFloat);
    }
    wait();
    float const* own = in + offsets[rank_];
    std::array<float, 512> sum;
    for (std::int64_t begin = 0; begin < n; begin += static_cast<std::int64_t>(sum.size())) {
      std::int64_t const width = std::min(n - begin, static_cast<std::int64_t>(sum.size()));
      sum.fill(0.0F);
      for (int r = 0; r < size_; ++r) {
        float const* term = (r == rank_ ? own : part(r)) + begin;
        for (std::int64_t i = 0; i < width; ++i) {
          sum[static_cast<std::size_t>(i)] += term[i];
        }
      }
      std::copy_n(sum.data(), width, out + begin);
    }
  }

  void post_all_to_all_v(void const* in, std::int64_t const* in_counts, std::int64_t const* in_offsets, void* out,
                         std::int64_t const* out_counts, std::int64_t const* out_offsets) {
    for (int i = 1; i < size_; ++i) {
      int const from = (rank_ + size_ - i) % size_;
      receive(from, at(out, out_offsets[from]), out_counts[from]);
    }
    for (int i = 1; i < size_; ++i) {
      int const to = (rank_ + i) % size_;
      send(to, at(in, in_offsets[to]), in_counts[to]);
    }
    copy(at(in, in_offsets[rank_]), at(out, out_offsets[rank_]), in_counts[rank_]);
  }

  void expect_sound(char const* collective) const {
    if (failed_) throw Error(ErrorCode::state, text("mpi: ", collective, " after a failure; the group must be rebuilt"));
  }
  void begin(char const* collective) {
    expect_sound(collective);
    collective_ = collective;
    waited_ = ++round_;
    requests_.clear();
    peers_.clear();
    receives_ = 0;
  }
  void add(MPI_Request request, int peer) {
    requests_.push_back(request);
    peers_.push_back(peer);
  }

  // Calls post(pointer, count, type) for each message that `n` bytes need: none, one, or whole blocks and the remainder.
  template <class Byte, class Post>
  void split(Byte* data, std::int64_t n, Post&& post) {
    std::int64_t blocks = 0;
    if (n > params_.large_message_bytes) blocks = n / kBlock;
    if (blocks > 0) post(data, static_cast<int>(blocks), block_);
    if (std::int64_t const done = blocks * kBlock; done < n) post(data + done, static_cast<int>(n - done), MPI_BYTE);
  }
  void send(int peer, void const* data, std::int64_t n) {
    split(static_cast<std::byte const*>(data), n, [&](std::byte const* p, int count, MPI_Datatype type) {
      MPI_Request request = MPI_REQUEST_NULL;
      check(MPI_Isend(p, count, type, peer, tag(), comm_, &request), peer);
      add(request, peer);
    });
  }
  void receive(int peer, void* data, std::int64_t n) {
    split(static_cast<std::byte*>(data), n, [&](std::byte* p, int count, MPI_Datatype type) {
      MPI_Request request = MPI_REQUEST_NULL;
      check(MPI_Irecv(p, count, type, peer, tag(), comm_, &request), peer);
      add(request, peer);
    });
    receives_ = requests_.size();
  }
  int tag() const { return static_cast<int>(round_ % kTags); }

  void wait() { wait(round_); }
  /// round: of the collective that is waited for, which errors name.
  void wait(std::uint64_t round) {
    waited_ = round;
    auto const start = Clock::now();
    waits_.begin();
    for (std::int64_t polls = 0, late_polls = 0;; ++polls) {
      bool const late = polls > 0 && params_.timeout_ms > 0 && Clock::now() - start > std::chrono::milliseconds(params_.timeout_ms);
      int done = 0;
      int const code = MPI_Testall(static_cast<int>(requests_.size()), requests_.data(), &done, statuses_.data());
      if (code != MPI_SUCCESS) fail_in_status(code);
      if (params_.statistics) waits_.note(requests_, peers_, receives_, done != 0);
      if (done != 0) return;
      if (late && ++late_polls == kLatePolls) time_out();
      if (polls < kSpins) {
        sched_yield();  // ranks may share a core; the peer needs it to make progress
      } else {
        usleep(kSleepMicroseconds);
      }
    }
  }

  /// Names the rank whose process has ended, if there is one: another that is missing may itself wait for it.
  [[noreturn]] void time_out() {
    int missing = -1;
    for (std::size_t i = 0; i < requests_.size() && missing < 0; ++i) {  // receives are first, so this finds the peer that sent nothing
      int done = 0;
      MPI_Request_get_status(requests_[i], &done, MPI_STATUS_IGNORE);
      missing = done != 0 ? -1 : peers_[i];
    }
    int const ended = detail::first_ended(processes_, rank_);
    fail(ErrorCode::timeout, ended >= 0 ? ended : missing,
         text(collective_, ": the peer did not arrive within ", params_.timeout_ms, " ms", ended >= 0 ? "; its process has ended" : ""));
  }
  void check(int code, int peer = -1) {
    if (code != MPI_SUCCESS) {
      std::array<char, MPI_MAX_ERROR_STRING> message{};
      int length = 0;
      MPI_Error_string(code, message.data(), &length);
      int kind = 0;
      MPI_Error_class(code, &kind);
      fail(kind == MPI_ERR_TRUNCATE ? ErrorCode::mismatch : ErrorCode::internal, peer, text(collective_, ": ", message.data()));
    }
  }
  [[noreturn]] void fail_in_status(int code) {
    int kind = 0;
    MPI_Error_class(code, &kind);
    for (std::size_t i = 0; kind == MPI_ERR_IN_STATUS && i < requests_.size(); ++i) {
      int const error = statuses_[i].MPI_ERROR;
      if (error != MPI_SUCCESS && error != MPI_ERR_PENDING) check(error, peers_[i]);
    }
    check(code);
    fail(ErrorCode::internal, -1, text(collective_, ": MPI_Testall failed without a reason"));
  }
  [[noreturn]] void fail(ErrorCode code, int peer, std::string const& message) {
    failed_ = true;
    if (!peers_.empty() && peers_.front() >= 0) detail::cancel(requests_);
    requests_.clear();
    throw TransportError(code, rank_, peer, phase_ == nullptr ? collective_ : phase_, waited_, message);
  }

  Params params_;
  MPI_Comm comm_ = MPI_COMM_NULL;
  MPI_Datatype block_ = MPI_DATATYPE_NULL;
  int rank_ = 0;
  int size_ = 1;
  bool failed_ = false;
  char const* phase_ = nullptr;
  char const* collective_ = "";
  std::uint64_t round_ = 0;   // collectives so far
  std::uint64_t waited_ = 0;  // the one in progress
  std::vector<MPI_Request> requests_;
  std::vector<int> peers_;  // peer of each request
  std::vector<MPI_Status> statuses_;
  std::size_t receives_ = 0;  // the first of the requests
  detail::WaitTimes waits_;
  std::vector<std::int64_t> counts_;            // [size], of the collective in progress
  std::vector<std::int64_t> offsets_;           // [size]
  Buffer<float> work_;                          // [size - 1, share of a sum]
  std::vector<std::byte> tokens_;               // [size], what a barrier sends
  std::vector<detail::ProcessMark> processes_;  // [size]; none before they have met
};

}  // namespace moe::comm
