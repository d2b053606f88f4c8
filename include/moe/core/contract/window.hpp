// SPDX-License-Identifier: Apache-2.0
// core/contract/window.hpp: what a SymmetricMemory must have, a window that every rank of a node maps, and what the library's exchanges
// over windows need beyond it.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <tuple>
#include <utility>

#include "moe/core/contract/policy.hpp"
#include "moe/core/rule.hpp"

namespace moe {

template <class W>
concept WindowHasRank = requires(W& w) {
  { w.rank() } -> std::convertible_to<int>;
};
MOE_MEMBER(WindowHasRank, "the window", "int rank()", "this rank");
template <class W>
concept WindowHasSize = requires(W& w) {
  { w.size() } -> std::convertible_to<int>;
};
MOE_MEMBER(WindowHasSize, "the window", "int size()", "number of ranks");

template <class W>
concept WindowHasPeer = requires(W& w, int rank, std::int64_t offset) {
  { w.peer(rank, offset) } -> std::convertible_to<void*>;
};
MOE_MEMBER(WindowHasPeer, "the window", "void* peer(int rank, int64_t offset)", "that offset in the rank's part, as mapped here");
template <class W>
concept WindowHasBytes = requires(W& w) {
  { w.bytes() } -> std::convertible_to<std::int64_t>;
};
MOE_MEMBER(WindowHasBytes, "the window", "int64_t bytes()", "bytes of each rank's part");

namespace detail {
template <class W>
using WindowContract = std::tuple<Verdict<rules::PolicyHasSpace, HasSpace<W>, W>, Verdict<rules::WindowHasRank, WindowHasRank<W>, W>,
                                  Verdict<rules::WindowHasSize, WindowHasSize<W>, W>, Verdict<rules::WindowHasPeer, WindowHasPeer<W>, W>,
                                  Verdict<rules::WindowHasBytes, WindowHasBytes<W>, W>>;
}  // namespace detail

template <class W>
concept SymmetricMemory = detail::kAllHold<detail::WindowContract<W>>;

// ---- For the library's exchanges.

template <class W>
concept WindowHasComm = requires { typename W::Comm; };
MOE_MEMBER(WindowHasComm, "the window", "using Comm", "the communicator that it is made over");

/// The first 4096 bytes of each part (comm::kWindowControlBytes) belong to the window, user_bytes follow.
template <class W>
concept WindowIsBuilt = std::constructible_from<W, typename W::Comm&, std::int64_t, typename W::Params const&>;
MOE_MEMBER(WindowIsBuilt, "the window", "Window(Comm&, int64_t user_bytes, Params const&)",
           "with a struct Params; collective construction, the bytes zeroed");

template <class W>
concept WindowIsOfHost = requires(W& w, std::size_t offset, std::uint32_t word) {
  w.publish(0, offset, word);
  w.barrier();
};
template <class W>
concept WindowIsOfDevice = requires(W const& w) { w.view(); };
MOE_MEMBER(WindowIsOfHost, "the window of the host", "publish(int rank, size_t offset, word) and the rest of comm::HostWindow",
           "words and waits with a deadline; a base class has them");
MOE_MEMBER(WindowIsOfDevice, "the window of the device", "comm::WindowView const& view() const", "the form in which kernels take it");

namespace detail {
template <class W>
inline constexpr bool kOnDevice = false;
template <HasSpace W>
inline constexpr bool kOnDevice<W> = W::Space::kKind == SpaceKind::cuda;

template <class W>
using ExchangeWindowContract =
    std::tuple<Verdict<rules::WindowHasComm, WindowHasComm<W>, W>, Verdict<rules::WindowIsBuilt, WindowIsBuilt<W>, W>,
               Verdict<rules::WindowIsOfHost, kOnDevice<W> || WindowIsOfHost<W>, W>,
               Verdict<rules::WindowIsOfDevice, !kOnDevice<W> || WindowIsOfDevice<W>, W>>;

/// W::Comm; W where the contract, which is checked later, is not met.
template <class W>
struct CommOf {
  using type = W;
};
template <WindowHasComm W>
struct CommOf<W> {
  using type = typename W::Comm;
};
}  // namespace detail

/// The members of a window of the library's exchanges, one rule each.
template <class W>
using NeedsWindow = decltype(std::tuple_cat(std::declval<detail::WindowContract<W>>(), std::declval<detail::ExchangeWindowContract<W>>()));

/// A window of the library's exchanges.
template <class W>
concept ExchangeWindow = detail::kAllHold<NeedsWindow<W>>;

}  // namespace moe
