// SPDX-License-Identifier: Apache-2.0
// comm/nccl.hpp: NCCL as a Communicator of the device: collectives on streams, waits with deadlines. Bootstrap by unique id: given, over
// MPI or any other broadcast, or over a file.
#pragma once

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "moe/comm/deadline.hpp"
#include "moe/comm/nccl_connect.hpp"
#include "moe/core/cuda_space.hpp"

namespace moe::comm {

/// One rank of an NCCL communicator on the device that is current when it is constructed. Movable, not copyable.
/// Threads: only one may call at a time, except that any thread may call begin_abort(), failed(), rank() and size(). A call that is inside
/// then ends at its next look at the clock, with E_STATE or the error that it met, and NCCL's communicators are freed after it, or after a
/// second if it has not returned (abortable.hpp). Move or destroy it only when no other thread uses it.
/// Collectives are enqueued on the stream; counts and offsets are in bytes (reductions: elements) and in host memory.
///
/// No call waits for a peer longer than the deadline: the communicator is non-blocking (NCCL connects and launches in its own thread while
/// the calling thread checks the clock), and wait() and synchronize() do the same for work on a stream. When the deadline passes, or NCCL
/// reports an error, the communicator is aborted, which ends its kernels; the call throws TransportError (E_TIMEOUT, E_PEER) or E_CUDA,
/// every later call is E_STATE, and the group must be rebuilt. CUDA stays usable.
/// Sends and receives (Group, all_to_all_v) use another, blocking one. connect() splits it off and connects it to all peers within
/// the deadline; after that they cannot block, and none waits for NCCL's thread (8 us a group, not 46: docs/log/exchange.md, "Over NCCL").
/// Destroy captured graphs that hold collectives first: NCCL keeps their communicator alive until the last graph is destroyed.
class Nccl {
  static constexpr std::size_t kComm = detail::NcclState::kComm, kDirect = detail::NcclState::kDirect;
  using AnyCall = detail::NcclState::Comms::Call;
  /// One call inside NCCL. E_STATE if the communicator has ended.
  struct Call : AnyCall {
    explicit Call(Nccl const& owner) : AnyCall(owner.state().comms) {
      if (!live()) owner.refuse();
    }
  };

 public:
  using Space = space::cuda;
  using StreamType = Stream<Space>;
  static constexpr char const* kName = "nccl";
  struct Params {
    std::int64_t timeout_ms = kDefaultTimeoutMs;  ///< of every wait for other ranks, those of its windows too; 0 waits for ever
  };

  /// Collective over `size` ranks that hold the same id. E_UNSUPPORTED if the loaded NCCL is not the one compiled against.
  Nccl(int rank, int size, ncclUniqueId const& id, Params const& params) : params_(params), rank_(rank), size_(size) {
    detail::check_nccl_version();
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    ncclResult_t const begun = ncclCommInitRankConfig(&state_->made, size, id, rank, &config);
    state_->comms.add(kComm, state_->made);
    check(begun, "ncclCommInitRankConfig");
  }
  Nccl(int rank, int size, ncclUniqueId const& id) : Nccl(rank, size, id, Params{}) {}
  /// Takes ownership of a communicator. A blocking one may wait for a peer without a deadline while NCCL connects.
  explicit Nccl(ncclComm_t comm, Params const& params) : params_(params) {
    state_->comms.add(kComm, comm);
    detail::check_nccl_version();
    check(ncclCommUserRank(comm, &rank_), "ncclCommUserRank");
    check(ncclCommCount(comm, &size_), "ncclCommCount");
  }
  explicit Nccl(ncclComm_t comm) : Nccl(comm, Params{}) {}
  Nccl(Nccl&& other) noexcept : state_(nullptr) { *this = std::move(other); }
  Nccl& operator=(Nccl&& other) noexcept {
    std::swap(params_, other.params_);
    std::swap(state_, other.state_);
    std::swap(peers_, other.peers_);
    std::swap(rank_, other.rank_);
    std::swap(size_, other.size_);
    std::swap(phase_, other.phase_);
    std::swap(calls_, other.calls_);
    std::swap(scratch_, other.scratch_);
    return *this;
  }
  ~Nccl() { abort(); }  ///< never waits for a peer, dead or alive

  /// A new id; one rank makes it and hands it to the others.
  static ncclUniqueId unique_id() { return detail::unique_id(); }
  /// Collective bootstrap over a file that all ranks see, for jobs without MPI: rank 0 writes the id, the others wait for it. `path` must
  /// not exist yet: E_CONFIG on rank 0 if it does. The caller removes it. E_TIMEOUT if it or a rank does not appear in time.
  static Nccl over_file(std::string const& path, int rank, int size, Params const& params) {
    return Nccl(rank, size, detail::id_over_file(path, rank, params.timeout_ms), params);
  }
  static Nccl over_file(std::string const& path, int rank, int size) { return over_file(path, rank, size, Params{}); }
  /// Collective bootstrap over anything that broadcasts bytes from rank 0 in host memory: `broadcast(void* data, std::size_t bytes)`.
  /// E_PEER if rank 0 has no NCCL to make an id with.
  template <class Broadcast>
  static Nccl over(int rank, int size, Broadcast&& broadcast, Params const& params) {
    return Nccl(rank, size, detail::id_over(rank, broadcast), params);
  }
  template <class Broadcast>
  static Nccl over(int rank, int size, Broadcast&& broadcast) {
    return over(rank, size, broadcast, Params{});
  }
  /// The same over a communicator of the host space, for example comm::Mpi: its ranks become those of NCCL.
  template <class HostCommunicator>
  static Nccl over_communicator(HostCommunicator& host, Params const& params) {
    auto const broadcast = [&](void* data, std::size_t bytes) { host.broadcast(data, static_cast<std::int64_t>(bytes), 0, {}); };
    return over(host.rank(), host.size(), broadcast, params);
  }

  int rank() const { return rank_; }
  int size() const { return size_; }
  /// Collective: connects the communicator for sends and receives, once. The first of them also does it, unless a stream is being captured.
  void connect() {
    Call const call(*this);
    if (call[kDirect] != nullptr || size_ == 1) return;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 1;
    check(ncclCommSplit(call[kComm], 0, rank_, &state_->made_direct, &config), "ncclCommSplit");

    // NCCL connects to all peers. Until then the meeting's thread alone has the new communicator; if it is abandoned, it keeps it.
    auto const meeting = detail::meet_peers(state_->made_direct, rank_, size_);
    detail::Backoff backoff(params_.timeout_ms);
    while (meeting->result < 0) {
      if (failed()) refuse();
      if (backoff.expired()) {
        begin_abort();
        fail(ErrorCode::timeout, -1, text("connect: another rank did not arrive within ", params_.timeout_ms, " ms"));
      }
      backoff.pause();
    }
    state_->comms.add(kDirect, state_->made_direct);
    finish(static_cast<ncclResult_t>(meeting->result.load()), "connect");
    synchronize(meeting->stream);
    meet();
  }
  /// Collective: the ranks learn each other's machine and process, once; a part of connect().
  void meet() {
    if (size_ == 1 || !peers_.processes.empty()) return;
    peers_ = detail::Peers::meet(size_, [this](void const* in, std::int64_t n, void* out) { all_gather_host(in, n, out); });
  }
  /// Null after a failure. For calls of the caller's own while no other thread may call begin_abort(); check() takes their results.
  ncclComm_t handle() const { return state_ ? AnyCall(state_->comms)[kComm] : nullptr; }
  /// From any thread: whether a deadline, an error or begin_abort() has ended the communicator.
  bool failed() const { return !state_ || state_->comms.failed(); }
  /// The first rank whose process is known to have ended, or -1. Ranks that have met see those of their machine.
  int ended_rank() const { return peers_.ended(rank_, false); }
  std::int64_t timeout_ms() const { return params_.timeout_ms; }
  void set_timeout_ms(std::int64_t timeout_ms) { params_.timeout_ms = timeout_ms; }
  void set_phase(char const* phase) { phase_ = phase; }  ///< for error messages; the string must outlive the object

  /// Gathers `n` bytes of every rank, in rank order, into out.
  void all_gather(void const* in, std::int64_t n, void* out, StreamType stream) {
    Call const call(*this);
    check(ncclAllGather(in, out, bytes(n), ncclInt8, call[kComm], stream), "ncclAllGather");
  }
  /// Gathers counts[r] bytes of rank r into out + offsets[r]; `n` is this rank's count. `in` may be this rank's part of `out`.
  void all_gather_v(void const* in, std::int64_t n, void* out, std::int64_t const* counts, std::int64_t const* offsets, StreamType stream) {
    if (peers_.one_node && Call(*this)[kDirect] != nullptr) {  // connected, each pair by its own link: send directly, not in a ring
      void* const own = static_cast<std::byte*>(out) + offsets[rank_];
      if (own != in && n > 0) Memory<Space>::copy_async(own, in, bytes(n), stream);
      Group group(*this);
      for (int i = 1; i < size_; ++i) {
        int const from = (rank_ + size_ - i) % size_;
        group.send(in, n, (rank_ + i) % size_, stream);
        group.receive(static_cast<std::byte*>(out) + offsets[from], counts[from], from, stream);
      }
      group.end();
      return;
    }
    Call const call(*this);
    grouped([&](auto const& add) {
      for (int r = 0; r < size_; ++r) {
        if (counts[r] > 0) {
          void* const to = static_cast<std::byte*>(out) + offsets[r];
          add(ncclBroadcast(r == rank_ ? in : to, to, bytes(r == rank_ ? n : counts[r]), ncclInt8, r, call[kComm], stream));
        }
      }
    });
  }
  /// in_counts[r] bytes at in + in_offsets[r] go to rank r; out_counts[r] bytes from it arrive at out + out_offsets[r].
  void all_to_all_v(void const* in, std::int64_t const* in_counts, std::int64_t const* in_offsets, void* out,
                    std::int64_t const* out_counts, std::int64_t const* out_offsets, StreamType stream) {
    Group group(*this);
    for (int i = 0; i < size_; ++i) {
      int const to = (rank_ + i) % size_;
      int const from = (rank_ + size_ - i) % size_;
      group.send(static_cast<std::byte const*>(in) + in_offsets[to], in_counts[to], to, stream);
      group.receive(static_cast<std::byte*>(out) + out_offsets[from], out_counts[from], from, stream);
    }
    group.end();
  }
  void broadcast(void* data, std::int64_t n, int root, StreamType stream) {
    Call const call(*this);
    check(ncclBroadcast(data, data, bytes(n), ncclInt8, root, call[kComm], stream), "ncclBroadcast");
  }
  /// Stream barrier: no rank's stream continues before every rank's stream reaches this point.
  void barrier(StreamType stream) {
    auto* const word = static_cast<float*>(scratch());
    Call const call(*this);
    check(ncclAllReduce(word, word, 1, ncclFloat, ncclSum, call[kComm], stream), "ncclAllReduce");
  }
  /// out[0, n) = the sum over ranks of in[0, n), in NCCL's order: the same bits on every rank. `in` may be `out`.
  template <class T>
  void all_reduce(T const* in, std::int64_t n, T* out, StreamType stream) {
    Call const call(*this);
    check(ncclAllReduce(in, out, bytes(n), detail::nccl_type<T>(), ncclSum, call[kComm], stream), "ncclAllReduce");
  }
  /// Rank r gets elements [offsets[r], offsets[r] + counts[r]) of the sum.
  void reduce_scatter_v(float const* in, std::int64_t const* counts, std::int64_t const* offsets, float* out, StreamType stream) {
    Call const call(*this);
    grouped([&](auto const& add) {
      for (int r = 0; r < size_; ++r) {
        if (counts[r] > 0) {
          add(ncclReduce(in + offsets[r], r == rank_ ? out : nullptr, bytes(counts[r]), ncclFloat, ncclSum, r, call[kComm], stream));
        }
      }
    });
  }

  /// Sends and receives that NCCL runs as one operation: post them, then end(). The group also ends when a call inside it throws.
  class Group {
   public:
    explicit Group(Nccl& owner) : owner_(owner) {
      owner.connect();
      comm_ = call_.emplace(owner)[owner.size_ == 1 ? kComm : kDirect];
      detail::check_nccl(ncclGroupStart(), "ncclGroupStart", comm_);
    }
    Group(Group const&) = delete;
    Group& operator=(Group const&) = delete;
    ~Group() {
      if (open_) ncclGroupEnd();
    }
    /// `n` bytes to or from a rank; no operation if n is 0.
    void send(void const* data, std::int64_t n, int to, StreamType stream) {
      if (n > 0) add(ncclSend(data, bytes(n), ncclInt8, to, comm_, stream), "ncclSend");
    }
    void receive(void* data, std::int64_t n, int from, StreamType stream) {
      if (n > 0) add(ncclRecv(data, bytes(n), ncclInt8, from, comm_, stream), "ncclRecv");
    }
    /// The result of a call made while the group was open.
    void add(ncclResult_t result, char const* call) {
      if (result != ncclInProgress) detail::check_nccl(result, call, comm_);
    }
    ncclComm_t handle() const { return comm_; }
    void end() {
      open_ = false;
      owner_.finish(ncclGroupEnd(), "ncclGroupEnd");
      call_.reset();
    }

   private:
    Nccl& owner_;
    std::optional<Call> call_;
    ncclComm_t comm_ = nullptr;
    bool open_ = true;
  };

  /// The result of a call that the caller made on handle(): waits until NCCL has finished it. Throws as described above.
  void check(ncclResult_t result, char const* call) {
    if (result == ncclSuccess || result == ncclInProgress) {  // some calls return "success" although they have only started
      result = settled(call);
    }
    finish(result, call);
  }

  /// Returns when the stream has passed `event`; E_STATE if the communicator has ended or another thread ends it. After the deadline it
  /// aborts the communicator and throws E_TIMEOUT, naming ended_rank(), else the rank that `missing()` returns (-1: unknown); `missing()`
  /// may throw a better error. NCCL's kernels still run while it is called.
  template <class Missing>
  void wait(cudaEvent_t event, char const* what, Missing&& missing) {
    detail::Backoff backoff(params_.timeout_ms);
    for (;;) {
      cudaError_t const status = cudaEventQuery(event);
      if (failed()) refuse();  // an event that an abort has let pass means nothing
      if (status != cudaErrorNotReady) {
        check_cuda(status, what);
        return;
      }
      cudaGetLastError();  // "not ready" must not look like a failed launch later
      if (ncclResult_t const error = async_error(); error != ncclSuccess) finish(error, what);
      if (backoff.expired()) {
        AbortAtExit const ends{*this};
        int const ended = ended_rank();  // another that is missing may itself wait for it
        fail(ErrorCode::timeout, ended >= 0 ? ended : missing(),
             text(what, ": not done within ", params_.timeout_ms, " ms", ended >= 0 ? "; its process has ended" : ""));
      }
      backoff.pause();
    }
  }
  void wait(cudaEvent_t event, char const* what) {
    wait(event, what, [] { return -1; });
  }
  /// cudaStreamSynchronize with the deadline.
  void synchronize(StreamType stream) {
    CudaMark const end;
    end.record(stream);
    wait(end, "synchronize");
  }
  /// Gathers `n` bytes of host memory of every rank into host memory out[0, n · size). Blocks; for construction, not for rounds.
  void all_gather_host(void const* in, std::int64_t n, void* out) {
    detail::DeviceBytes const own(bytes(n));
    detail::DeviceBytes const all(bytes(n) * static_cast<std::size_t>(size_));
    CudaStream stream;
    Memory<Space>::copy_from_host(own.data, in, bytes(n));
    all_gather(own.data, n, all.data, stream);
    synchronize(stream);
    Memory<Space>::copy_to_host(out, all.data, bytes(n) * static_cast<std::size_t>(size_));
  }
  /// Ends all NCCL work of this rank, on the device too, and frees its resources; waits for no peer. Later calls are E_STATE.
  void abort() noexcept {
    if (state_) state_->comms.abort();
  }
  /// Begins abort() and returns, without a call of CUDA; from any thread, during another's call too. If several communicators wait for one
  /// rank, begin with all of them before any other call of CUDA: freeing memory of one waits for kernels of the others and may hold back
  /// the calls of other threads. Hence one thread per communicator; with several processes on a host, freeing takes seconds.
  void begin_abort() noexcept {
    if (state_) state_->comms.begin_abort();
  }
  /// Throws a TransportError of this rank.
  [[noreturn]] void fail(ErrorCode code, int peer, std::string const& message) const {
    throw TransportError(code, rank_, peer, phase_, calls_, message);
  }

 private:
  struct AbortAtExit {
    Nccl& owner;
    ~AbortAtExit() { owner.begin_abort(); }
  };
  static std::size_t bytes(std::int64_t n) { return static_cast<std::size_t>(n); }
  detail::NcclState& state() const {  // E_STATE once moved from
    if (!state_) refuse();
    return *state_;
  }
  [[noreturn]] void refuse() const { throw Error(ErrorCode::state, text("nccl: ", phase_, " after a failure; the group must be rebuilt")); }
  /// Unless the call has succeeded: ends the communicator and throws.
  void finish(ncclResult_t result, char const* call) {
    ++calls_;
    if (result == ncclSuccess) return;
    if (failed()) refuse();  // another thread has ended the communicator
    std::string const message = text(call, ": ", ncclGetErrorString(result), "; ", ncclGetLastError(nullptr));
    int const ended = detail::lost_connection(result) ? peers_.ended(rank_, true) : -1;
    begin_abort();
    if (result == ncclRemoteError || ended >= 0) fail(ErrorCode::peer, ended, message);
    throw Error(ErrorCode::cuda, message);
  }
  /// Collectives on kComm that NCCL runs as one operation.
  template <class Post>
  void grouped(Post&& post) {
    detail::check_nccl(ncclGroupStart(), "ncclGroupStart");
    ncclResult_t worst = ncclSuccess;
    post([&](ncclResult_t result) { worst = result == ncclSuccess || result == ncclInProgress ? worst : result; });
    ncclResult_t const ended = ncclGroupEnd();
    check(worst == ncclSuccess ? ended : worst, "a group of collectives");
  }
  /// The state of the communicator once it is no longer in progress.
  ncclResult_t settled(char const* call) {
    detail::Backoff backoff(params_.timeout_ms);
    for (;;) {
      Call const inside(*this);
      ncclResult_t state = ncclInProgress;
      detail::check_nccl(ncclCommGetAsyncError(inside[kComm], &state), "ncclCommGetAsyncError", inside[kComm]);
      if (state != ncclInProgress) return state;
      if (backoff.expired()) {
        begin_abort();
        fail(ErrorCode::timeout, ended_rank(), text(call, ": another rank did not arrive within ", params_.timeout_ms, " ms"));
      }
      backoff.pause();
    }
  }
  /// An error that NCCL's threads have met, or ncclSuccess.
  ncclResult_t async_error() const {
    AnyCall const call(state_->comms);
    for (std::size_t i : {kComm, kDirect}) {
      ncclResult_t state = ncclSuccess;
      if (call[i] == nullptr || ncclCommGetAsyncError(call[i], &state) != ncclSuccess) continue;
      if (state != ncclSuccess && state != ncclInProgress) return state;
    }
    return ncclSuccess;
  }
  /// A zeroed word of device memory.
  void* scratch() {
    if (!scratch_) {
      scratch_ = std::make_unique<detail::DeviceBytes>(sizeof(float));
      Memory<Space>::fill(scratch_->data, 0, sizeof(float));
    }
    return scratch_->data;
  }

  Params params_;
  std::unique_ptr<detail::NcclState> state_ = std::make_unique<detail::NcclState>();  // null once moved from
  detail::Peers peers_;
  int rank_ = 0;
  int size_ = 1;
  char const* phase_ = "construction";
  std::uint64_t calls_ = 0;
  std::unique_ptr<detail::DeviceBytes> scratch_;
};

}  // namespace moe::comm
