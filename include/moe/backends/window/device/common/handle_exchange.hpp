// SPDX-License-Identifier: Apache-2.0
// backends/window/device/common/handle_exchange.hpp: what LowLatency and HighThroughput between GPUs share: dispatches with handles, and
// how a rank ends a round that it refuses or gives up.
#pragma once

#include <cstdint>
#include <optional>

#include "moe/backends/common/exchange_common.hpp"
#include "moe/backends/common/handle_table.hpp"
#include "moe/backends/window/device/common/window.hpp"

namespace moe::backends::detail {

/// Base of an exchange over a device window whose dispatches have handles. Peers wait for every rank in each dispatch and each combine, so
/// a rank that takes no part enqueues both without rows. Exchange, of which this is a friend, has
///   window()
///   dispatch_nothing(Handle, code, stream, ...)   enqueues a dispatch without rows, which gives the peers `code`
///   combine_nothing(Handle, code, stream)         the same of a combine
///   receive_rest(Handle, stream)                  if its dispatch has halves: enqueues the receive half if that is still to come
template <class Exchange, class Record>
class HandleExchange {
 public:
  using Handle = moe::detail::Handle;

  /// Call it instead of prepare() or finalize(): this rank gives up the round. Peers get E_PEER from check(), and the next call works. With
  /// handles, call it instead of the combine (and of a missing receive half) of the oldest dispatch that has no combine yet.
  void abandon(cudaStream_t stream) {
    constexpr std::uint32_t kPeer = comm::refusal_code(ErrorCode::peer);
    std::optional<Handle> const given_up = order_.dispatched() ? last_ : handles_.oldest();
    if (!given_up) {
      refuse(0, kPeer, stream);
      return;
    }
    exchange().receive_rest(*given_up, stream);
    exchange().combine_nothing(*given_up, kPeer, stream);
    handles_.record(*given_up).state = DispatchState::idle;
    order_.set_idle();
    finish_refusal(given_up->buffer_set, stream);
  }

 protected:
  using DispatchState = moe::detail::DispatchState;

  explicit HandleExchange(int num_buffer_sets = 1) : handles_(num_buffer_sets) {}

  /// Throws the failure that ended the group, if any; E_STATE unless the handle's dispatch is in `state`.
  Record& expect(Handle handle, DispatchState state, char const* what) {
    throw_if_group_over(exchange().window());
    return handles_.expect(handle, state, what);
  }
  /// Enqueues a refused dispatch and combine, so that the peers' rounds end. `more`: further arguments of dispatch_nothing.
  template <class... More>
  void refuse(int buffer_set, std::uint32_t code, cudaStream_t stream, More... more) {
    Handle const handle = handles_.open_counted(buffer_set, DispatchState::idle);
    exchange().dispatch_nothing(handle, code, stream, more...);
    handles_.refuse(handle, code);
    finish_refusal(buffer_set, stream);
  }
  /// Enqueues the combine of a refused dispatch, if it is due. Call it after each combine.
  void finish_refusal(int buffer_set, cudaStream_t stream) {
    if (auto const due = handles_.take_refusal(buffer_set)) {
      exchange().combine_nothing(due->handle, due->code, stream);
    }
  }
  void receive_rest(Handle, cudaStream_t) {}

  moe::detail::HandleTable<Record> handles_;
  moe::detail::CallOrder order_;
  Handle last_;

 private:
  Exchange& exchange() { return static_cast<Exchange&>(*this); }
};

}  // namespace moe::backends::detail
