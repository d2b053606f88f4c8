// SPDX-License-Identifier: Apache-2.0
// eplb/group.hpp: the small values that ranks exchange to agree on balancing: load sums, steps, hashes, and whether all succeeded.
#pragma once

#include <algorithm>
#include <chrono>
#include <concepts>
#include <cstdint>
#include <cstring>
#include <exception>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "moe/comm/deadline.hpp"
#include "moe/core/buffer.hpp"
#include "moe/core/contract/communicator.hpp"
#include "moe/core/contract/concepts.hpp"
#include "moe/core/error.hpp"

namespace moe::eplb {

/// The collectives that balancing needs over the EPLB group; a missing rank must cause E_TIMEOUT, not a hang.
template <class G>
concept HasRankSize = requires(G& group) {
  { group.size() } -> std::convertible_to<int>;
};
template <class G>
concept HasAllReduceSum = requires(G& group, std::span<std::int64_t> values) { group.all_reduce_sum(values); };
template <class G>
concept HasAllGatherWord = requires(G& group, std::uint64_t word) {
  { group.all_gather(word) } -> std::convertible_to<std::vector<std::uint64_t>>;
};
template <class G>
concept BalancingGroup = HasRankSize<G> && HasAllReduceSum<G> && HasAllGatherWord<G>;

/// The group of one rank.
struct SelfGroup {
  static constexpr int size() { return 1; }
  static void all_reduce_sum(std::span<std::int64_t>) {}
  static std::vector<std::uint64_t> all_gather(std::uint64_t word) { return {word}; }
};

namespace detail {

/// Waits on the host until the fence is done. E_TIMEOUT after timeout_ms (0: waits for ever), naming `what`.
template <class Space>
void wait_for(Fence<Space> const& fence, std::int64_t timeout_ms, std::string_view what) {
  auto const start = std::chrono::steady_clock::now();
  while (!fence.done()) {
    if (timeout_ms > 0 && std::chrono::steady_clock::now() - start > std::chrono::milliseconds(timeout_ms)) {
      throw Error(ErrorCode::timeout, text(what, ": not done within ", timeout_ms, " ms"));
    }
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}
/// The same for work of a communicator. If its kernels have no deadline of their own (comm::Nccl), an error ends the communicator:
/// otherwise no later wait for the device and no freeing of memory would return. The group must then be rebuilt. E_STATE if another thread
/// has ended the communicator: the fence has then passed, but the work before it is not complete. E_TIMEOUT names a rank whose process is
/// known to have ended (facts::ended_rank()).
template <class Comm, class Space>
void wait_for(Comm& comm, Fence<Space> const& fence, std::int64_t timeout_ms, std::string_view what) {
  try {
    wait_for(fence, timeout_ms, what);
    if (facts::failed(comm)) throw Error(ErrorCode::state, text(what, ": the communicator has been ended"));
  } catch (Error const& e) {
    int const ended = e.code() == ErrorCode::timeout ? facts::ended_rank(comm) : -1;
    facts::begin_abort(comm);
    if (ended < 0) throw;
    throw TransportError(e.code(), comm.rank(), ended, std::string(what), 0,
                         text(e.message(), "; the process of rank ", ended, " has ended"));
  }
}

}  // namespace detail

/// All ranks of a Communicator, which is borrowed and must not be in use by another thread. Values are host memory for any space of the
/// communicator. Throws what the communicator throws; in the device space E_TIMEOUT after timeout_ms.
template <class Comm>
class CommGroup {
  static_assert(sizeof(Met<NeedsCommunicator<Comm>>) == 1);

 public:
  using Space = typename moe::detail::SpaceOf<Comm>::type;

  explicit CommGroup(Comm& comm, Stream<Space> stream = {}, std::int64_t timeout_ms = comm::kDefaultTimeoutMs)
      : comm_(comm), stream_(stream), timeout_ms_(timeout_ms) {
    reserve(kWord, kWord * size());
  }

  int size() const { return comm_.size(); }
  /// The stream of the calls from now on.
  void set_stream(Stream<Space> stream) { stream_ = stream; }

  /// values[i] = Σ over ranks, exact. Every rank gives as many values.
  void all_reduce_sum(std::span<std::int64_t> values) {
    auto const n = static_cast<std::int64_t>(values.size());
    if (n == 0) return;
    std::int64_t const ranks = size();
    std::int64_t const share = (n + ranks - 1) / ranks;
    std::vector<std::int64_t> counts(static_cast<std::size_t>(ranks)), offsets(counts.size());
    for (std::int64_t r = 0; r < ranks; ++r) {
      auto const i = static_cast<std::size_t>(r);
      offsets[i] = std::min(n, share * r) * kWord;
      counts[i] = std::min(n, share * (r + 1)) * kWord - offsets[i];
    }
    // Each rank sums its share of all ranks' values, then all ranks gather the shares.
    auto const me = static_cast<std::size_t>(comm_.rank());
    std::int64_t const mine = counts[me];
    std::vector<std::int64_t> from_counts(counts.size(), mine), from_offsets(counts.size());
    for (std::size_t r = 0; r < counts.size(); ++r) from_offsets[r] = static_cast<std::int64_t>(r) * mine;
    std::vector<std::int64_t> parts(static_cast<std::size_t>(mine / kWord * ranks));
    reserve(n * kWord, std::max(n * kWord, mine * ranks));
    send(values.data(), n);
    comm_.all_to_all_v(in_.data(), counts.data(), offsets.data(), out_.data(), from_counts.data(), from_offsets.data(), stream_);
    receive(parts.data(), mine / kWord * ranks);
    std::vector<std::int64_t> sum(static_cast<std::size_t>(mine / kWord), 0);
    for (std::size_t i = 0; i < parts.size(); ++i) sum[i % sum.size()] += parts[i];
    send(sum.data(), mine / kWord);
    comm_.all_gather_v(in_.data(), mine, out_.data(), counts.data(), offsets.data(), stream_);
    receive(values.data(), n);
  }

  /// [R]: the word of every rank.
  std::vector<std::uint64_t> all_gather(std::uint64_t word) {
    std::vector<std::uint64_t> words(static_cast<std::size_t>(size()));
    send(&word, 1);
    comm_.all_gather(in_.data(), kWord, out_.data(), stream_);
    receive(words.data(), size());
    return words;
  }

 private:
  static constexpr std::int64_t kWord = sizeof(std::int64_t);

  /// Memory that grows, so that only a larger all_reduce_sum() allocates: an allocation may wait for the whole device.
  void reserve(std::int64_t in_bytes, std::int64_t out_bytes) {
    if (in_.size() < in_bytes) in_ = Buffer<std::byte, Space>(in_bytes);
    if (out_.size() < out_bytes) out_ = Buffer<std::byte, Space>(out_bytes);
    auto const words = static_cast<std::size_t>(std::max(in_.size(), out_.size()) / kWord);
    if (!staged_ || staged_->size() < words) staged_.emplace(words);
  }
  // In stream order: a copy on the legacy default stream would wait for the streams of the caller's other work.
  void send(void const* values, std::int64_t words) {
    auto const bytes = static_cast<std::size_t>(words * kWord);
    if (bytes == 0) return;
    std::memcpy(staged_->data(), values, bytes);
    Memory<Space>::copy_from_host_async(in_.data(), staged_->data(), bytes, stream_);
  }
  void receive(void* values, std::int64_t words) {
    auto const bytes = static_cast<std::size_t>(words * kWord);
    if (bytes > 0) Memory<Space>::copy_to_host_async(staged_->data(), out_.data(), bytes, stream_);
    fence_.record(stream_);
    detail::wait_for(comm_, fence_, timeout_ms_, "agreement of the EPLB group");
    if (bytes > 0) std::memcpy(values, staged_->data(), bytes);
  }

  Comm& comm_;
  Stream<Space> stream_;
  std::int64_t timeout_ms_;
  Buffer<std::byte, Space> in_, out_;
  std::optional<HostArray<std::int64_t, Space>> staged_;
  Fence<Space> fence_;
};

/// Collective: every rank reports whether its part of `what` succeeded (`mine` null) or its error. If one failed, all throw: a rank that
/// failed its own error, the others E_PEER naming the first rank that failed and its code. A rank that does not answer is named by the
/// group's error. That error takes precedence, because the missing rank also causes failed waits of others.
template <BalancingGroup Group>
void succeed_together(Group& group, std::exception_ptr const& mine, std::string_view what) {
  std::uint64_t word = 0;
  std::string own;
  if (mine) {
    try {
      std::rethrow_exception(mine);
    } catch (Error const& e) {
      word = 1 + static_cast<std::uint64_t>(e.code());
      own = e.message();
    } catch (std::exception const& e) {
      word = 1 + static_cast<std::uint64_t>(ErrorCode::internal);
      own = e.what();
    }
  }
  std::vector<std::uint64_t> words;
  try {
    words = group.all_gather(word);
  } catch (TransportError const& e) {
    if (!mine) throw;
    throw TransportError(e.code(), e.rank(), e.peer(), e.phase(), e.round(),
                         text(what, ": rank ", e.peer(), " did not answer; here: ", own));
  }
  if (mine) std::rethrow_exception(mine);
  auto const failed = std::find_if(words.begin(), words.end(), [](std::uint64_t w) { return w != 0; });
  if (failed != words.end()) {
    throw Error(ErrorCode::peer,
                text(what, " failed on rank ", failed - words.begin(), " with ", name(static_cast<ErrorCode>(*failed - 1))));
  }
}

}  // namespace moe::eplb
