// SPDX-License-Identifier: Apache-2.0
// backends/window/device/common/peer_exchange.hpp: the host part that the exchanges OneSided, TwoSided and Pplx between GPUs share.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <type_traits>

#include "moe/backends/common/carries.hpp"
#include "moe/backends/window/device/common/peer_rows.hpp"
#include "moe/backends/window/device/common/window.hpp"

namespace moe::backends::detail {

/// The shape that the ranks of such an exchange agree on. E_CONFIG, E_UNSUPPORTED for the shape.
template <class Quant, class Config>
moe::detail::PeerShape peer_shape(char const* name, int ranks, Shape<Config> const& shape, std::int64_t max_tokens,
                                  ExpertPlacement const& placement, int blocks) {
  moe::detail::PeerShape s;
  set_sizes<Quant>(s, ranks, shape, max_tokens, placement, blocks);
  s.name = name;
  comm::HeaderTag where;
  for (int p = 0; p < placement.num_physical(); ++p) {
    where.add(static_cast<std::uint64_t>(placement.owner(p))).add(static_cast<std::uint64_t>(placement.local(p)));
  }
  s.placement = where.value();
  s.check();
  return s;
}

/// Options that a rank may choose independently.
template <class Quant>
moe::detail::PeerOptions peer_options(bool programmatic, ExpertPlaces const& places, ExpertPlacement const& placement) {
  return {programmatic, scale_rule<Quant>(), places.data(), placement.num_physical()};
}

/// The arguments of a window that layers of one shape may share. `more`: what else, besides the shape, decides the layout.
inline comm::WindowArguments peer_window(moe::detail::PeerShape const& s, std::initializer_list<std::int64_t> more, std::size_t bytes) {
  comm::WindowArguments a{s.name,
                          {s.ranks, s.max_tokens, s.hidden, s.topk, s.num_experts, s.fp8, s.blocks},
                          static_cast<std::int64_t>(bytes - comm::kWindowControlBytes)};
  a.values.insert(a.values.end(), more);
  return a;
}
/// The shape with the number of the exchange among those of the window: ranks in different layers get E_MISMATCH.
inline moe::detail::PeerShape numbered(moe::detail::PeerShape shape, int number) {
  shape.layer = number;
  return shape;
}

/// The order of the calls of one exchange, and of all exchanges that share its window: at most one dispatch at a time is without its
/// combine (docs/semantics/exchange.md §3).
class PeerOrder {
 public:
  explicit PeerOrder(comm::WindowUse& use) : use_(&use) {}
  /// E_STATE unless the last round of this exchange, and of the window, was finalized or abandoned.
  void expect_idle() const {
    order_.expect_idle();
    if (use_->dispatched) {
      throw Error(ErrorCode::state, "prepare: another exchange of this window has a dispatch without its combine");
    }
  }
  void expect_dispatched(char const* what) const { order_.expect_dispatched(what); }
  bool dispatched() const { return order_.dispatched(); }
  /// Another exchange of the window has a dispatch in progress: no rank can begin one of this exchange.
  bool others_dispatched() const { return use_->dispatched && !order_.dispatched(); }
  /// Counts a dispatch of the window's exchanges; returns which half of the buffers it uses.
  int next_parity() { return static_cast<int>(++use_->dispatches[0] & 1U); }
  void set_dispatched() {
    order_.set_dispatched();
    use_->dispatched = true;
  }
  void set_idle() {
    order_.set_idle();
    use_->dispatched = false;
  }

 private:
  moe::detail::CallOrder order_;
  comm::WindowUse* use_;
};

/// Base of an exchange OneSided, TwoSided or Pplx between GPUs: a window, the table of places, the calls of its kernels. A rank that takes
/// no part in a round enqueues a dispatch and a combine without rows. Exchange, of which this is a friend, has
///   dispatch_nothing(parity, code, stream)   enqueues a dispatch without rows, which gives the peers `code`
///   combine_nothing(parity, code, stream)    the same of a combine; code 0: the dispatch has given it
///   give_up(code, stream)                    if its round has halves: enqueues what is left of the round
template <class Exchange, class Window, class Config, class Quant, class Partial, class Calls>
class PeerExchange {
 public:
  using Space = space::cuda;
  using Act = typename Config::Act;
  static_assert(window_exchange_returns_element<Space, Partial>);

  /// Throws the error that the kernels have reported since the last call; call after synchronising the stream. A refusal or an abandoned
  /// round is thrown once, on all ranks but the one that refused, and the group stays usable.
  void check() const { check_window(*window_); }
  /// Call it instead of prepare() or finalize(), or of their second halves: this rank gives up the round, and the next call works. Peers
  /// get E_PEER from check(): of TwoSided and Pplx, after prepare(), those that miss rows in this round, the others in the next.
  void abandon(cudaStream_t stream) {
    constexpr std::uint32_t kPeer = comm::refusal_code(ErrorCode::peer);
    if (order_.dispatched()) {
      exchange().give_up(kPeer, stream);
      order_.set_idle();
    } else if (!order_.others_dispatched()) {
      refuse(kPeer, stream);
    }
  }
  Window& window() const { return *window_; }

 protected:
  using Payload = typename Quant::template Payload<Act>;
  using Scale = typename Quant::Scale;

  /// Collective. make(view, shape, options): the calls over the window.
  template <class Params, class Make>
  PeerExchange(typename Window::Comm& comm, moe::detail::PeerShape const& shape, comm::WindowArguments const& arguments,
               Params const& params, ExpertPlacement const& placement, Arena<Space>& arena, Make&& make)
      : shape_(shape),
        window_(comm, params.manager, arguments, params.window),
        place_(placement, arena),
        calls_(make(window_->view(), numbered(shape_, window_.number()), peer_options<Quant>(params.programmatic, place_, placement))) {}

  /// Checks the arguments of a prepare. Throws the failure that ended the group, if any. Wrong arguments are refused, so that the peers'
  /// round ends, and thrown.
  moe::detail::ExchangeTokens accept(RoutedTokens<Act, Config::hidden> const& in, int max_tokens, cudaStream_t stream) {
    throw_if_group_over(*window_);
    try {
      moe::detail::check_routed_tokens(in, shape_.hidden, shape_.topk, max_tokens);
      expect_device_tokens(in);
      return exchange_tokens(in);
    } catch (Error const& e) {
      refuse(comm::refusal_code(e.code()), stream);
      throw;
    }
  }
  void give_up(std::uint32_t code, cudaStream_t stream) { exchange().combine_nothing(parity_, code, stream); }

  /// Where experts write `rows` rows: in the window, or in separate memory if they write float.
  void take_outputs(Arena<Space>& arena, std::int64_t rows) {
    if constexpr (std::is_same_v<Partial, float>) {
      partial_ = arena.take<float>(rows * shape_.hidden);
    }
  }
  Partial* outputs() {
    if constexpr (std::is_same_v<Partial, bf16>) {
      return calls_.outputs(parity_);
    } else {
      return partial_;
    }
  }
  /// The received rows, contiguous from byte `rows` of the window; their scales from byte `scales`.
  auto payload(std::size_t rows, std::int64_t n) const {
    return make_rows(static_cast<Payload const*>(calls_.template own<Payload>(rows)), n, Quant::payload_cols(shape_.hidden));
  }
  auto scales(std::size_t scales, std::int64_t n) const {
    auto const cols = Quant::scale_cols(shape_.hidden);
    return make_strided_rows(static_cast<Scale const*>(calls_.template own<Scale>(scales)), n, cols, cols == 0 ? 0 : shape_.scale_stride());
  }
  template <class T>
  auto choices(std::size_t at, std::int64_t n) const {
    return make_rows(static_cast<T const*>(calls_.template own<T>(at)), n, shape_.topk);
  }

  moe::detail::PeerShape shape_;
  comm::WindowHandle<Window> window_;
  ExpertPlaces place_;
  Calls calls_;
  Partial* partial_ = nullptr;
  moe::detail::ExchangeTokens tokens_;
  int parity_ = 0;
  PeerOrder order_{window_.use()};

 private:
  void refuse(std::uint32_t code, cudaStream_t stream) {
    int const parity = order_.next_parity();
    exchange().dispatch_nothing(parity, code, stream);
    exchange().combine_nothing(parity, 0, stream);
  }
  Exchange& exchange() { return static_cast<Exchange&>(*this); }
};

}  // namespace moe::backends::detail
