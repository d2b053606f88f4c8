// SPDX-License-Identifier: Apache-2.0
// core/concepts.hpp: the contracts between a ModularKernel and its policies. tests/archetypes.hpp holds the smallest type
// that models each of them. One named concept per requirement: a long `requires` block gives no readable error under nvcc.
//
// A policy is a small struct of constexpr facts, which core/check.hpp judges, and one member template that is the object a layer owns:
//   Backend::Exchange<Config, Quant, Partial>   moves tokens to the experts and the results back
//   Experts::Kernel<Config, Quant, Format>      computes the experts of this rank
// Routers and quantisations are such objects themselves.
#pragma once

#include <concepts>
#include <cstdint>

#include "moe/core/layer_config.hpp"
#include "moe/core/space.hpp"
#include "moe/core/tokens.hpp"

namespace moe {

/// Has a name that the command line and the registry use.
template <class P>
concept Named = requires {
  { P::kName } -> std::convertible_to<char const*>;
};
/// Lives in one memory space.
template <class P>
concept HasSpace = std::same_as<typename P::Space, space::host> || std::same_as<typename P::Space, space::cuda>;

// ---- Router: logits → (ids, weights). routing/row/route_args.hpp declares what select() takes.

template <class R>
concept RouterHasSizes = requires(R const& r) {
  { r.num_experts() } -> std::convertible_to<int>;
  { r.topk() } -> std::convertible_to<int>;
  { r.num_logits() } -> std::convertible_to<int>;  // width of router_logits
  { r.num_slots() } -> std::convertible_to<int>;   // width of topk_ids
};
/// Params are validated by the constructor (E_CONFIG).
template <class R>
concept RouterHasParams = std::constructible_from<R, typename R::Params const&>;
template <class R>
concept Router = Named<R> && RouterHasSizes<R> && RouterHasParams<R> && requires {
  { R::kWeightOnInput } -> std::convertible_to<bool>;
};

// ---- Quantization: how weights, activations and the dispatch payload are stored.

template <class Q>
concept QuantizesRows = requires(Q const& q, float const* x, std::int64_t n, typename Q::template Payload<float>* codes,
                                 typename Q::Scale* scales, float* out) {
  q.template quantize_row<float>(x, n, codes, scales);
  q.template dequantize_row<float>(codes, scales, n, out);
};
template <class Q>
concept QuantizesWeights = requires(Q const& q, float const* w, std::int64_t n, typename Q::template WeightCode<float>* codes,
                                    typename Q::WeightScale* scales, float* out) {
  q.template quantize_weight<float>(w, n, n, codes, scales);
  q.template dequantize_weight_row<float>(codes, scales, n, n, n, out);
};
/// Columns of a quantised row and of its scales; scale_cols is 0 if the scheme sends none.
template <class Q>
concept QuantizationHasSizes = requires(std::int64_t n) {
  { Q::payload_cols(n) } -> std::convertible_to<std::int64_t>;
  { Q::scale_cols(n) } -> std::convertible_to<std::int64_t>;
  { Q::weight_code_cols(n) } -> std::convertible_to<std::int64_t>;
  { Q::weight_scale_count(n, n) } -> std::convertible_to<std::int64_t>;
};
template <class Q>
concept Quantization = Named<Q> && QuantizationHasSizes<Q> && QuantizesRows<Q> && QuantizesWeights<Q> && requires {
  { Q::supports(dynamic, dynamic) } -> std::same_as<bool>;
};

// ---- Activation between the two GEMMs.

template <class A>
concept Activation = Named<A> && requires(A const& a, float x) {
  { a.gated() } -> std::convertible_to<bool>;  // consumes gate and up (2I), or one value (I)
  { a(x, x) } -> std::convertible_to<float>;   // (gate, up); an ungated activation ignores up
};

// ---- Communicator: collectives between ranks in one space. Sizes are bytes or elements per rank; all calls are collective.

template <class C>
concept CommunicatorHasRanks = requires(C& c) {
  { c.rank() } -> std::convertible_to<int>;
  { c.size() } -> std::convertible_to<int>;
};
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

// ---- PrepareAndFinalize: the backend.

template <class B>
concept BackendHasFacts = requires {
  { B::kFormat } -> std::convertible_to<ActivationFormat>;
  { B::kReduction } -> std::convertible_to<TopKReduction>;
  typename B::Comm;
  typename B::Params;
};
template <class B>
concept PrepareAndFinalize = Named<B> && HasSpace<B> && BackendHasFacts<B>;

/// The object of a backend that a layer owns. prepare → experts write expert_output() → finalize, in this order, once per forward.
template <class X, class Config>
concept ExchangeOf = requires(X& x, RoutedTokens<typename Config::Act, Config::hidden> const& in,
                              Rows<typename Config::Act, Config::hidden> out, Stream<typename X::Space> stream) {
  x.prepare(in, stream);    // collective: StandardTokens or BatchedTokens for this rank's experts
  x.expert_output();        // where the experts write what finalize() reads
  x.finalize(out, stream);  // collective: [M, H], every row written
  x.abandon(stream);        // collective: instead of prepare(), after this rank's arguments were refused: peers get E_PEER
};

// ---- Experts.

template <class E>
concept ExpertsHaveFacts = requires {
  { E::reads(ActivationFormat::standard) } -> std::same_as<bool>;
  { E::reduction(ActivationFormat::standard) } -> std::same_as<TopKReduction>;
  { E::kSharedMemoryLimit } -> std::convertible_to<int>;
  typename E::Params;
};
template <class E>
concept Experts = Named<E> && HasSpace<E> && ExpertsHaveFacts<E>;

}  // namespace moe
