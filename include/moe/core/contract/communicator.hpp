// SPDX-License-Identifier: Apache-2.0
// core/contract/communicator.hpp: what a Communicator must have, and its optional members, each with its default.
#pragma once

#include <concepts>
#include <cstdint>
#include <tuple>

#include "moe/core/contract/policy.hpp"
#include "moe/core/rule.hpp"
#include "moe/core/space.hpp"

namespace moe {

template <class C>
concept CommunicatorHasRank = requires(C& c) {
  { c.rank() } -> std::convertible_to<int>;
};
MOE_MEMBER(CommunicatorHasRank, "the communicator", "int rank()", "this rank");
template <class C>
concept CommunicatorHasSize = requires(C& c) {
  { c.size() } -> std::convertible_to<int>;
};
MOE_MEMBER(CommunicatorHasSize, "the communicator", "int size()", "number of ranks");

// ---- Collective calls. `n`, counts and offsets are bytes, of sums floats; counts and offsets are arrays of size() in host memory.

template <class C>
concept CommunicatorGathers =
    requires(C& c, void const* in, std::int64_t n, void* out, Stream<typename C::Space> stream) { c.all_gather(in, n, out, stream); };
MOE_MEMBER(CommunicatorGathers, "the communicator", "all_gather(void const* in, int64_t n, void* out, Stream<Space>)",
           "n bytes of every rank, in rank order, to all ranks");

template <class C>
concept CommunicatorGathersCounts = requires(C& c, void const* in, std::int64_t n, void* out, std::int64_t const* counts,
                                             Stream<typename C::Space> stream) { c.all_gather_v(in, n, out, counts, counts, stream); };
MOE_MEMBER(CommunicatorGathersCounts, "the communicator",
           "all_gather_v(void const* in, int64_t n, void* out, int64_t const* counts, int64_t const* offsets, Stream<Space>)",
           "counts[r] bytes of rank r to offset offsets[r] of all ranks");

template <class C>
concept CommunicatorExchanges = requires(C& c, void const* in, void* out, std::int64_t const* counts, Stream<typename C::Space> stream) {
  c.all_to_all_v(in, counts, counts, out, counts, counts, stream);
};
MOE_MEMBER(CommunicatorExchanges, "the communicator",
           "all_to_all_v(void const* in, int64_t const* in_counts, int64_t const* in_offsets, void* out, int64_t const* out_counts, "
           "int64_t const* out_offsets, Stream<Space>)",
           "other bytes to every rank");

template <class C>
concept CommunicatorBroadcasts =
    requires(C& c, void* data, std::int64_t n, int root, Stream<typename C::Space> stream) { c.broadcast(data, n, root, stream); };
MOE_MEMBER(CommunicatorBroadcasts, "the communicator", "broadcast(void* data, int64_t n, int root, Stream<Space>)",
           "n bytes of rank root to all ranks");

template <class C>
concept CommunicatorWaits = requires(C& c, Stream<typename C::Space> stream) { c.barrier(stream); };
MOE_MEMBER(CommunicatorWaits, "the communicator", "barrier(Stream<Space>)", "no rank goes on before all have come");

template <class C>
concept CommunicatorSums =
    requires(C& c, float const* in, std::int64_t n, float* out, Stream<typename C::Space> stream) { c.all_reduce(in, n, out, stream); };
MOE_MEMBER(CommunicatorSums, "the communicator", "all_reduce(float const* in, int64_t n, float* out, Stream<Space>)",
           "the sum over the ranks of n floats, to all ranks");

/// Rank r gets the elements [offsets[r], offsets[r] + counts[r]) of the sum.
template <class C>
concept CommunicatorScattersSums = requires(C& c, float const* in, std::int64_t const* counts, float* out,
                                            Stream<typename C::Space> stream) { c.reduce_scatter_v(in, counts, counts, out, stream); };
MOE_MEMBER(CommunicatorScattersSums, "the communicator",
           "reduce_scatter_v(float const* in, int64_t const* counts, int64_t const* offsets, float* out, Stream<Space>)",
           "the sum over the ranks, each rank's part of it to that rank");

namespace detail {
template <class C>
using CommunicatorContract = std::tuple<
    Verdict<rules::PolicyHasName, Named<C>, C>, Verdict<rules::PolicyHasSpace, HasSpace<C>, C>,
    Verdict<rules::CommunicatorHasRank, CommunicatorHasRank<C>, C>, Verdict<rules::CommunicatorHasSize, CommunicatorHasSize<C>, C>,
    Verdict<rules::CommunicatorGathers, CommunicatorGathers<C>, C>,
    Verdict<rules::CommunicatorGathersCounts, CommunicatorGathersCounts<C>, C>,
    Verdict<rules::CommunicatorExchanges, CommunicatorExchanges<C>, C>,
    Verdict<rules::CommunicatorBroadcasts, CommunicatorBroadcasts<C>, C>, Verdict<rules::CommunicatorWaits, CommunicatorWaits<C>, C>,
    Verdict<rules::CommunicatorSums, CommunicatorSums<C>, C>, Verdict<rules::CommunicatorScattersSums, CommunicatorScattersSums<C>, C>>;
}  // namespace detail

/// The members of a Communicator, one rule each.
template <class C>
using NeedsCommunicator = detail::CommunicatorContract<C>;

/// Collectives between the ranks of a group, in one space.
template <class C>
concept Communicator = detail::kAllHold<detail::CommunicatorContract<C>>;

}  // namespace moe

namespace moe::facts {

/// Comm::set_phase(name): what the errors of its next calls name, "construction", "dispatch", … The text outlives the communicator.
/// Default: errors name none.
template <class Comm>
void set_phase([[maybe_unused]] Comm& comm, [[maybe_unused]] char const* phase) {
  if constexpr (requires { comm.set_phase(phase); }) comm.set_phase(phase);
}

/// Comm::all_gather_host(in, bytes, all): the collective all_gather of host memory, for a communicator of the device. Default: all_gather()
/// is called, if it takes host memory.
template <class Comm>
constexpr bool gathers_host_memory() {
  return requires(Comm& comm, void const* in, std::int64_t bytes, void* all) { comm.all_gather_host(in, bytes, all); };
}

/// Comm::all_gather(in, bytes, all, stream) for a stream of the host space: whether it gathers host memory. Default: it does not, as for a
/// communicator of the device and for ranks that one process simulates.
template <class Comm, class StreamT>
constexpr bool gathers_on_the_host() {
  return requires(Comm& comm, void const* in, std::int64_t bytes, void* all, StreamT stream) { comm.all_gather(in, bytes, all, stream); };
}

/// Comm::reserve_reduction(n): allocates for sums of n elements, so that later calls do not. Default: nothing.
template <class Comm>
void reserve_reduction([[maybe_unused]] Comm& comm, [[maybe_unused]] std::int64_t n) {
  if constexpr (requires { comm.reserve_reduction(n); }) comm.reserve_reduction(n);
}

/// Comm::Transfer, with start_all_to_all_v(transfer, …) and finish(transfer): an all_to_all_v() beside which other calls run; the arguments
/// are those of all_to_all_v() without the stream. Default: sending the rows of a host exchange waits for them.
template <class Comm>
constexpr bool starts_transfers() {
  return requires { typename Comm::Transfer; };
}

/// Comm::Group, of a communicator of the device: sends and receives that run as one operation, Group(comm), send(data, bytes, rank,
/// stream), receive(data, bytes, rank, stream), end(). With it come connect(), wait(event, what, missing) and all_gather_host(), as in
/// comm::Nccl. Default: the communicator has one rank.
template <class Comm>
constexpr bool has_groups() {
  return requires { typename Comm::Group; };
}

/// Comm::allows_threads(): whether threads may use communicators at the same time. Default: they may.
template <class Comm>
bool allows_threads() {
  if constexpr (requires { Comm::allows_threads(); }) {
    return Comm::allows_threads();
  } else {
    return true;
  }
}

/// Comm::failed(): whether a deadline or an error has ended the group, which must then be rebuilt. Default: false; a call leaves nothing
/// behind that waits for a peer.
template <class Comm>
bool failed([[maybe_unused]] Comm& comm) {
  if constexpr (requires { comm.failed(); }) {
    return comm.failed();
  } else {
    return false;
  }
}
/// Comm::begin_abort(): ends what is under way, from any thread, where kernels would wait for a dead peer for ever; failed() is then true.
/// Calls nothing of CUDA and does not throw. Default: nothing; what is under way ends by itself.
template <class Comm>
void begin_abort([[maybe_unused]] Comm& comm) {
  if constexpr (requires { comm.begin_abort(); }) comm.begin_abort();
}

/// Comm::ended_rank(), also of a window: the first rank whose process is known to have ended, or -1. Errors name it: another rank that is
/// missing may itself wait for it. Default: -1; the rank that is missing is named, if it is known.
template <class Comm>
int ended_rank([[maybe_unused]] Comm const& comm) {
  if constexpr (requires { comm.ended_rank(); }) {
    return comm.ended_rank();
  } else {
    return -1;
  }
}

}  // namespace moe::facts
