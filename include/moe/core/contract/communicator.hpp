// SPDX-License-Identifier: Apache-2.0
// core/contract/communicator.hpp: optional members of a communicator, each with its default. Required ones are in concepts.hpp.
#pragma once

#include <cstdint>

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

}  // namespace moe::facts
