// SPDX-License-Identifier: Apache-2.0
// backends/window/device/common/window.hpp: the host part that all exchanges over device windows share: where experts are, how to compute
// scales, failures that end a group and failures that do not.
#pragma once

#include <cstring>
#include <limits>
#include <vector>

#include "moe/backends/common/exchange_common.hpp"
#include "moe/backends/window/device/common/calls.hpp"
#include "moe/comm/window_manager.hpp"
#include "moe/core/buffer.hpp"
#include "moe/core/contract/communicator.hpp"
#include "moe/core/cuda_space.hpp"
#include "moe/parallel/placement.hpp"

namespace moe::backends::detail {

/// How a scheme computes its scales, derived from the scheme.
template <class Quant>
moe::detail::ScaleRule scale_rule() {
  moe::detail::ScaleRule rule;
  if constexpr (Quant::kQuantizesActivations) {
    float const three = Quant::Codec::scale(0x40400000U);  // amax 3: its scale is a power of two only if scales are rounded to them
    std::uint32_t bits = 0;
    std::memcpy(&bits, &three, sizeof(bits));
    rule.pow2 = (bits & 0x7fffffU) == 0;
    rule.amax_floor = Quant::Codec::scale(0) > 1e-8F ? 1e-4F : 1e-10F;
  }
  return rule;
}

/// How the device exchanges find the expert of an id: rank * L + local, L the most experts of a rank. No table if the id equals that.
class ExpertPlaces {
 public:
  ExpertPlaces(ExpertPlacement const& placement, Arena<space::cuda>& arena) {
    int const per_rank = placement.max_num_local();
    std::vector<std::int32_t> table;
    bool same = true;
    for (int p = 0; p < placement.num_physical(); ++p) {
      table.push_back(placement.owner(p) * per_rank + placement.local(p));
      same = same && table.back() == p;
    }
    if (!same) {
      device_ = arena.take<std::int32_t>(placement.num_physical());
      Memory<space::cuda>::copy_from_host(device_, table.data(), 4 * table.size());
    }
  }
  std::int32_t const* data() const { return device_; }

 private:
  std::int32_t* device_ = nullptr;
};

/// E_CONFIG unless the placement has as many ranks as the group.
inline void expect_group(ExpertPlacement const& placement, int ranks) {
  if (placement.ep_size() != ranks) {
    throw Error(ErrorCode::config, text("placement: ep_size is ", placement.ep_size(), ", the window has ", ranks, " ranks"));
  }
}
inline int checked_int(char const* what, std::int64_t value) {
  if (value < 1 || value > std::numeric_limits<std::int32_t>::max()) {
    throw Error(ErrorCode::config, text(what, ": ", value, " is out of range [1, 2^31)"));
  }
  return static_cast<int>(value);
}
/// Sets what the shapes of all device exchanges have in common. E_CONFIG for the placement or the number of tokens.
template <class Quant, class DeviceShape, class Config>
void set_sizes(DeviceShape& s, int ranks, Shape<Config> const& shape, std::int64_t max_tokens, ExpertPlacement const& placement,
               int blocks) {
  expect_group(placement, ranks);
  s.ranks = ranks;
  s.max_tokens = checked_int("max_tokens_per_rank", max_tokens);
  s.hidden = static_cast<int>(shape.hidden());
  s.topk = shape.topk();
  s.num_experts = placement.max_num_local() * ranks;
  s.fp8 = Quant::kQuantizesActivations;
  s.blocks = blocks;
}
/// E_ARG unless the rows have no gaps.
template <class View>
void expect_dense(char const* what, View const& rows) {
  if (rows.extent(0) > 1 && rows.stride(0) != rows.extent(1)) {
    throw Error(ErrorCode::argument, text(what, ": row stride ", rows.stride(0), ", expected ", rows.extent(1)));
  }
}
/// E_ARG unless kernels and the copy engine can move the rows in vectors of 16 bytes.
template <class View>
void expect_vectors(char const* what, View const& rows) {
  moe::detail::check_alignment(what, rows.data_handle(), rows.extent(0),
                               rows.stride(0) * static_cast<std::int64_t>(sizeof(*rows.data_handle())));
}
/// What the kernels require of a prepare's arguments beyond the checks of every exchange. E_ARG.
template <class Routed>
void expect_device_tokens(Routed const& in) {
  expect_dense("topk_ids", in.topk_ids);
  expect_dense("topk_weights", in.topk_weights);
  expect_vectors("hidden", in.hidden);
}
/// The same for a finalize's output.
template <class View>
void expect_device_output(View const& out, std::int64_t rows, std::int64_t hidden) {
  moe::detail::check_output(out, rows, hidden);
  expect_vectors("output", out);
}

/// The arguments of a prepare in the kernels' form.
template <int Hidden>
moe::detail::ExchangeTokens exchange_tokens(RoutedTokens<bf16, Hidden> const& in) {
  moe::detail::ExchangeTokens tokens;
  tokens.tokens = static_cast<int>(in.hidden.extent(0));
  tokens.x = in.hidden.data_handle();
  tokens.x_stride = in.hidden.stride(0);
  tokens.ids = in.topk_ids.data_handle();
  tokens.weights = in.topk_weights.data_handle();
  return tokens;
}

/// The failure of a group, if any. A rank that did not arrive may itself wait for one whose process has ended: names that one, where the
/// window knows it.
template <class Window>
comm::FailureRecord blaming_ended(Window const& window, comm::FailureRecord f) {
  bool const absent =
      f.code == 1U + static_cast<std::uint32_t>(ErrorCode::timeout) || f.code == 1U + static_cast<std::uint32_t>(ErrorCode::peer);
  if (int const ended = absent && f.recoverable == 0 ? facts::ended_rank(window) : -1; ended >= 0) {
    f.peer = ended;
    f.value = comm::kProcessEnded;
  }
  return f;
}
/// Throws the failure that ended the group, if any. At any time.
template <class Window>
void throw_if_group_over(Window const& window) {
  comm::FailureRecord const& f = *window.view().failure;
  if (*const_cast<std::uint32_t const volatile*>(&f.code) != 0) comm::throw_if_over(blaming_ended(window, f));
}

/// Throws the error that the kernels reported. Clears a failure that all ranks have seen: the group stays usable. The stream must be idle.
template <class Window>
void check_window(Window const& window) {
  comm::FailureRecord& f = *window.view().failure;
  comm::FailureRecord const seen = f;
  if (seen.code != 0 && seen.recoverable != 0) {
    f = {};
    Memory<space::cuda>::fill(window.peer(window.rank(), comm::WindowControl::claimed), 0, 4);
  }
  comm::throw_if_failed(blaming_ended(window, seen));
}

/// The words of every rank in this rank's control part.
template <class T, class Window>
std::vector<T> read_control(Window const& window, std::size_t offset) {
  std::vector<T> words(static_cast<std::size_t>(window.size()));
  Memory<space::cuda>::copy_to_host(words.data(), window.peer(window.rank(), static_cast<std::int64_t>(offset)), sizeof(T) * words.size());
  return words;
}

}  // namespace moe::backends::detail
