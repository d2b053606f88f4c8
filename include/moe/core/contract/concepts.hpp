// SPDX-License-Identifier: Apache-2.0
// core/contract/concepts.hpp: the contracts between a ModularKernel and its policies, each in a header of this folder, and the concepts of
// activations, communicators and windows. archetypes.hpp holds the smallest type that models each of them.
//
// A policy is a small struct of constexpr facts, which check.hpp judges, and one member template that is the object a layer owns:
//   Backend::Exchange<Config, Quant, Partial>   moves tokens to the experts and the results back
//   Experts::Kernel<Config, Quant, Format>      computes the experts of this rank
// Routers and quantisations are such objects themselves. Each required member is one concept and one sentence; a policy that lacks it gives
// one error, which names it. Optional members have defaults in facts.hpp and params.hpp.
#pragma once

#include <concepts>
#include <cstdint>

#include "moe/core/contract/backend.hpp"
#include "moe/core/contract/experts.hpp"
#include "moe/core/contract/facts.hpp"
#include "moe/core/contract/params.hpp"
#include "moe/core/contract/quantization.hpp"
#include "moe/core/contract/router.hpp"
#include "moe/core/layer_config.hpp"
#include "moe/core/space.hpp"

namespace moe {

// ---- Activation between the two GEMMs.

template <class A>
concept Activation = Named<A> && requires(A const& a, float x) {
  { a.gated() } -> std::convertible_to<bool>;  // consumes gate and up (2I), or one value (I)
  { a(x, x) } -> std::convertible_to<float>;   // (gate, up); an ungated activation ignores up
};

// ---- Communicator: collectives between ranks in one space. Sizes are bytes or elements per rank; all calls are collective.

/// Byte collectives: `counts[r]` and `offsets[r]` are bytes, in host memory, of size() entries.
template <class C>
concept CommunicatorMovesBytes = requires(C& c, void* out, void const* in, std::int64_t n, std::int64_t const* counts,
                                          std::int64_t const* offsets, int root, Stream<typename C::Space> stream) {
  c.all_gather(in, n, out, stream);
  c.all_gather_v(in, n, out, counts, offsets, stream);
  c.all_to_all_v(in, counts, offsets, out, counts, offsets, stream);
  c.broadcast(out, n, root, stream);
  c.barrier(stream);
};
/// Sums of float arrays; reduce_scatter_v gives rank r the elements [offsets[r], offsets[r] + counts[r]) of the sum.
template <class C>
concept CommunicatorReduces = requires(C& c, float* out, float const* in, std::int64_t n, std::int64_t const* counts,
                                       std::int64_t const* offsets, Stream<typename C::Space> stream) {
  c.all_reduce(in, n, out, stream);
  c.reduce_scatter_v(in, counts, offsets, out, stream);
};
template <class C>
concept Communicator = Named<C> && HasSpace<C> && CommunicatorHasRanks<C> && CommunicatorMovesBytes<C> && CommunicatorReduces<C>;

// ---- SymmetricMemory: a window that every rank of a node maps.

template <class W>
concept SymmetricMemory = HasSpace<W> && CommunicatorHasRanks<W> && requires(W& w, int peer, std::int64_t offset) {
  { w.peer(peer, offset) } -> std::convertible_to<void*>;  // the peer's copy of that offset, as mapped here
  { w.bytes() } -> std::convertible_to<std::int64_t>;
};

}  // namespace moe
